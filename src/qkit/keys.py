"""Keys of a job's steps on this machine: equal keys mean that a step is done.

`qkit.plan` says what a key consists of; this module finds these things out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from qkit import environments
from qkit.hardware import Accelerator
from qkit.hashing import hash_file, hash_files
from qkit.measurements import Hardware, Subject
from qkit.plan import Cell, answers_key, measure_key, quantize_key
from qkit.quantize.backends import BACKENDS
from qkit.quantize.methods import needs_calibration
from qkit.recipe import Calibration, Variant
from qkit.server import ServerSpec, flags_of, kernel_choice, variables_of
from qkit.suites import AccuracySuite, BenchSuite, FidelitySuite
from qkit.workloads import FromFile


@dataclass(frozen=True)
class Keys:
    """What all keys of a job have in common.

    Attributes:
        accelerator: "cpu" or "cuda".
        hardware: The machine.
        data: Folder of local copies of hub data sets.
    """

    accelerator: Accelerator
    hardware: Hardware
    data: Path | None

    def of_variant(self, variant: Variant, calibration: Calibration, source_hash: str) -> str:
        """Return the key of a variant made from the checkpoint with that content hash."""
        source = Path(calibration.source)
        calibrated = needs_calibration(variant)
        return quantize_key(
            source_hash=source_hash,
            variant=variant,
            calibration=calibration if calibrated else Calibration(),
            calibration_hash=_hash_local(source) if calibrated and source.exists() else None,
            environment=environments.find(
                BACKENDS[variant.backend].environment, self.accelerator
            ).fingerprint,
            accelerator=self.accelerator,
        )

    def of_measurement(self, cell: Cell, subject: Subject, spec: ServerSpec) -> str:
        """Return the key of a suite on a checkpoint served that way."""
        suite = cell.settings
        return measure_key(
            cell=cell,
            **self._served(subject, spec),
            harness=metadata.version("lm-eval") + _task_files(cell),
            data=str(self.data) if self.data else None,
            text=text_hash(suite) if isinstance(suite, FidelitySuite) else None,
            prompt_file=hash_of_prompts(cell),
        )

    def of_answers(self, subject: Subject, spec: ServerSpec) -> str:
        """Return the key of single answers of a checkpoint served that way."""
        return answers_key(**self._served(subject, spec))

    def _served(self, subject: Subject, spec: ServerSpec) -> dict[str, Any]:
        """Return the arguments that both keys of what is served have."""
        choice = kernel_choice(spec)
        return {
            "variant_hash": subject.content_hash,
            "flags": (*flags_of(spec), *choice.flags),
            "variables": {**variables_of(spec), **dict(choice.variables)},
            "environment": environments.find("serve", self.accelerator).fingerprint,
            "hardware": self.hardware,
        }


def text_hash(suite: FidelitySuite) -> str:
    """Return the hash of a fidelity suite's text.

    Raises:
        InputError: The text cannot be read.
    """
    from qkit.evaluate.fidelity_text import (  # noqa: PLC0415  (reads the whole text)
        hash_documents,
        read_documents,
    )

    return hash_documents(read_documents(suite.text))


def hash_of_prompts(cell: Cell) -> str | None:
    """Return the hash of the file a benchmark takes its prompts from; None without one."""
    workload = cell.settings.workload if isinstance(cell.settings, BenchSuite) else None
    if not isinstance(workload, FromFile):
        return None
    path = Path(workload.path).expanduser()
    return hash_file(path) if path.is_file() else None


def _task_files(cell: Cell) -> str:
    """Return the hash of a suite's own task files, empty where it has none."""
    folder = cell.settings.task_dir if isinstance(cell.settings, AccuracySuite) else None
    return "" if folder is None else f" {_hash_local(Path(folder))}"


def _hash_local(source: Path) -> str:
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    return hash_files(source if source.is_dir() else source.parent, files)
