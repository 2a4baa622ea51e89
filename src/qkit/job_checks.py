"""What a job checks before it does anything: it finds in seconds what would fail after hours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from qkit import environments
from qkit.errors import InputError
from qkit.hardware import Accelerator
from qkit.keys import text_hash
from qkit.measurements import Hardware
from qkit.plan import Group
from qkit.quantize.backends import BACKENDS, check_backend
from qkit.quantize.checkpoint import inspect_checkpoint
from qkit.quantize.methods import needs_calibration
from qkit.quantize.preflight import check_source, check_variant
from qkit.quantize.resources import ToMake, check_resources
from qkit.recipe import Calibration, Recipe, Variant
from qkit.suites import AccuracySuite, FidelitySuite, Suite

#: Log-probabilities of a position that vLLM returns at most by default (`--max-logprobs`).
SERVED_LOGPROBS = 20


def check_variants(
    recipe: Recipe,
    variants: Sequence[Variant],
    *,
    source: Path,
    accelerator: Accelerator,
    hardware: Hardware,
    is_there: Callable[[Variant], bool],
    folder_of: Callable[[str], Path],
) -> None:
    """Check what is to be quantized; nothing is written and no weights are read.

    Args:
        recipe: The job.
        variants: To be made.
        source: Folder of the 16-bit checkpoint.
        accelerator: "cpu" or "cuda".
        hardware: The machine.
        is_there: Whether a variant of the same inputs is there already.
        folder_of: Folder of a row's checkpoint.

    Raises:
        QkitError: The first thing that is wrong: checkpoint, method, backend, room, environment,
            calibration data.
    """
    if not variants:
        return
    checkpoint = inspect_checkpoint(source)
    check_source(checkpoint)
    for variant in variants:
        check_variant(checkpoint, variant)
        check_backend(checkpoint, variant, accelerator)
        if needs_calibration(variant):
            _check_local_source(recipe.calibration_of(variant).source)
    missing = [variant for variant in variants if not is_there(variant)]
    to_make = [ToMake(v, recipe.calibration_of(v), folder_of(v.label)) for v in missing]
    check_resources(checkpoint, to_make, hardware)
    for backend in dict.fromkeys(variant.backend for variant in variants):
        environments.python_of(BACKENDS[backend].environment, accelerator)
    calibrated = {recipe.calibration_of(v) for v in missing if needs_calibration(v)}
    _check_calibrations(calibrated, source)


def check_suites(
    recipe: Recipe,
    groups: Sequence[Group],
    *,
    accelerator: Accelerator,
    data: Path | None,
    own_server: bool,
) -> None:
    """Check what is to be measured, before any server starts.

    Args:
        recipe: The job.
        groups: To be measured.
        accelerator: "cpu" or "cuda".
        data: Folder of local copies of hub data sets.
        own_server: Whether qkit starts the servers.

    Raises:
        QkitError: The first thing that is wrong: task, data, text, environment.
    """
    suites: dict[Suite, None] = dict.fromkeys(
        cell.settings for group in groups for cell in group.cells
    )
    for suite in suites:
        if isinstance(suite, AccuracySuite):
            from qkit.evaluate.task_catalog import check_task  # noqa: PLC0415  (imports lm-eval)

            check_task(suite, data=data)
        elif isinstance(suite, FidelitySuite):
            _check_text(recipe, suite, own_server=own_server)
    if groups and own_server:
        environments.python_of("serve", accelerator)


def _check_calibrations(calibrations: Iterable[Calibration], source: Path) -> None:
    """Check the calibration data of the variants that are to be made, each source once."""
    for calibration in calibrations:
        from qkit.quantize.calibration import check_calibration  # noqa: PLC0415  (tokenizers)

        check_calibration(calibration, source)


def _check_text(recipe: Recipe, suite: FidelitySuite, *, own_server: bool) -> None:
    """Refuse a text that cannot be read, or more log-probabilities than will be served."""
    text_hash(suite)
    raised = any(argument.startswith("--max-logprobs") for argument in recipe.serve.args)
    if own_server and suite.top_logprobs > SERVED_LOGPROBS and not raised:
        raise InputError(
            f"`fidelity.top_logprobs` is {suite.top_logprobs}, but vLLM returns "
            f"{SERVED_LOGPROBS} unless told otherwise",
            fix=f'add "--max-logprobs", "{suite.top_logprobs}" to `serve.args`',
        )


def _check_local_source(source: str) -> None:
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or path.suffix in {
        ".jsonl", ".json", ".parquet", ".csv", ".txt",
    }  # fmt: skip
    if looks_local and not path.exists():
        raise InputError(
            f"there is no calibration file {source!r}", fix="check `calibration.source`"
        )
