"""How `qkit plan` looks in a terminal; 100 columns are enough."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qkit.quantize.compatibility import TENSOR_PARALLEL_SIZES
from qkit.quantize.devices import DEVICES, GB, Device
from qkit.quantize.estimate import Serving
from qkit.quantize.forecast import CardForecast, Forecast, VariantForecast
from qkit.quantize.plan_checks import Status

UNKNOWN = "—"
#: Width of what is written to a file or a pipe.
PLAIN_WIDTH = 100
_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}
_RANK = {"problem": 0, "note": 1, "ok": 2}
_SUPPORT = {"native": "native", "weight-only": "weight-only", "refused": "[red]not at all[/]"}


def show(forecast: Forecast) -> None:
    """Print a forecast."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    console.print(_heading(forecast))
    _titled(console, "Checks", _checks(forecast))
    if not forecast.variants:
        return
    _titled(console, "Weights, predicted", _weights(forecast))
    for position, device in enumerate(forecast.question.devices):
        title, caption = _serving_text(forecast, position, device)
        _titled(console, title, _serving(forecast, position), caption)
    _titled(console, _floors_title(forecast), _floors(forecast))
    title = "Tensor parallel: heads and quantization groups against cards"
    _titled(console, title, _tensor_parallel(forecast))
    advice = _advice(forecast)
    if advice.row_count:
        console.print(advice)


def _heading(forecast: Forecast) -> str:
    source = next((row.weight_bytes for row in forecast.variants if row.ratio == 1), None)
    size = f", {_gb(source)}" if source else ""
    where = "" if forecast.weights_stored else "\nshapes from config.json: no whole weights here"
    return (
        f"[bold]{escape(forecast.name)}[/]  {escape(str(forecast.folder))}{where}\n"
        f"{_count(forecast.parameters)} parameters in {forecast.dtype}{size};"
        f" {forecast.num_layers} layers, {forecast.num_heads} heads,"
        f" {forecast.num_kv_heads} KV heads;"
        f" KV {forecast.kv_bytes_per_token:,} bytes a token"
    )


def _table(*, header: bool = True) -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=header)


def _titled(console: Console, title: str, table: Table, caption: str | None = None) -> None:
    console.print(f"\n[bold]{escape(title)}[/]")
    console.print(table)
    if caption:
        console.print(f"[dim]{escape(caption)}[/]")


def _checks(forecast: Forecast) -> Table:
    table = _table(header=False)
    table.add_column(no_wrap=True)
    table.add_column(max_width=24)
    table.add_column(overflow="fold")
    named: dict[tuple[Status, str, str | None], list[str]] = {}
    for check in forecast.checks:
        named.setdefault((check.status, check.text, check.fix), []).append(check.name)
    # What is in the way first; the sort keeps the order of the rest.
    for (status, text, fix), names in sorted(named.items(), key=lambda item: _RANK[item[0][0]]):
        way_out = f"\n[dim]→[/] {escape(fix)}" if fix else ""
        table.add_row(
            f"[{_COLOURS[status]}]{status}[/]", escape(", ".join(names)), escape(text) + way_out
        )
    return table


def _weights(forecast: Forecast) -> Table:
    table = _table()
    table.add_column("variant", no_wrap=True)
    table.add_column("scheme")
    for header in ("quantized", "the rest", "total", "ratio"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in forecast.variants:
        table.add_row(
            row.label,
            row.scheme,
            _gb(row.quantized_bytes) if row.quantized_bytes else UNKNOWN,
            _gb(row.unquantized_bytes),
            _gb(row.weight_bytes),
            UNKNOWN if row.ratio is None else f"{row.ratio:.3f}",
        )
    return table


def _serving_text(forecast: Forecast, position: int, device: Device) -> tuple[str, str]:
    """Return the title of a card's table, and how its figures come about."""
    question = forecast.question
    bandwidth = f", {device.bandwidth / 1e12:.3g} TB/s" if device.bandwidth else ""
    title = (
        f"Serving on {question.tensor_parallel} x {device.name}"
        f" ({device.memory_bytes / GB:.1f} GB{bandwidth}, compute capability"
        f" {device.capability_label})"
    )
    room = (
        f"KV room of a card = {device.memory_bytes / GB:.1f} GB x"
        f" {forecast.gpu_memory_utilization:g} - weights -"
        f" {_gb(forecast.reserve_bytes[position])} (assumed: activations, graphs, context)."
    )
    floor = (
        "TPOT floor = bytes read in a step / memory bandwidth, caches at"
        f" {question.length:,} tokens, one token a step."
        if device.bandwidth
        else "TPOT floor: this card's bandwidth is not in qkit's table."
    )
    return title, f"{room}\n{floor}"


def _serving(forecast: Forecast, position: int) -> Table:
    question = forecast.question
    table = _table()
    table.add_column("variant", no_wrap=True)
    table.add_column("runs as")
    table.add_column(
        "weights" if question.tensor_parallel == 1 else "each card", justify="right", no_wrap=True
    )
    table.add_column("KV tokens", justify="right", no_wrap=True)
    table.add_column(f"fit x {question.length:,}", justify="right", no_wrap=True)
    table.add_column("TPOT ≥ at 1", justify="right", no_wrap=True)
    table.add_column(f"at {question.concurrency}", justify="right", no_wrap=True)
    for row in forecast.variants:
        if row.cards:
            table.add_row(row.label, *_card_cells(row.cards[position]))
        else:
            table.add_row(row.label, "[red]cannot be made[/]", *[UNKNOWN] * 5)
    return table


def _card_cells(card: CardForecast) -> list[str]:
    support = _SUPPORT[card.verdict.support]
    if card.verdict.support == "refused":
        return [support, *[UNKNOWN] * 5]
    runs = f"{support}: {card.verdict.reason}"
    if card.serving is None:
        return ["[red]not over so many cards[/]", *[UNKNOWN] * 5]
    return [runs, *_serving_cells(card.serving)]


def _serving_cells(serving: Serving) -> list[str]:
    return [
        _gb(serving.weight_bytes),
        f"{serving.kv_tokens:,}" if serving.kv_tokens else "[yellow]no room[/]",
        f"{serving.requests:,}",
        _ms(serving.tpot_floor_s),
        _ms(serving.tpot_floor_loaded_s),
    ]


def _floors_title(forecast: Forecast) -> str:
    question = forecast.question
    return (
        f"TPOT floor in ms on {question.tensor_parallel} card"
        f"{'s' if question.tensor_parallel > 1 else ''} of each kind, one request of"
        f" {question.length:,} tokens ({UNKNOWN}: does not run or fit)"
    )


def _floors(forecast: Forecast) -> Table:
    table = _table()
    table.add_column("variant", no_wrap=True)
    for name in DEVICES:
        table.add_column(name, justify="right", no_wrap=True)
    for row in forecast.variants:
        floors = [card.serving.tpot_floor_s if card.serving else None for card in row.every_card]
        cells = [UNKNOWN if floor is None else f"{1e3 * floor:.3g}" for floor in floors]
        table.add_row(row.label, *(cells or [UNKNOWN] * len(DEVICES)))
    return table


def _tensor_parallel(forecast: Forecast) -> Table:
    table = _table()
    table.add_column("variant", no_wrap=True)
    asked = forecast.question.tensor_parallel
    sizes = sorted({*TENSOR_PARALLEL_SIZES, asked})
    for size in sizes:
        table.add_column(f"TP {size}", no_wrap=True)
    for row in forecast.variants:
        cells = [
            "ok" if verdict.ok else f"[{'red' if verdict.size == asked else 'yellow'}]no[/]"
            for verdict in row.tensor_parallel
        ]
        table.add_row(row.label, *(cells or [UNKNOWN] * len(sizes)))
    return table


def _advice(forecast: Forecast) -> Table:
    """Say once for every obstacle which variants it concerns and what helps."""
    found: dict[tuple[int, tuple[str, ...], str | None], list[VariantForecast]] = {}
    for row in forecast.variants:
        for verdict in row.tensor_parallel:
            if not verdict.ok:
                found.setdefault((verdict.size, verdict.obstacles, verdict.fix), []).append(row)
    table = _table(header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for (size, obstacles, fix), rows in sorted(found.items(), key=lambda item: item[0][0]):
        everyone = len(rows) == len([row for row in forecast.variants if row.tensor_parallel])
        names = "all" if everyone else ", ".join(row.label for row in rows)
        text = f"{names}: {'; '.join(obstacles)}"
        table.add_row(f"TP {size}", escape(text) + (f"\n[dim]→[/] {escape(fix)}" if fix else ""))
    return table


def _gb(size: int | None) -> str:
    if size is None:
        return UNKNOWN
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / 1e6:.2f} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.1f} µs"
