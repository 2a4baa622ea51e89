"""Weight memory of the matrix's rows: one source for the whole table, never process memory.

Under vLLM the process always fills `gpu-memory-utilization`, so its size says nothing about a
quantized form. What shrinks is the weights, and what grows in return is the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from qkit.evaluate.figures import figure
from qkit.evaluate.statistics import relative_percent
from qkit.measurements import Measurement, ServerRecord, Stored

#: "vllm-log" is the server's own "Model loading took" line, "checkpoint" the tensors' bytes on
#: disk. The first includes what loading adds (repacked layouts), so the two are never mixed.
WeightSource = Literal["vllm-log", "checkpoint"]


def weight_source(rows: Iterable[Sequence[ServerRecord]]) -> WeightSource:
    """Choose the source of weight memory for a table.

    Args:
        rows: The servers each row was measured on; rows without one (failed before serving) have
            no say.

    Returns:
        "vllm-log" when every served row has the server's own figure, else "checkpoint".
    """
    served = [servers for servers in rows if servers]
    if served and all(logged_weight_bytes(servers) is not None for servers in served):
        return "vllm-log"
    return "checkpoint"


def logged_weight_bytes(servers: Sequence[ServerRecord]) -> int | None:
    """Return the first weight memory a row's servers logged, in bytes; None where none did."""
    return next((s.weight_bytes for s in servers if s.weight_bytes is not None), None)


class MemoryAccount(Stored):
    """Where a row's memory goes; None where it is not known."""

    #: Of the checkpoint on disk, scales included, and the rest: embeddings, head, norms, biases.
    quantized_bytes: int | None
    unquantized_bytes: int | None
    #: What `qkit plan` predicts for the checkpoint.
    predicted_bytes: int | None
    #: Percent by which the row's weight memory exceeds the prediction; None with several cards,
    #: where the server's log tells one card's part.
    predicted_difference_percent: float | None
    kv_cache_bytes: int | None
    graph_memory_bytes: int | None
    #: Most that was taken while measuring: no saving, since vLLM fills what it is given.
    peak_bytes: int | None
    #: "gpu" is NVML's memory in use, by whatever process; "processes" the sum of the largest
    #: resident sets of the server's processes.
    peak_source: Literal["gpu", "processes"] | None
    #: Proportional set size of the server's processes: shared pages count once.
    pss_bytes: int | None


def account(
    measurements: Sequence[Measurement],
    *,
    server: ServerRecord | None,
    weight_bytes: int | None,
    quantized_bytes: int | None,
    unquantized_bytes: int | None,
    predicted_bytes: int | None,
) -> MemoryAccount:
    """Return a row's memory account.

    Args:
        measurements: All of the row's.
        server: The server that speaks for the row.
        weight_bytes: Weight memory, from the table's one source.
        quantized_bytes: Of the checkpoint.
        unquantized_bytes: Of the checkpoint.
        predicted_bytes: Of the checkpoint, by `qkit plan`.
    """
    cells = [cell for m in measurements if m.bench for cell in m.bench.cells]
    sides = [cell.server for cell in cells if cell.server and cell.server.gpu]
    on_gpu = max((s.gpu.memory_bytes_max or 0 for s in sides if s.gpu), default=0)
    uses = [m.memory for m in measurements if m.memory]
    resident = max((use.rss_peak_bytes or 0 for use in uses), default=0)
    one_card = server is not None and "--tensor-parallel-size" not in server.flags
    difference = (
        relative_percent(predicted_bytes, weight_bytes)
        if predicted_bytes and weight_bytes is not None and one_card
        else None
    )
    return MemoryAccount(
        quantized_bytes=quantized_bytes,
        unquantized_bytes=unquantized_bytes,
        predicted_bytes=predicted_bytes,
        predicted_difference_percent=figure(difference),
        kv_cache_bytes=server.kv_cache_bytes if server else None,
        graph_memory_bytes=server.graph_memory_bytes if server else None,
        peak_bytes=on_gpu or resident or None,
        peak_source="gpu" if on_gpu else "processes" if resident else None,
        pss_bytes=max((use.pss_bytes or 0 for use in uses), default=0) or None,
    )
