"""Put together what `qkit plan` says: checks, bytes, what fits, what runs where.

Reads config.json and safetensors headers, nothing else of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkit.quantize.checkpoint import Checkpoint
from qkit.quantize.compatibility import (
    TENSOR_PARALLEL_SIZES,
    TensorParallelVerdict,
    Verdict,
    check_capability,
    check_tensor_parallel,
)
from qkit.quantize.devices import DEVICES, Device
from qkit.quantize.estimate import (
    Serving,
    kv_bytes_per_token,
    parameter_count,
    reserve_bytes,
    serving,
    weight_bytes,
)
from qkit.quantize.methods import scheme_label, scheme_of
from qkit.quantize.plan_calibration import calibration_checks
from qkit.quantize.plan_checks import (
    Check,
    cpu_checks,
    embeddings_check,
    kernel_check,
    read_checkpoint,
    remote_code_checks,
    resource_checks,
    smoothing_check,
    source_check,
    variant_problem,
)
from qkit.quantize.resources import ToMake
from qkit.recipe import BASELINE, Recipe, Variant


@dataclass(frozen=True)
class CardForecast:
    """One variant on one kind of card.

    Attributes:
        card: The card's name.
        verdict: How the scheme runs there.
        serving: What fits and how fast; None where it does not run.
    """

    card: str
    verdict: Verdict
    serving: Serving | None


@dataclass(frozen=True)
class VariantForecast:
    """One row: the baseline or a variant, with None for what cannot be told.

    Attributes:
        makeable: Whether it can be made.
        ratio: `weight_bytes` over the source's.
        cards: The cards asked about.
        every_card: Every card qkit knows, in the order of `DEVICES`.
    """

    label: str
    method: str
    scheme: str
    makeable: bool
    quantized_bytes: int | None
    unquantized_bytes: int | None
    weight_bytes: int | None
    ratio: float | None
    cards: tuple[CardForecast, ...]
    every_card: tuple[CardForecast, ...]
    tensor_parallel: tuple[TensorParallelVerdict, ...]


@dataclass(frozen=True)
class Question:
    """What is asked beside the recipe.

    Attributes:
        devices: Kinds of card to plan for.
        tensor_parallel: Cards a server is spread over.
        length: Tokens of one request, prompt and answer.
        concurrency: Requests at once.
        gpu_here: Whether this machine has a GPU.
        avx512: Whether this machine's CPU has AVX-512; None if not known.
    """

    devices: tuple[Device, ...]
    tensor_parallel: int
    length: int
    concurrency: int
    gpu_here: bool = True
    avx512: bool | None = None


@dataclass(frozen=True)
class Forecast:
    """Everything `qkit plan` prints; `reserve_bytes` is in the order of `question.devices`."""

    name: str
    folder: Path
    weights_stored: bool
    parameters: int
    dtype: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tied: bool
    kv_bytes_per_token: int
    gpu_memory_utilization: float
    question: Question
    reserve_bytes: tuple[int, ...]
    checks: tuple[Check, ...]
    variants: tuple[VariantForecast, ...]

    @property
    def ok(self) -> bool:
        """Whether every variant can be made, and served as asked."""
        return all(check.status != "problem" for check in self.checks)


def make_forecast(
    recipe: Recipe, folder: Path, question: Question, to_make: Sequence[ToMake]
) -> Forecast:
    """Return what can be said before anything is made.

    Args:
        recipe: Its variants, calibration and serving settings.
        folder: The source checkpoint, or a folder with its config.json alone.
        question: Cards, length and load to plan for.
        to_make: The recipe's variants with the folders they would be written to.

    Raises:
        InputError: There is no folder, or its config.json cannot be used.
    """
    checkpoint, files = read_checkpoint(folder)
    source = source_check(checkpoint)
    problems = {
        variant.label: variant_problem(
            checkpoint,
            variant,
            source_is_fine=source.status == "ok",
            # Left open, the job is planned for the cards, whatever this machine is.
            accelerator="cpu" if recipe.accelerator == "cpu" else "cuda",
        )
        for variant in recipe.variants
    }
    checks = [*files, source, embeddings_check(checkpoint)]
    checks += remote_code_checks(checkpoint, trusted=recipe.trust_remote_code)
    checks += [problem for problem in problems.values() if problem]
    rows: list[VariantForecast] = []
    if not checkpoint.quantized:
        rows.append(_row(checkpoint, None, question, recipe))
        rows += [
            _refused_row(variant)
            if problems[variant.label]
            else _row(checkpoint, variant, question, recipe)
            for variant in recipe.variants
        ]
        checks += _serving_checks(rows, question)
        makeable = [item for item in to_make if problems[item.variant.label] is None]
        on_cpu = recipe.accelerator == "cpu" or (
            checkpoint.weights_stored and recipe.accelerator == "auto" and not question.gpu_here
        )
        for variant in (item.variant for item in makeable):
            found = (
                smoothing_check(checkpoint, variant),
                kernel_check(variant, recipe.serve.kernel, question.devices),
                *(cpu_checks(variant, question.avx512) if on_cpu else ()),
            )
            checks += [check for check in found if check]
        checks += calibration_checks(checkpoint, makeable)
        checks += resource_checks(checkpoint, makeable)
    return Forecast(
        name=recipe.name,
        folder=folder,
        weights_stored=checkpoint.weights_stored,
        parameters=parameter_count(checkpoint),
        dtype=checkpoint.dtype,
        num_layers=checkpoint.num_layers,
        num_heads=checkpoint.num_heads,
        num_kv_heads=checkpoint.num_kv_heads,
        tied=checkpoint.tied,
        kv_bytes_per_token=kv_bytes_per_token(checkpoint),
        gpu_memory_utilization=recipe.serve.gpu_memory_utilization,
        question=question,
        reserve_bytes=tuple(
            reserve_bytes(
                checkpoint,
                device,
                tensor_parallel=question.tensor_parallel,
                max_num_seqs=recipe.serve.max_num_seqs,
            )
            for device in question.devices
        ),
        checks=tuple(checks),
        variants=tuple(rows),
    )


def _row(
    checkpoint: Checkpoint, variant: Variant | None, question: Question, recipe: Recipe
) -> VariantForecast:
    size = weight_bytes(checkpoint, variant)
    source = weight_bytes(checkpoint, None)
    sizes = sorted({*TENSOR_PARALLEL_SIZES, question.tensor_parallel})
    return VariantForecast(
        label=variant.label if variant else BASELINE,
        method=variant.method if variant else BASELINE,
        scheme=scheme_label(variant) if variant else checkpoint.dtype,
        makeable=True,
        quantized_bytes=size.quantized,
        unquantized_bytes=size.unquantized,
        weight_bytes=size.total,
        ratio=size.total / source.total,
        cards=tuple(
            _card(checkpoint, variant, card, question, recipe) for card in question.devices
        ),
        every_card=tuple(
            _card(checkpoint, variant, card, question, recipe) for card in DEVICES.values()
        ),
        tensor_parallel=tuple(check_tensor_parallel(checkpoint, variant, n) for n in sizes),
    )


def _card(
    checkpoint: Checkpoint,
    variant: Variant | None,
    device: Device,
    question: Question,
    recipe: Recipe,
) -> CardForecast:
    verdict = check_capability(None if variant is None else scheme_of(variant), device.capability)
    split = check_tensor_parallel(checkpoint, variant, question.tensor_parallel)
    if verdict.support == "refused" or not split.ok:
        return CardForecast(device.name, verdict, None)
    found = serving(
        checkpoint,
        variant,
        device,
        tensor_parallel=question.tensor_parallel,
        length=question.length,
        concurrency=question.concurrency,
        gpu_memory_utilization=recipe.serve.gpu_memory_utilization,
        max_num_seqs=recipe.serve.max_num_seqs,
    )
    return CardForecast(device.name, verdict, found)


def _refused_row(variant: Variant) -> VariantForecast:
    return VariantForecast(
        label=variant.label,
        method=variant.method,
        scheme=scheme_label(variant),
        makeable=False,
        quantized_bytes=None,
        unquantized_bytes=None,
        weight_bytes=None,
        ratio=None,
        cards=(),
        every_card=(),
        tensor_parallel=(),
    )


def _serving_checks(rows: Sequence[VariantForecast], question: Question) -> list[Check]:
    """Name what cannot be served as asked, and what does not fit."""
    checks: list[Check] = []
    for row in rows:
        asked = [v for v in row.tensor_parallel if v.size == question.tensor_parallel]
        checks += [
            Check(
                row.label,
                "problem",
                f"cannot be split over {verdict.size} cards: {'; '.join(verdict.obstacles)}",
                verdict.fix,
            )
            for verdict in asked
            if not verdict.ok
        ]
        for card in row.cards:
            if card.verdict.support == "refused":
                checks.append(
                    Check(
                        row.label,
                        "problem",
                        f"does not run on {card.card}: {card.verdict.reason}",
                        card.verdict.fix,
                    )
                )
            elif card.serving and not card.serving.fits:
                cards = f"{question.tensor_parallel} x {card.card}"
                checks.append(
                    Check(
                        row.label,
                        "note",
                        f"does not fit on {cards} with one request of {question.length:,} tokens",
                        "use more cards (--tensor-parallel), a larger one, or a shorter length",
                    )
                )
    return checks
