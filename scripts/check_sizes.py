#!/usr/bin/env python3
"""Predicted against real bytes of a checkpoint's weights, for every method and form.

    python scripts/check_sizes.py [--model DIR] [--only gptq,autoawq/awq]

Makes every variant for real, with the least calibration, and compares the bytes of what was saved
with what `qkit plan` predicts from the source's headers. Ends with 1 where one differs by more
than 2 %, or cannot be made. A backend whose environment is not there is left out and named.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from qkit.environments import find
from qkit.errors import QkitError
from qkit.hashing import hash_checkpoint
from qkit.quantize.backends import BACKENDS
from qkit.quantize.checkpoint import inspect_checkpoint, split_bytes
from qkit.quantize.estimate import weight_bytes
from qkit.quantize.job import quantize_variant
from qkit.quantize.methods import scheme_label
from qkit.quantize.verify import TOLERANCE
from qkit.recipe import RECIPES_DIR, Calibration, Variant

DEMO = RECIPES_DIR / "demo"
#: Name of a form to its settings. The quick ones come first.
FORMS: dict[str, dict[str, object]] = {
    "fp8": {"method": "fp8"},
    "fp8/static": {"method": "fp8", "scales": "static"},
    "fp8/block": {"method": "fp8", "scales": "block"},
    "fp8/kv-cache": {"method": "fp8", "kv_cache": "fp8"},
    "rtn": {"method": "rtn"},
    "rtn/w8": {"method": "rtn", "weight_bits": 8},
    "smoothquant/rtn": {"method": "smoothquant", "rounding": "rtn"},
    "smoothquant/static": {"method": "smoothquant", "rounding": "rtn", "scales": "static"},
    "awq": {"method": "awq"},
    "gptq": {"method": "gptq"},
    "gptq/w8": {"method": "gptq", "weight_bits": 8},
    "smoothquant": {"method": "smoothquant"},
    "autoawq/awq": {"method": "awq", "backend": "autoawq"},
    "gptqmodel/awq": {"method": "awq", "backend": "gptqmodel"},
    "gptqmodel/gptq": {"method": "gptq", "backend": "gptqmodel"},
}


def difference(predicted: int, real: int) -> float:
    """Return how far a prediction is from what was saved, as a share of the latter."""
    return (predicted - real) / real


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=DEMO / "model",
    help="Checkpoint with a chat template. Default: the demo's.",
)
@click.option("--only", help=f"Forms, of {', '.join(FORMS)}. Default: all.")
@click.option("--samples", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--seq-len", type=click.IntRange(min=8), default=64, show_default=True)
def main(model: Path, only: str | None, samples: int, seq_len: int) -> None:
    """Make every variant and compare its bytes with the prediction."""
    checkpoint, source_hash = inspect_checkpoint(model), hash_checkpoint(model)
    names = only.split(",") if only else list(FORMS)
    if unknown := [name for name in names if name not in FORMS]:
        raise click.UsageError(f"there is no form {unknown[0]!r}: known are {', '.join(FORMS)}")
    failed = 0
    click.echo(
        f"{model.name}: {checkpoint.weight_bytes:,} bytes\n"
        f"{'form':<19} {'scheme':<36} {'predicted':>14} {'real':>14} {'quantized':>10} {'all':>8}"
    )
    for name in names:
        variant = Variant.model_validate(FORMS[name])
        environment = find(BACKENDS[variant.backend].environment, "cpu")
        if environment.state not in ("ready", "own"):
            click.echo(f"{name:<19} not checked: `qkit env create {environment.backend}` first")
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="qkit-sizes-") as temporary:
            try:
                quantize_variant(
                    variant=variant,
                    calibration=Calibration(
                        source=str(DEMO / "calibration.jsonl"), samples=samples, seq_len=seq_len
                    ),
                    source=model,
                    source_hash=source_hash,
                    out=Path(temporary) / "model",
                    work=Path(temporary) / "work",
                    python=environment.python,
                    accelerator="cpu",
                    key="",
                    trust_remote_code=False,
                )
            except QkitError as error:
                failed += 1
                click.echo(f"{name:<19} FAILED: {error}")
                continue
            quantized, rest = split_bytes(inspect_checkpoint(Path(temporary) / "model"))
        predicted = weight_bytes(checkpoint, variant)
        of_quantized = difference(predicted.quantized, quantized)
        of_all = difference(predicted.total, quantized + rest)
        wrong = max(abs(of_quantized), abs(of_all)) > TOLERANCE
        failed += wrong
        click.echo(
            f"{name:<19} {scheme_label(variant):<36} {predicted.total:>14,}"
            f" {quantized + rest:>14,} {100 * of_quantized:>+9.3f}% {100 * of_all:>+7.3f}%"
            f"{'  WRONG' if wrong else ''}  ({time.monotonic() - began:.0f} s)"
        )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
