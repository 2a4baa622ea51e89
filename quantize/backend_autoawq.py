"""Quantize with AutoAWQ: the worker of a backend that is archived upstream.

Writes AutoAWQ's GEMM format. Runs inside the autoawq environment (AutoAWQ 0.2.9, transformers
4.51). AutoAWQ's work goes on in llm-compressor, which is qkit's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkit.errors import InputError, MeasurementError
from qkit.protocol import QuantizeRequest, QuantizeResult
from qkit.quantize.backend_shared import (
    ProgressCallback,
    choose_device,
    layer_progress,
    load_unpacked,
    module_names,
    read_calibration,
    result_of,
    skipped_mappings,
)
from qkit.quantize.source_files import keep_source_files

REQUEST = QuantizeRequest
PACKAGES = ("autoawq", "torch", "transformers")
MAX_SHARD_SIZE = "5GB"
#: Tokens that go through a layer at once; the results do not depend on it.
BATCH_TOKENS = 16_384
#: What AutoAWQ keeps of a decoder layer's inputs is 16-bit.
ACTIVATION_BYTES = 2


def run(request: QuantizeRequest, progress: ProgressCallback) -> QuantizeResult:
    """Quantize one checkpoint with AutoAWQ and save it to `request.out_path`.

    Raises:
        EnvironmentMissingError: CUDA is asked for and torch sees no GPU.
        InputError: The calibration samples do not fit into memory.
        MeasurementError: Samples were dropped, a layer was left out, or the result is broken.
    """
    choose_device(request.device)
    import torch
    import transformers
    from awq import AutoAWQForCausalLM

    from qkit.quantize.backend_check import check_saved, old_rope_settings, source_reference

    transformers.set_seed(request.seed)
    source, out, trust = Path(request.model_path), Path(request.out_path), request.trust_remote_code
    samples = read_calibration(request)

    progress("load", 0, 1)
    reference = source_reference(source, device=request.device, trust_remote_code=trust)
    wrapper = AutoAWQForCausalLM.from_pretrained(
        str(source),
        torch_dtype="auto",
        trust_remote_code=trust,
        **old_rope_settings(source, (4, 51)),
    )
    model = wrapper.model
    _check_memory(model.config, sum(map(len, samples)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    progress("load", 1, 1)

    length = max(map(len, samples))
    with torch.no_grad(), layer_progress(model.model.layers, progress):
        wrapper.quantize(
            tokenizer,
            quant_config={
                "zero_point": True,
                "q_group_size": request.group_size,
                "w_bit": request.weight_bits,
                "version": "GEMM",
            },
            calib_data=samples,
            # By default it takes 128 samples, and silently none that is longer than 512.
            max_calib_samples=len(samples),
            max_calib_seq_len=length,
            n_parallel_calib_samples=max(1, BATCH_TOKENS // length),
            quantizer_cls=_checked_quantizer(samples),
        )
    modules = module_names(model)

    progress("save", 0, 1)
    wrapper.save_quantized(str(out), shard_size=MAX_SHARD_SIZE)
    del model, wrapper
    keep_source_files(source, out)
    progress("save", 1, 1)

    progress("check", 0, 1)
    report = check_saved(
        reference,
        out,
        device=request.device,
        trust_remote_code=trust,
        # AutoAWQ and transformers run GEMM layers on a GPU only.
        load=lambda path: load_unpacked(path, request, _unpack),
    )
    progress("check", 1, 1)
    return result_of(
        request, modules, report, skipped=skipped_mappings(source), notes=_notes(samples)
    )


def _unpack(tensors: Mapping[str, Any], layer: str, request: QuantizeRequest) -> Any:
    """Return a layer's weight, of shape (outputs, inputs), by AutoAWQ's own unpacking."""
    from awq.utils.packing_utils import dequantize_gemm

    return dequantize_gemm(
        tensors[f"{layer}.qweight"],
        tensors[f"{layer}.qzeros"],
        tensors[f"{layer}.scales"],
        request.weight_bits,
        request.group_size,
    ).t()


def _checked_quantizer(samples: list[list[int]]) -> Any:
    """Return AutoAWQ's quantizer, made to stop if it takes other data than it was given.

    It joins the samples and cuts them into blocks of the longest one's length; only what fills no
    block may be left out.
    """
    from awq.quantize.quantizer import AwqQuantizer

    length = max(map(len, samples))
    blocks = sum(map(len, samples)) // length

    class CheckedQuantizer(AwqQuantizer):  # type: ignore[misc]
        def init_quant(self, *args: Any, **kwargs: Any) -> Any:
            prepared = super().init_quant(*args, **kwargs)
            found = tuple(prepared[2].shape[:2])
            if found != (blocks, length):
                raise MeasurementError(
                    f"AutoAWQ took {found[0]} calibration blocks of {found[1]} tokens; given were"
                    f" {blocks} of {length}"
                )
            return prepared

    return CheckedQuantizer


def _check_memory(config: Any, tokens: int) -> None:
    """Refuse more calibration data than the machine can hold one decoder layer's inputs of.

    AutoAWQ keeps the inputs of all seven Linear layers of a decoder layer at once: six of the
    model's width, one of its MLP's, and the layer's own.
    """
    import psutil

    needed = tokens * ACTIVATION_BYTES * (7 * config.hidden_size + config.intermediate_size)
    available = psutil.virtual_memory().available
    if needed > available:
        gib = 1024**3
        raise InputError(
            f"AutoAWQ keeps {needed / gib:.1f} GiB of activations for {tokens} calibration tokens;"
            f" {available / gib:.1f} GiB are free",
            fix="use fewer calibration samples (its own default is 128 of 512 tokens), or backend"
            " llmcompressor",
        )


def _notes(samples: list[list[int]]) -> tuple[str, ...]:
    length = max(map(len, samples))
    left = sum(map(len, samples)) % length
    if not left:
        return ()
    return (f"AutoAWQ left out the last {left} calibration tokens, too few for a block",)
