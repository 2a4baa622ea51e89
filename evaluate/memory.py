"""Weight memory of the matrix's rows: one source for the whole table, never process memory.

Under vLLM the process always fills `gpu-memory-utilization`, so its size says nothing about a
quantized form. What shrinks is the weights, and what grows in return is the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from qkit.measurements import ServerRecord

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
