"""What is stored of a measurement: pydantic models of the JSON files under `artifacts/`.

Every file names the variant's hash, the server's version, flags and kernels, the hardware, and
the raw records its figures were computed from. A figure that is not known is None, never 0.
Times are seconds unless the name says otherwise; sizes are bytes.
"""

from __future__ import annotations

from qkit.measurements.accuracy import AccuracyResult, Sample, TaskScore
from qkit.measurements.base import SCHEMA_VERSION, Hardware, Stored
from qkit.measurements.bench import (
    BenchCell,
    BenchResult,
    Distribution,
    Ends,
    Goodput,
    LoadSearch,
    Repeat,
    RequestRecord,
    SteadyWindow,
)
from qkit.measurements.fidelity import FidelityResult
from qkit.measurements.server_side import GpuUse, ServerSample, ServerSide
from qkit.measurements.servers import MemoryUse, ServerRecord
from qkit.measurements.variants import CalibrationRecord, Subject, VariantRecord

__all__ = [
    "SCHEMA_VERSION",
    "AccuracyResult",
    "BenchCell",
    "BenchResult",
    "CalibrationRecord",
    "Distribution",
    "Ends",
    "FailureRecord",
    "FidelityResult",
    "Goodput",
    "GpuUse",
    "Hardware",
    "LoadSearch",
    "Measurement",
    "MemoryUse",
    "Repeat",
    "RequestRecord",
    "Sample",
    "ServerRecord",
    "ServerSample",
    "ServerSide",
    "SteadyWindow",
    "Stored",
    "Subject",
    "TaskScore",
    "VariantRecord",
]


class Measurement(Stored):
    """One file: one suite on one variant."""

    schema_version: int = SCHEMA_VERSION
    #: Key of everything that shaped the result; equal keys need no new run.
    key: str
    suite: str
    variant: str
    variant_hash: str
    created: str
    hardware: Hardware
    server: ServerRecord
    versions: dict[str, str]
    accuracy: AccuracyResult | None = None
    bench: BenchResult | None = None
    fidelity: FidelityResult | None = None
    #: What the server's processes had taken when the suite was done; None for attached servers.
    memory: MemoryUse | None = None


class FailureRecord(Stored):
    """A cell that failed, kept until it succeeds."""

    schema_version: int = SCHEMA_VERSION
    variant: str
    #: "quantize", "serve", or a suite's name.
    step: str
    reason: str
    detail: str
    created: str
