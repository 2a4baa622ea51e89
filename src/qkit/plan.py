"""Recipe to ordered cells, and the keys that tell whether a cell is done. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from qkit.hashing import hash_value
from qkit.measurements import Hardware
from qkit.recipe import BASELINE, BENCH_AGAIN, Calibration, Recipe, Variant
from qkit.suites import FIDELITY_AGAIN, FIDELITY_SUITE, Suite


@dataclass(frozen=True)
class Cell:
    """One suite to be measured on one variant.

    Attributes:
        label: Variant's name.
        suite: Name of the measurement's file.
        settings: What to measure.
    """

    label: str
    suite: str
    settings: Suite


@dataclass(frozen=True)
class Group:
    """Cells of one variant, measured on one server."""

    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Plan:
    """What a recipe asks for, in the order it is done.

    Attributes:
        quantize: Variants to make.
        groups: What is measured: the baseline first, and its benchmark again last.
    """

    quantize: tuple[Variant, ...]
    groups: tuple[Group, ...]


def make_plan(recipe: Recipe) -> Plan:
    """Return the cells of a recipe in the order they are run."""
    labels = [BASELINE, *(variant.label for variant in recipe.variants)]
    groups = [Group(label, cells_of(recipe, label)) for label in labels]
    first = recipe.bench[0] if recipe.bench else None
    if first and first.repeat_baseline and recipe.variants:
        # Once more at the end, to see whether the machine drifted.
        groups.append(Group(BASELINE, (Cell(BASELINE, BENCH_AGAIN, first),)))
    return Plan(recipe.variants, tuple(group for group in groups if group.cells))


def cells_of(recipe: Recipe, label: str) -> tuple[Cell, ...]:
    """Return what a recipe measures on one variant: accuracy, fidelity, then the benchmarks."""
    return (
        *(Cell(label, suite.task, suite) for suite in recipe.accuracy),
        *_fidelity_cells(recipe, label),
        *(Cell(label, suite.name, suite) for suite in recipe.bench),
    )


def _fidelity_cells(recipe: Recipe, label: str) -> tuple[Cell, ...]:
    """Return the fidelity suite; twice for the baseline, whose second run is the noise floor."""
    suite = recipe.fidelity
    if suite is None:
        return ()
    again = label == BASELINE and suite.repeat_baseline
    names = (FIDELITY_SUITE, FIDELITY_AGAIN) if again else (FIDELITY_SUITE,)
    return tuple(Cell(label, name, suite) for name in names)


def quantize_key(
    *,
    source_hash: str,
    variant: Variant,
    calibration: Calibration,
    calibration_hash: str | None,
    environment: str,
    accelerator: str,
) -> str:
    """Return the key of a variant: equal keys mean the same inputs.

    Args:
        source_hash: Content hash of the source checkpoint.
        variant: Method and its settings; the name does not matter.
        calibration: Calibration settings.
        calibration_hash: Hash of a local calibration source; None for one on the hub.
        environment: Fingerprint of the backend's environment.
        accelerator: "cpu" or "cuda".
    """
    return hash_value(
        {
            "source": source_hash,
            "variant": variant.model_dump(mode="json", exclude={"name", "calibration"}),
            "calibration": calibration.model_dump(
                mode="json", exclude={"source"} if calibration_hash else None
            ),
            "calibration_hash": calibration_hash,
            "environment": environment,
            "accelerator": accelerator,
        }
    )


def answers_key(
    *,
    variant_hash: str,
    flags: tuple[str, ...],
    variables: dict[str, str],
    environment: str,
    hardware: Hardware,
) -> str:
    """Return the key of a model as it is served: under equal keys, equal requests need no asking.

    Args:
        variant_hash: Content hash of the checkpoint.
        flags: Server's flags.
        variables: Server's environment variables.
        environment: Fingerprint of the serve environment, and so the server's version.
        hardware: The machine.
    """
    return hash_value(
        {
            "variant": variant_hash,
            "flags": flags,
            "variables": variables,
            "environment": environment,
            "hardware": hardware.model_dump(mode="json"),
        }
    )


def measure_key(
    *,
    cell: Cell,
    variant_hash: str,
    flags: tuple[str, ...],
    variables: dict[str, str],
    environment: str,
    hardware: Hardware,
    harness: str,
    data: str | None,
    text: str | None = None,
    prompt_file: str | None = None,
) -> str:
    """Return the key of a measurement: equal keys need no new run.

    Args:
        cell: What is measured.
        variant_hash: Content hash of the checkpoint.
        flags: Server's flags.
        variables: Server's environment variables.
        environment: Fingerprint of the serve environment.
        hardware: The machine.
        harness: Version of lm-eval.
        data: Folder of local data sets.
        text: Hash of the text of a fidelity suite.
        prompt_file: Hash of the file that a benchmark's prompts come from.
    """
    return hash_value(
        {
            **({} if text is None else {"text": text}),
            "suite": cell.suite,
            "settings": cell.settings.model_dump(mode="json"),
            "variant": variant_hash,
            "flags": flags,
            "variables": variables,
            "environment": environment,
            "hardware": hardware.model_dump(mode="json"),
            "harness": harness,
            "data": data,
            "prompt_file": prompt_file,
        }
    )
