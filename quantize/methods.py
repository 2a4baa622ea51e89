"""From a recipe's variant to what a worker is asked for and what the table calls it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qkit.protocol import QuantizeRequest
from qkit.quantize.schemes import EIGHT_BIT_METHODS, GROUPED_METHODS, Scheme, scheme_for
from qkit.recipe import Method, Variant

#: Methods that look at activations whatever their settings.
CALIBRATED_METHODS: tuple[Method, ...] = ("awq", "gptq", "smoothquant")

Setting = str | int | float | bool | tuple[str, ...] | None


def needs_calibration(variant: Variant) -> bool:
    """Tell whether a variant needs calibration data.

    FP8 with scales measured while serving and round-to-nearest need none, unless the scales of the
    KV cache are wanted.
    """
    return (
        variant.method in CALIBRATED_METHODS
        or variant.scales == "static"
        or variant.kv_cache is not None
    )


def is_symmetric(variant: Variant) -> bool:
    """Return whether a variant's weights have no zero point: only AWQ has one by default."""
    return variant.method != "awq" if variant.symmetric is None else variant.symmetric


def scheme_of(variant: Variant) -> Scheme:
    """Return the scheme a variant's layers are stored in."""
    return scheme_for(
        variant.method,
        weight_bits=variant.weight_bits,
        group_size=variant.group_size,
        symmetric=is_symmetric(variant),
        actorder=variant.actorder,
        scales=variant.scales,
        rounding=variant.rounding,
    )


def scheme_label(variant: Variant) -> str:
    """Return the scheme as the table shows it, for example "W4A16 asym g128"."""
    label = _linear_label(variant)
    return f"{label}, FP8 KV cache" if variant.kv_cache else label


def _linear_label(variant: Variant) -> str:
    if variant.method == "fp8":
        return f"FP8 {variant.scales} (W8A8)"
    if variant.method == "smoothquant":
        static = " static" if variant.scales == "static" else ""
        rounding = "GPTQ" if variant.rounding == "gptq" else "round to nearest"
        return f"INT8 W8A8{static} (SmoothQuant {variant.smoothing_strength:g} + {rounding})"
    kind = "sym" if is_symmetric(variant) else "asym"
    size = f"g{variant.group_size}" if variant.weight_bits == 4 else "per channel"
    label = f"W{variant.weight_bits}A16 {kind} {size}"
    if variant.method == "rtn":
        return f"{label} (round to nearest)"
    if variant.method == "gptq" and variant.actorder:
        label += f" actorder={variant.actorder}"
    return label


def settings_of(variant: Variant) -> Mapping[str, Setting]:
    """Return the settings that shape a variant, those its method does not read left out."""
    settings: dict[str, Setting] = {"ignore": variant.ignore}
    if variant.method in EIGHT_BIT_METHODS:
        settings["weight_bits"] = variant.weight_bits
    if variant.method in GROUPED_METHODS:
        settings["symmetric"] = is_symmetric(variant)
        if variant.weight_bits == 4:
            settings["group_size"] = variant.group_size
    if variant.method == "smoothquant":
        settings["smoothing_strength"] = variant.smoothing_strength
        settings["rounding"] = variant.rounding
    if variant.method == "gptq" or (variant.method == "smoothquant" and variant.rounding == "gptq"):
        settings |= {"actorder": variant.actorder, "dampening_frac": variant.dampening_frac}
    if variant.method in ("fp8", "smoothquant"):
        settings["scales"] = variant.scales
    if variant.kv_cache:
        settings["kv_cache"] = variant.kv_cache
    return settings


def build_request(
    variant: Variant,
    *,
    source: Path,
    out: Path,
    calibration: Path | None,
    seed: int,
    device: str,
    trust_remote_code: bool,
) -> QuantizeRequest:
    """Return the request for a worker.

    Args:
        variant: What to make.
        source: Source checkpoint folder.
        out: Folder the worker writes to.
        calibration: Token ids written by `prepare_calibration`; None for data-free methods.
        seed: Seed of every random choice.
        device: "cpu" or "cuda".
        trust_remote_code: Whether the checkpoint's own code may run.
    """
    return QuantizeRequest(
        method=variant.method,
        model_path=str(source),
        out_path=str(out),
        calibration_path=None if calibration is None else str(calibration),
        weight_bits=variant.weight_bits,
        group_size=variant.group_size,
        symmetric=is_symmetric(variant),
        actorder=variant.actorder,
        dampening_frac=variant.dampening_frac,
        smoothing_strength=variant.smoothing_strength,
        rounding=variant.rounding,
        scales=variant.scales,
        kv_cache=variant.kv_cache,
        ignore=variant.ignore,
        seed=seed,
        device=device,
        trust_remote_code=trust_remote_code,
    )
