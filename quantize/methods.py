"""From a recipe's variant to what a worker is asked for and what the table calls it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qkit.protocol import QuantizeRequest
from qkit.quantize.schemes import EIGHT_BIT_METHODS, GROUPED_METHODS, Scheme, scheme_for
from qkit.recipe import Method, Variant

#: Methods that look at activations; dynamic FP8 and round-to-nearest need no data.
CALIBRATED_METHODS: tuple[Method, ...] = ("awq", "gptq", "smoothquant")

Setting = str | int | float | bool | tuple[str, ...] | None


def needs_calibration(method: str) -> bool:
    """Tell whether a method needs calibration data."""
    return method in CALIBRATED_METHODS


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
    )


def scheme_label(variant: Variant) -> str:
    """Return the scheme as the table shows it, for example "W4A16 asym g128"."""
    if variant.method == "fp8":
        return "FP8 dynamic (W8A8)"
    if variant.method == "smoothquant":
        return f"INT8 W8A8 (SmoothQuant {variant.smoothing_strength:g} + GPTQ)"
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
    if variant.method in ("gptq", "smoothquant"):
        settings |= {"actorder": variant.actorder, "dampening_frac": variant.dampening_frac}
    if variant.method == "smoothquant":
        settings["smoothing_strength"] = variant.smoothing_strength
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
        ignore=variant.ignore,
        seed=seed,
        device=device,
        trust_remote_code=trust_remote_code,
    )
