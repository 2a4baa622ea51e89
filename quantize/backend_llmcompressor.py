"""Quantize with llm-compressor: the worker of the default backend.

Runs inside the quantize environment (`qkit.worker`); imports torch and llm-compressor only after
the request is read. Written against llm-compressor 0.14.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qkit.errors import MeasurementError
from qkit.protocol import QuantizeRequest, QuantizeResult
from qkit.quantize.backend_damping import damping_retries
from qkit.quantize.backend_shared import (
    ProgressCallback,
    choose_device,
    layer_progress,
    read_calibration,
    result_of,
    scheme_of,
)
from qkit.quantize.schemes import (
    KV_CACHE_FP8,
    ActivationFormat,
    KvCacheFormat,
    Scheme,
    WeightFormat,
    is_ignored,
)
from qkit.quantize.source_files import keep_source_files

REQUEST = QuantizeRequest
PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers")
#: Shards as the hub's own tools write them.
MAX_SHARD_SIZE = "5GB"


def run(request: QuantizeRequest, progress: ProgressCallback) -> QuantizeResult:
    """Quantize one checkpoint and save it, compressed, to `request.out_path`.

    The folder that is left is complete: weights, the source's tokenizer files and configuration,
    and it was loaded again and compared with the source.

    Raises:
        EnvironmentMissingError: CUDA is asked for and torch sees no GPU.
        MeasurementError: Nothing was quantized, or the saved checkpoint is broken.
    """
    choose_device(request.device)
    import llmcompressor  # noqa: F401  (takes seconds; not to be counted as the first stage's)
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from qkit.quantize.backend_check import check_saved, source_reference

    set_seed(request.seed)
    source, out = Path(request.model_path), Path(request.out_path)
    trust = request.trust_remote_code

    progress("load", 0, 1)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=trust)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    progress("load", 1, 1)

    progress("reference", 0, 1)
    reference = source_reference(
        source,
        device=request.device,
        trust_remote_code=trust,
        tokenize=lambda text: list(tokenizer(text)["input_ids"]),
        # llm-compressor takes the model from the CPU, layer by layer; a GPU answers sooner from a
        # copy of its own.
        load=_returning(model) if request.device == "cpu" else None,
    )
    progress("reference", 1, 1)

    with (
        _collected_messages() as messages,
        damping_retries(model) as retries,
        layer_progress(model.model.layers, progress),
    ):
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
    return result_of(
        request,
        (quantized, ignored),
        report,
        skipped=tuple(messages.skipped),
        notes=(*retries.notes(), *messages.warnings, *_cpu_awq_note(request)),
    )


def _returning(model: Any) -> Callable[[Path], Any]:
    return lambda _path: model


def _oneshot(model: Any, tokenizer: Any, request: QuantizeRequest) -> None:
    from llmcompressor import oneshot

    arguments: dict[str, Any] = {"model": model, "processor": tokenizer}
    if request.calibration_path is not None:
        from datasets import Dataset

        # Token ids, which llm-compressor takes as already tokenized.
        data = Dataset.from_dict({"input_ids": read_calibration(request)})
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
        "config_groups": {"group_0": _compressed_tensors_scheme(scheme_of(request))},
        "ignore": list(request.ignore),
        "kv_cache_scheme": _quantization_args(KV_CACHE_FP8) if request.kv_cache else None,
    }
    gptq = {**groups, "dampening_frac": request.dampening_frac, "actorder": request.actorder}
    if request.method == "awq":
        return [AWQModifier(), QuantizationModifier(**groups)]
    if request.method == "gptq":
        return [GPTQModifier(**gptq)]
    if request.method in ("fp8", "rtn"):
        return [QuantizationModifier(**groups)]
    # Each modifier has a pass of its own, so inputs are measured as smoothed.
    smooth = SmoothQuantModifier(smoothing_strength=request.smoothing_strength)
    if request.rounding == "rtn":
        return [smooth, QuantizationModifier(**groups)]
    return [smooth, GPTQModifier(**gptq)]


def _compressed_tensors_scheme(scheme: Scheme) -> Any:
    from compressed_tensors.quantization import QuantizationScheme

    inputs = scheme.activations
    return QuantizationScheme(
        targets=["Linear"],
        weights=_quantization_args(scheme.weights),
        input_activations=None if inputs is None else _quantization_args(inputs),
    )


def _quantization_args(part: WeightFormat | ActivationFormat | KvCacheFormat) -> Any:
    """Return what compressed-tensors calls one part of a scheme: the same fields by name."""
    from compressed_tensors.quantization import QuantizationArgs

    settings = {key: value for key, value in asdict(part).items() if value is not None}
    if not settings.get("dynamic", False) and not isinstance(part, WeightFormat):
        # The extremes over all samples; the default is a moving average, which forgets.
        settings["observer"] = "static_minmax"
    return QuantizationArgs(**settings)


def _sort_modules(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the quantized and of the kept Linear layers."""
    import torch

    quantized: list[str] = []
    ignored: list[str] = []
    for name, module in model.named_modules():
        # With KV-cache scales the attention modules have a scheme as well.
        if isinstance(module, torch.nn.Linear):
            has_scheme = getattr(module, "quantization_scheme", None) is not None
            (quantized if has_scheme else ignored).append(name)
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
