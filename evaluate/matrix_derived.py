"""What the matrix derives of a level: intervals, memory roof, capacity, server's side. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from qkit.evaluate.derived import (
    Capacity,
    Ends,
    Price,
    capacity,
    mean_ratio_interval,
    median_ratio_interval,
    repeat_rates,
    tpot_floor_ms,
)
from qkit.evaluate.figures import figure, ratio
from qkit.evaluate.latency import tpot_ms, ttft_ms
from qkit.evaluate.matrix_values import BenchRow, ServerFigures
from qkit.measurements import BenchCell, Hardware, ServerRecord
from qkit.quantize.devices import local_device


@dataclass(frozen=True)
class Served:
    """What a level's figures are derived with, besides its own measurement.

    Attributes:
        read_bytes: Weights read for one decoding step, on all cards together.
        kv_bytes_per_token: Of the KV cache, on all cards together.
        price: What an hour costs.
    """

    read_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    price: Price | None = None


def derive(
    row: BenchRow,
    cell: BenchCell,
    base: BenchCell | None,
    *,
    served: Served,
    server: ServerRecord,
    hardware: Hardware,
) -> BenchRow:
    """Return a row with all that is derived of its cell.

    Args:
        row: The measured figures.
        cell: What they come from.
        base: The baseline's cell, where it may be compared.
        served: What the checkpoint is and what an hour costs.
        server: Where the cell was measured.
        hardware: On which machine.
    """
    device = local_device(hardware)
    floor = tpot_floor_ms(
        read_bytes=served.read_bytes,
        kv_bytes_per_token=_kv_bytes(served.kv_bytes_per_token, server),
        concurrency=cell.concurrency,
        input_tokens=cell.input_tokens_mean,
        output_tokens=cell.output_tokens_mean,
        bandwidth=device.bandwidth if device else None,
        cards=_cards(server),
    )
    return row.model_copy(
        update={
            "ratio": row.ratio.model_copy(update=_intervals(cell, base)),
            "server": _server_figures(cell),
            "tpot_floor_ms": floor,
            "roofline_share": ratio(floor, cell.tpot_ms.p50),
            "capacity": _capacity(cell, served.price),
        }
    )


def _intervals(cell: BenchCell, base: BenchCell | None) -> dict[str, Ends | None]:
    if base is None or base is cell:
        return {}
    found: dict[str, Ends | None] = {}
    for name, of in (("ttft", ttft_ms), ("tpot", tpot_ms)):
        # A cell without a headline figure has no ratio either.
        if getattr(cell, f"{name}_ms").p50 is None or getattr(base, f"{name}_ms").p50 is None:
            continue
        ours, theirs = (
            [v for r in side.requests if r.status == "ok" and (v := of(r)) is not None]
            for side in (cell, base)
        )
        found[f"{name}_interval"] = _rounded(median_ratio_interval(ours, theirs))
    if cell.output_tok_per_s is not None and base.output_tok_per_s is not None:
        ends = mean_ratio_interval(repeat_rates(cell.requests), repeat_rates(base.requests))
        found["output_tok_per_s_interval"] = _rounded(ends)
    return found


def _rounded(ends: Ends | None) -> Ends | None:
    if ends is None:
        return None
    low, high = figure(ends[0]), figure(ends[1])
    return None if low is None or high is None else (low, high)


def _capacity(cell: BenchCell, price: Price | None) -> Capacity | None:
    found = capacity(cell.output_tok_per_s, cell.output_tokens_mean, price)
    if found is None:
        return None
    return found.model_copy(update={name: figure(value) for name, value in found})


def _server_figures(cell: BenchCell) -> ServerFigures | None:
    side = cell.server
    if side is None:
        return None
    gpu = side.gpu
    tokens = [r.output_tokens for r in cell.requests]
    known = [count for count in tokens if count is not None]
    # Energy of failed requests cannot be told from that of the others.
    total = sum(known) if len(known) == len(tokens) and not cell.failed else None
    return ServerFigures(
        running_mean=figure(side.running_mean),
        running_max=side.running_max,
        waiting_mean=figure(side.waiting_mean),
        waiting_max=side.waiting_max,
        kv_cache_usage_max=figure(side.kv_cache_usage_max),
        prefix_hit_rate=figure(side.prefix_hit_rate),
        acceptance_rate=figure(side.acceptance_rate),
        prompt_tokens=side.prompt_tokens,
        generation_tokens=side.generation_tokens,
        gpu_utilisation_percent=figure(gpu.utilisation_percent) if gpu else None,
        gpu_power_w_mean=figure(gpu.power_w_mean) if gpu else None,
        gpu_energy_j_per_output_token=ratio(gpu.energy_j, total) if gpu else None,
    )


def _kv_bytes(of_checkpoint: int | None, server: ServerRecord) -> int | None:
    """Return a token's bytes of KV cache, halved where a flag asks for FP8 instead of 16 bits."""
    flags = " ".join(server.flags).replace("=", " ")
    if of_checkpoint is None or "--kv-cache-dtype fp8" not in flags:
        return of_checkpoint
    return of_checkpoint // 2


def _cards(server: ServerRecord) -> int:
    flags = server.flags
    if "--tensor-parallel-size" not in flags:
        return 1
    return int(flags[flags.index("--tensor-parallel-size") + 1])
