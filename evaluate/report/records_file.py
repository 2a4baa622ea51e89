"""Every request of a run's benchmarks as JSON lines: what all figures are computed from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from qkit.measurements import Measurement


def render(measurements: Iterable[Measurement]) -> Iterator[str]:
    """Yield one line a request: its variant, benchmark and level, then its record as stored.

    Times are seconds on the clock of its sweep; within a sweep they can be compared.
    """
    for measurement in measurements:
        for cell in measurement.bench.cells if measurement.bench else ():
            where = {
                "variant": measurement.variant,
                "bench": measurement.suite,
                "concurrency": cell.concurrency,
                "request_rate": cell.request_rate,
            }
            for record in cell.requests:
                line = {**where, **record.model_dump(mode="json")}
                yield json.dumps(line, ensure_ascii=False) + "\n"
