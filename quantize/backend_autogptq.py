"""Quantize with AutoGPTQ: the worker of a backend that is archived upstream and needs CUDA.

Writes GPTQ's format. Runs inside the autogptq environment (AutoGPTQ 0.7.1, transformers 4.44).
AutoGPTQ's maintained successor is GPTQModel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkit.protocol import QuantizeRequest, QuantizeResult
from qkit.quantize.backend_shared import (
    ProgressCallback,
    choose_device,
    layer_progress,
    load_unpacked,
    module_names,
    read_calibration,
    result_of,
    torch_dtype_of,
    write_quantization_config,
)
from qkit.quantize.checkpoint import HEAD_WEIGHT, inspect_checkpoint
from qkit.quantize.source_files import keep_source_files

REQUEST = QuantizeRequest
PACKAGES = ("auto-gptq", "torch", "transformers")
MAX_SHARD_SIZE = "5GB"
TOKENIZER_FILE = "tokenizer.json"


def run(request: QuantizeRequest, progress: ProgressCallback) -> QuantizeResult:
    """Quantize one checkpoint with AutoGPTQ and save it to `request.out_path`.

    Raises:
        EnvironmentMissingError: torch sees no GPU.
        MeasurementError: A layer was left out, or the result is broken.
    """
    choose_device(request.device)
    import transformers
    from auto_gptq import AutoGPTQForCausalLM

    from qkit.quantize.backend_check import check_saved, old_rope_settings, source_reference

    transformers.set_seed(request.seed)
    source, out, trust = Path(request.model_path), Path(request.out_path), request.trust_remote_code
    samples = read_calibration(request)

    progress("load", 0, 1)
    reference = source_reference(
        source,
        device=request.device,
        trust_remote_code=trust,
        tokenize=lambda text: _tokenize(source, text),
    )
    wrapper = AutoGPTQForCausalLM.from_pretrained(
        str(source),
        _config(request),
        torch_dtype=torch_dtype_of(source),
        trust_remote_code=trust,
        **old_rope_settings(source, (4, 44)),
    )
    progress("load", 1, 1)

    with layer_progress(wrapper.model.model.layers, progress):
        wrapper.quantize(
            [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples],
            cache_examples_on_gpu=False,
            # In float16 it would pack with a kernel that is compiled for one torch version.
            use_cuda_fp16=False,
        )
    modules = module_names(wrapper.model)

    progress("save", 0, 1)
    _save(wrapper.model, request, out)
    del wrapper
    keep_source_files(source, out)
    progress("save", 1, 1)

    progress("check", 0, 1)
    report = check_saved(
        reference,
        out,
        device=request.device,
        trust_remote_code=trust,
        # Needs none of AutoGPTQ's kernels, which are compiled for one older torch.
        load=lambda path: load_unpacked(path, request, _unpack),
    )
    progress("check", 1, 1)
    return result_of(request, modules, report)


def _tokenize(source: Path, text: str) -> list[int]:
    """Return a text's token ids by tokenizer.json.

    transformers 4.44's tokenizers cannot read the file as newer ones write it, with merges as pairs
    in place of pairs joined by a space.
    """
    from tokenizers import Tokenizer

    content = json.loads((source / TOKENIZER_FILE).read_text(encoding="utf-8"))
    merges = content["model"].get("merges")
    if merges and not isinstance(merges[0], str):
        content["model"]["merges"] = [" ".join(pair) for pair in merges]
    return list(Tokenizer.from_str(json.dumps(content)).encode(text).ids)


def _config(request: QuantizeRequest) -> Any:
    from auto_gptq import BaseQuantizeConfig

    return BaseQuantizeConfig(
        bits=request.weight_bits,
        # One scale a row.
        group_size=request.group_size if request.weight_bits == 4 else -1,
        damp_percent=request.dampening_frac,
        desc_act=request.actorder == "static",
        static_groups=request.actorder == "static",
        sym=request.symmetric,
        true_sequential=True,
    )


def _save(model: Any, request: QuantizeRequest, out: Path) -> None:
    """Save as shards with an index; AutoGPTQ's own saving writes one file and a tied head twice."""
    from huggingface_hub import save_torch_state_dict

    # With static groups the columns are back in their places when a layer is finished: nothing is
    # to be reordered when it is served.
    config = {**_config(request).to_dict(), "desc_act": False}
    for key in ("model_name_or_path", "model_file_base_name"):
        del config[key]
    model.to("cpu")
    out.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(out)
    there = inspect_checkpoint(Path(request.model_path)).tensors
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        # Its layers all have a bias, zero where the source has none.
        if name in there or not name.endswith(".bias") or tensor.any()
    }
    save_torch_state_dict(
        tensors,
        out,
        max_shard_size=MAX_SHARD_SIZE,
        shared_tensors_to_discard=[HEAD_WEIGHT],
    )
    write_quantization_config(out, config)


def _unpack(tensors: Mapping[str, Any], layer: str, request: QuantizeRequest) -> Any:
    """Return a layer's weight, of shape (outputs, inputs), from GPTQ's format.

    32-bit words hold several weights along the inputs and several zero points along the outputs,
    the first in the lowest bits; zero points are stored less one.
    """
    import torch

    shifts = torch.arange(0, 32, request.weight_bits, dtype=torch.int32)
    mask = 2**request.weight_bits - 1
    words, zeros = tensors[f"{layer}.qweight"], tensors[f"{layer}.qzeros"]
    weight = (words.unsqueeze(1) >> shifts.view(1, -1, 1) & mask).flatten(0, 1)
    zero = (zeros.unsqueeze(2) >> shifts.view(1, 1, -1) & mask).flatten(1, 2) + 1
    group = tensors[f"{layer}.g_idx"].long()
    return ((weight - zero[group]) * tensors[f"{layer}.scales"][group].float()).t()
