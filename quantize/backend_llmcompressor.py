"""Quantize with llm-compressor: the worker of the default backend.

Runs inside the quantize environment (`qkit.worker`); imports torch and llm-compressor only after
the request is read. Written against llm-compressor 0.14.
"""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkit.errors import EnvironmentMissingError, MeasurementError
from qkit.protocol import QuantizeRequest, QuantizeResult
from qkit.quantize.schemes import Scheme, is_ignored, scheme_for
from qkit.quantize.source_files import keep_source_files

REQUEST = QuantizeRequest
PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers")
#: Shards as the hub's own tools write them.
MAX_SHARD_SIZE = "5GB"

ProgressCallback = Callable[[str, int, int], None]


def run(request: QuantizeRequest, progress: ProgressCallback) -> QuantizeResult:
    """Quantize one checkpoint and save it, compressed, to `request.out_path`.

    The folder that is left is complete: weights, the source's tokenizer files and configuration,
    and it was loaded again and compared with the source.

    Raises:
        EnvironmentMissingError: CUDA is asked for and torch sees no GPU.
        MeasurementError: Nothing was quantized, or the saved checkpoint is broken.
    """
    if request.device == "cpu":
        # llm-compressor takes an accelerator wherever it sees one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if request.device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentMissingError(
            "the quantize environment's torch sees no CUDA device",
            fix="check the driver with nvidia-smi, or use --accelerator cpu",
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from qkit.quantize.backend_check import check_saved, source_reference

    set_seed(request.seed)
    source, out = Path(request.model_path), Path(request.out_path)
    trust = request.trust_remote_code

    progress("load", 0, 1)
    reference = source_reference(source, device=request.device, trust_remote_code=trust)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=trust)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    progress("load", 1, 1)

    with _collected_messages() as messages, _layer_progress(model, progress):
        _oneshot(model, tokenizer, request)
    quantized, ignored = _sort_modules(model)
    _check_all_quantized(quantized, ignored, request)

    progress("save", 0, 1)
    model.save_pretrained(out, save_compressed=True, max_shard_size=MAX_SHARD_SIZE)
    del model
    keep_source_files(source, out)
    progress("save", 1, 1)

    progress("check", 0, 1)
    report = check_saved(reference, out, device=request.device, trust_remote_code=trust)
    progress("check", 1, 1)
    return QuantizeResult(
        scheme=_scheme_name(_scheme(request)),
        quantized_modules=quantized,
        ignored_modules=ignored,
        skipped_mappings=tuple(messages.skipped),
        notes=(*messages.warnings, *_cpu_awq_note(request)),
        load_check=report.summary(),
        mean_kl=report.mean_kl,
        top1_agreement=report.top1_agreement,
        peak_memory_bytes=_peak_memory(request.device),
    )


def _oneshot(model: Any, tokenizer: Any, request: QuantizeRequest) -> None:
    from llmcompressor import oneshot

    arguments: dict[str, Any] = {"model": model, "processor": tokenizer}
    if request.calibration_path is not None:
        data = _calibration_set(Path(request.calibration_path))
        arguments |= {
            "dataset": data,
            "num_calibration_samples": len(data),
            # Shuffled when it was prepared; the order here is by length, hence by position.
            "shuffle_calibration_samples": False,
        }
    with _awq_without_accelerator():
        oneshot(recipe=_modifiers(request), **arguments)


def _modifiers(request: QuantizeRequest) -> list[Any]:
    """Return llm-compressor's modifiers for a request, in the order they run."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    groups: dict[str, Any] = {
        "config_groups": {"group_0": _compressed_tensors_scheme(_scheme(request))},
        "ignore": list(request.ignore),
    }
    gptq = {**groups, "dampening_frac": request.dampening_frac, "actorder": request.actorder}
    if request.method == "awq":
        return [AWQModifier(), QuantizationModifier(**groups)]
    if request.method == "gptq":
        return [GPTQModifier(**gptq)]
    if request.method in ("fp8", "rtn"):
        return [QuantizationModifier(**groups)]
    return [
        SmoothQuantModifier(smoothing_strength=request.smoothing_strength),
        GPTQModifier(**gptq),
    ]


def _scheme(request: QuantizeRequest) -> Scheme:
    return scheme_for(
        request.method,
        weight_bits=request.weight_bits,
        group_size=request.group_size,
        symmetric=request.symmetric,
        actorder=request.actorder,
    )


def _scheme_name(scheme: Scheme) -> str:
    """Return the scheme in llm-compressor's spelling, with the group size."""
    weights = scheme.weights
    if weights.type == "float":
        return "FP8_DYNAMIC"
    if scheme.activations:
        return "W8A8"
    size = f" g{weights.group_size}" if weights.group_size else ""
    return f"W{weights.num_bits}A16{'' if weights.symmetric else '_ASYM'}{size}"


def _compressed_tensors_scheme(scheme: Scheme) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights, inputs = scheme.weights, scheme.activations
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=weights.num_bits,
            type=weights.type,
            strategy=weights.strategy,
            group_size=weights.group_size,
            symmetric=weights.symmetric,
            dynamic=False,
            actorder=weights.actorder,
        ),
        input_activations=None
        if inputs is None
        else QuantizationArgs(
            num_bits=inputs.num_bits,
            type=inputs.type,
            strategy=inputs.strategy,
            symmetric=inputs.symmetric,
            dynamic=inputs.dynamic,
        ),
    )


def _calibration_set(path: Path) -> Any:
    """Return the prepared token ids as a data set llm-compressor takes as already tokenized."""
    from datasets import Dataset

    with path.open(encoding="utf-8") as stream:
        return Dataset.from_dict({"input_ids": [json.loads(line) for line in stream]})


def _sort_modules(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the quantized and of the kept Linear layers."""
    import torch

    quantized, ignored = [], []
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            quantized.append(name)
        elif isinstance(module, torch.nn.Linear):
            ignored.append(name)
    return tuple(quantized), tuple(ignored)


def _check_all_quantized(
    quantized: tuple[str, ...], ignored: tuple[str, ...], request: QuantizeRequest
) -> None:
    forgotten = [name for name in ignored if not is_ignored(name, request.ignore)]
    if forgotten or not quantized:
        named = ", ".join(forgotten[:3]) or "all of them"
        raise MeasurementError(
            f"llm-compressor left {len(forgotten) or 'all'} layers unquantized that it was asked"
            f" to quantize: {named}",
            where=request.model_path,
        )


@contextmanager
def _awq_without_accelerator() -> Iterator[None]:
    """Let AWQ run where there is no accelerator.

    llm-compressor 0.14 pins the memory of AWQ's cached inputs without asking whether there is a
    device to copy them to, and torch refuses that on a machine without one. Pinning only speeds
    up copies to a device, so doing nothing instead changes no result.
    """
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        yield
        return
    original = IntermediatesCache.pin_memory
    IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = original


def _cpu_awq_note(request: QuantizeRequest) -> tuple[str, ...]:
    import torch

    if request.method != "awq" or torch.accelerator.is_available():
        return ()
    return ("AWQ ran on a CPU with llm-compressor's memory pinning turned off",)


class _Messages:
    """What llm-compressor logged that belongs into the variant's record."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.skipped: list[str] = []

    def take(self, message: Any) -> None:
        text = str(message.record["message"]).strip()
        if skipped := _SKIPPED.match(text):
            reason = text.rpartition(" because ")[2].rstrip(".")
            if "incompatible balance layers" in reason:
                reason = "its outputs are fewer than o_proj's inputs (grouped-query attention)"
            _append_new(self.skipped, f"{skipped[1]}: {reason}")
        elif message.record["level"].name in _WARNING_LEVELS and not _is_expected(text):
            _append_new(self.warnings, text)


#: By name: llm-compressor logs its per-layer losses on a level of its own above WARNING.
_WARNING_LEVELS = ("WARNING", "ERROR", "CRITICAL")
#: "Skipping LAYER for mapping … because …", and what SmoothQuant and empty layers print.
_SKIPPED = re.compile(r"Skipping (?:SmoothQuant for |smooth_layer )?([\w.]+)")
#: Warnings that say nothing a person could act on: the device is in the record, data-free methods
#: take no data, qkit saves the configuration itself, and skipped mappings are recorded one by one.
_EXPECTED = (
    "No accelerator available",
    "Running oneshot without calibration data",
    "Disabling tokenizer parallelism",
    "Failed to modify config",
    "Failed to find ['tie_word_embeddings']",
    "Failed to find ['torch_dtype', 'dtype']",
    "mappings were skipped due to incompatible shapes",
)


def _is_expected(text: str) -> bool:
    return any(part in text for part in _EXPECTED)


def _append_new(items: list[str], item: str) -> None:
    if item not in items:
        items.append(item)


@contextmanager
def _collected_messages() -> Iterator[_Messages]:
    """Collect llm-compressor's warnings and skipped mappings while it runs."""
    # Its own logger setup runs on import and removes every sink there was.
    import llmcompressor  # noqa: F401
    from loguru import logger

    messages = _Messages()
    sink = logger.add(messages.take, level="DEBUG")
    try:
        yield messages
    finally:
        logger.remove(sink)


@contextmanager
def _layer_progress(model: Any, progress: ProgressCallback) -> Iterator[None]:
    """Report which decoder layer calibration has reached, by forward hooks on the layers."""
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    current = [-1]

    def hook_for(index: int) -> Callable[..., None]:
        def hook(*_args: Any) -> None:
            if index != current[0]:
                current[0] = index
                progress("quantize", index, len(layers))

        return hook

    hooks = [layer.register_forward_hook(hook_for(i)) for i, layer in enumerate(layers)]
    progress("quantize", 0, max(1, len(layers)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    progress("quantize", max(1, len(layers)), max(1, len(layers)))


def _peak_memory(device: str) -> int:
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
