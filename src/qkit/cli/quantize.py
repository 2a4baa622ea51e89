"""`qkit quantize`: make variants."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qkit.cli import options
from qkit.recipe import BACKENDS, METHODS

if TYPE_CHECKING:
    from qkit.measurements import VariantRecord


@click.command()
@click.option(
    "--method",
    "methods",
    type=click.Choice(METHODS),
    multiple=True,
    help="Method; may be given several times. Default: all but rtn.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    help="Library that makes them, in an environment of its own (`qkit env list`). Default: the"
    " recipe's, which is llmcompressor.",
)
@click.option("--model", help="Checkpoint folder or hub name, in place of the recipe's.")
@options.recipe
@click.option(
    "--calibration",
    metavar="SOURCE",
    help="JSONL, JSON, Parquet, CSV or text file, a folder of them, or a hub data set.",
)
@click.option("--samples", type=click.IntRange(min=1), help="Calibration sequences.")
@click.option("--seq-len", type=click.IntRange(min=8), help="Tokens in a calibration sequence.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for the checkpoint (one method). Default: in the run's folder.",
)
@options.run_name
@options.accelerator
@options.wait
@options.force
def quantize(
    methods: tuple[str, ...],
    backend: str | None,
    model: str | None,
    recipe_name: str | None,
    calibration: str | None,
    samples: int | None,
    seq_len: int | None,
    out: Path | None,
    run_name: str | None,
    accelerator: str | None,
    wait_s: float,
    force: bool,
) -> None:
    """Make quantized variants of a checkpoint.

    Each variant is an ordinary Hugging Face checkpoint that `vllm serve` loads, with a qkit.json
    that says how it was made. `lm_head` stays in 16 bits.

    \b
    qkit quantize --method awq                                  the demo's checkpoint
    qkit quantize --method awq --recipe qwen2.5-7b-a800
    qkit quantize --backend autoawq                             the same method by AutoAWQ
    qkit quantize --method gptq --model ./Qwen2.5-7B-Instruct --calibration chats.jsonl
    """  # noqa: D301  (\b keeps click from rewrapping)
    from qkit.cli.progress import TerminalReporter, exit_code
    from qkit.errors import InputError
    from qkit.run import Job
    from qkit.store import RunStore, artifacts_dir, read_variant

    recipe = options.with_values(options.chosen_recipe(recipe_name, model), accelerator=accelerator)
    settings = options.with_values(
        recipe.calibration, source=calibration, samples=samples, seq_len=seq_len
    )
    variants = options.variants_for(recipe, methods, backend)
    if calibration or samples or seq_len:
        # What is typed here holds for every variant, also those with settings of their own.
        variants = tuple(v.model_copy(update={"calibration": settings}) for v in variants)
    if out and len(variants) != 1:
        raise InputError(
            f"--out takes one variant, and this makes {len(variants)}",
            fix="choose one with --method, or leave --out out",
        )
    store = RunStore(artifacts_dir() / (run_name or recipe.name))
    folders = {variants[0].label: out} if out else {}
    with TerminalReporter() as reporter:
        job = Job(recipe, store, reporter, wait_s=wait_s, force=force, folders=folders)
        outcome = job.quantize(variants)
    for variant in variants:
        if all(failure.variant != variant.label for failure in outcome.failures):
            folder = job.model_dir(variant.label)
            for line in _calibration_lines(read_variant(folder)):
                click.echo(f"  {variant.label}: {line}", err=True)
            click.echo(folder)
    raise SystemExit(exit_code(outcome))


def _calibration_lines(variant: VariantRecord | None) -> list[str]:
    """Say what a variant was calibrated with; nothing for a data-free method."""
    from qkit.quantize.calibration_scripts import mix_label

    record = variant.calibration if variant else None
    if record is None:
        return []
    lines = [
        f"calibrated with {record.used_samples:,} of {record.requested_samples:,} samples of"
        f" {record.seq_len:,} tokens ({record.total_tokens:,} tokens), seed {record.seed},"
        f" sha256 {record.tokens_hash[:12]}"
    ]
    if record.rows_used is not None:
        there = "" if record.rows_there is None else f" of {record.rows_there:,}"
        cut = f", {record.rows_truncated:,} of them cut at the end" if record.rows_truncated else ""
        lines.append(
            f"rows: {record.rows_read:,}{there} read, {record.rows_used:,} used{cut},"
            f" {record.rows_skipped:,} skipped without text"
        )
    lines.append(f"scripts: {mix_label(record.scripts)}")
    if record.warning:
        lines.append(f"warning: {record.warning}")
    return lines
