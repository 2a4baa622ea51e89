"""What the workers of all backends share.

Runs inside their environments; imports torch only when called.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkit.errors import EnvironmentMissingError, MeasurementError
from qkit.protocol import QuantizeRequest, QuantizeResult, write_json
from qkit.quantize.backend_check import LogitsReport, old_rope_settings
from qkit.quantize.checkpoint import CONFIG_FILE, HEAD, HEAD_WEIGHT
from qkit.quantize.schemes import Scheme, scheme_for

ProgressCallback = Callable[[str, int, int], None]


def choose_device(device: str) -> str:
    """Return torch's name of the device, after making sure that it is the one used.

    To be called before torch is imported: these libraries take a GPU wherever they see one.

    Raises:
        EnvironmentMissingError: CUDA is asked for and torch sees no GPU.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentMissingError(
            "the environment's torch sees no CUDA device",
            fix="check the driver with nvidia-smi, or use --accelerator cpu",
        )
    return "cuda:0"


def read_calibration(request: QuantizeRequest) -> list[list[int]]:
    """Return the prepared samples, lists of token ids of one length (the last may be shorter)."""
    if request.calibration_path is None:
        raise ValueError(f"{request.method} needs calibration data")
    with Path(request.calibration_path).open(encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def torch_dtype_of(source: Path) -> Any:
    """Return the torch dtype config.json names, bfloat16 where it names none."""
    import torch

    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    return getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))


@contextmanager
def layer_progress(layers: Any, progress: ProgressCallback) -> Iterator[None]:
    """Report which decoder layer calibration has reached, by forward hooks on the layers."""
    total = max(1, len(layers))
    reached = [-1]

    def hook_for(index: int) -> Callable[..., None]:
        def hook(*_args: Any) -> None:
            # Not "greater": SmoothQuant and GPTQ each go through all layers.
            if index != reached[0]:
                reached[0] = index
                progress("quantize", index, total)

        return hook

    hooks = [layer.register_forward_hook(hook_for(i)) for i, layer in enumerate(layers)]
    progress("quantize", 0, total)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    progress("quantize", total, total)


def module_names(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the packed layers and of the Linear layers that are left.

    AutoAWQ, GPTQModel and AutoGPTQ have several classes of packed layers; all hold a `qweight`.

    Raises:
        MeasurementError: A layer other than the head was left, or none was packed.
    """
    import torch

    modules = dict(model.named_modules())
    quantized = tuple(name for name, module in modules.items() if hasattr(module, "qweight"))
    kept = tuple(
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) and name not in quantized
    )
    forgotten = [name for name in kept if name != HEAD]
    if forgotten or not quantized:
        raise MeasurementError(
            f"the backend left {len(forgotten) or 'all'} layers unquantized that it was asked to"
            f" quantize: {', '.join(forgotten[:3]) or 'all of them'}"
        )
    return quantized, kept


def skipped_mappings(source: Path) -> tuple[str, ...]:
    """Name what AWQ leaves unscaled, which AutoAWQ and GPTQModel do not log.

    Both scale v_proj for o_proj only where the two weights have one shape, that is, not under
    grouped-query attention.
    """
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) == heads:
        return ()
    reason = "its outputs are fewer than o_proj's inputs (grouped-query attention)"
    return tuple(
        f"model.layers.{layer}.self_attn.v_proj: {reason}"
        for layer in range(config["num_hidden_layers"])
    )


def load_unpacked(
    path: Path,
    request: QuantizeRequest,
    unpack: Callable[[Mapping[str, Any], str, QuantizeRequest], Any],
) -> Any:
    """Load a packed checkpoint as an ordinary 16-bit model, its weights unpacked.

    Needs no kernel, and computes with what the files hold.

    Args:
        path: Folder of the variant.
        request: What it was made from and on what device it is to run.
        unpack: Returns the weight, of shape (outputs, inputs), of a layer of the given name from
            all tensors.
    """
    import transformers
    from accelerate import dispatch_model, infer_auto_device_map
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    trust = request.trust_remote_code
    source = Path(request.model_path)
    config = transformers.AutoConfig.from_pretrained(
        source, trust_remote_code=trust, **old_rope_settings(source, version)
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, torch_dtype=torch_dtype_of(source), trust_remote_code=trust
    )
    state = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "qweight":
            state[f"{layer}.weight"] = unpack(tensors, layer, request)
        elif kind not in ("qzeros", "scales", "g_idx"):
            state[name] = tensor
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {HEAD_WEIGHT}:
        raise ValueError(f"tensors missing: {missing[:3]}, unexpected: {unexpected[:3]}")
    model.tie_weights()
    if request.device == "cuda":
        split = list(model._no_split_modules or ())
        model = dispatch_model(model, infer_auto_device_map(model, no_split_module_classes=split))
    return model


def write_quantization_config(folder: Path, settings: dict[str, Any]) -> None:
    """Replace config.json's `quantization_config`."""
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "quantization_config": settings})


def scheme_of(request: QuantizeRequest) -> Scheme:
    """Return the scheme that is asked for."""
    return scheme_for(
        request.method,
        weight_bits=request.weight_bits,
        group_size=request.group_size,
        symmetric=request.symmetric,
        actorder=request.actorder,
        scales=request.scales,
        rounding=request.rounding,
    )


def scheme_name(scheme: Scheme) -> str:
    """Return a scheme in llm-compressor's spelling, with the group size."""
    weights, inputs = scheme.weights, scheme.activations
    if weights.type == "float":
        return {"tensor": "FP8", "channel": "FP8_DYNAMIC", "block": "FP8_BLOCK"}[weights.strategy]
    if inputs:
        return "W8A8" if inputs.dynamic else "W8A8 static"
    size = f" g{weights.group_size}" if weights.group_size else ""
    return f"W{weights.num_bits}A16{'' if weights.symmetric else '_ASYM'}{size}"


def result_of(
    request: QuantizeRequest,
    modules: tuple[tuple[str, ...], tuple[str, ...]],
    report: LogitsReport,
    *,
    skipped: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> QuantizeResult:
    """Return what a worker reports.

    Args:
        request: What it was asked for.
        modules: Names of the quantized and of the kept Linear layers.
        report: How what was saved compares with the source.
        skipped: Smoothing mappings that were left out.
        notes: What else a person should know.
    """
    return QuantizeResult(
        scheme=scheme_name(scheme_of(request)),
        quantized_modules=modules[0],
        ignored_modules=modules[1],
        skipped_mappings=skipped,
        notes=notes,
        load_check=report.summary(),
        mean_kl=report.mean_kl,
        top1_agreement=report.top1_agreement,
        peak_memory_bytes=_peak_memory(request.device),
    )


def _peak_memory(device: str) -> int:
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
