"""Rules of the reports: nothing cut off, everything escaped, no figure made up."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from golden import matrix_input as given
from rich.console import Console

from qkit.evaluate.derived import Price
from qkit.evaluate.matrix import Matrix, VariantInput, build_matrix
from qkit.evaluate.report import csv_file, html, markdown, terminal, text
from qkit.measurements import BenchCell, BenchResult

HOSTILE = "<script>alert('x')</script> | [red]*bold*[/red] & [a](http://b) `c`\nnext \\ line"


def build(*variants: VariantInput, **options: Any) -> Matrix:
    return build_matrix(
        run=options.pop("run", "a-run"),
        created="2026-12-01T02:00:00Z",
        baseline="bf16",
        variants=variants or (given.baseline(), *given.quantized()),
        **options,
    )


def shown(matrix: Matrix, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(terminal.render(matrix, width))
    return out.getvalue()


def hostile_matrix() -> Matrix:
    failed = VariantInput(
        name="gptq",
        method="gptq",
        scheme=HOSTILE,
        failures=(given.failure("gptq", "quantize", HOSTILE, HOSTILE),),
    )
    server = given.SERVER.model_copy(
        update={"kernels": (HOSTILE,), "marks": (HOSTILE,), "flags": (HOSTILE,)}
    )
    measurements = given.both("bf16", server, given.BF16_FIGURES)
    return build(replace(given.baseline(), measurements=measurements), failed, run=HOSTILE)


def with_bench(result: BenchResult) -> Matrix:
    measurements = (given.measurement("bf16", "bench", bench=result),)
    return build(replace(given.baseline(), measurements=measurements))


def one_cell(**changes: Any) -> BenchCell:
    return given.bench_cell(8, 81.4, 13.88, 554.1, n=8).model_copy(update=changes)


# --------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (9.87, "9.87"),
        (45.0, "45.0"),
        (388.5, "388.5"),
        (1234.4, "1,234"),
    ],
)
def test_figures(value: float | None, expected: str) -> None:
    assert text.figure(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (0, "0 B"),
        (2048, "2.00 KiB"),
        (5_242_880, "5.00 MiB"),
        (15_302_000_000, "14.3 GiB"),
    ],
)
def test_sizes(value: int | None, expected: str) -> None:
    assert text.size(value) == expected


@pytest.mark.parametrize(
    ("points", "interval", "expected"),
    [
        (None, None, "-"),
        (-0.789, (-2.1, 0.49), "-0.8 [-2.1, +0.5]"),
        (0.0, (-0.31, 0.31), "0.0 [-0.3, +0.3]"),
        (-0.04, (-1.0, 0.02), "0.0 [-1.0, 0.0]"),
    ],
)
def test_differences_are_signed(
    points: float | None, interval: tuple[float, float] | None, expected: str
) -> None:
    assert text.difference(points, interval) == expected


def test_a_p_value_is_never_rounded_to_zero() -> None:
    assert [text.probability(p) for p in (None, 1e-9, 0.0494, 1.0)] == [
        "-",
        "< 0.001",
        "0.049",
        "1.000",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "CPUWNA16LinearKernel",
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
        "ABKernel + CInt8 ",
        "-",
        "marlin_v2",
        "",
    ],
)
def test_humps_are_the_name_in_pieces(name: str) -> None:
    assert "".join(text.humps(name)) == name


def test_too_few_requests_show_the_maximum_as_such() -> None:
    matrix = with_bench(given.bench([one_cell()]))
    assert matrix.rows[0].bench[0].ttft_ms_p95 is None
    assert "122.1 max" in shown(matrix)
    assert "122.1 max" in markdown.render(matrix)
    (row,) = csv.DictReader(io.StringIO(csv_file.render(matrix)))
    assert (row["ttft_ms_p95"], row["ttft_ms_max"]) == ("", "122.1")


def test_failed_requests_get_a_column_only_where_there_are_some() -> None:
    assert "Failed" not in shown(with_bench(given.bench([one_cell()])))
    assert re.search(r"n +Failed", shown(with_bench(given.bench([one_cell(failed=2)]))))


def test_natural_stopping_shows_the_lengths() -> None:
    cell = one_cell(output_tokens_mean=97.3)
    assert "97.3" not in shown(with_bench(given.bench([cell])))
    natural = shown(with_bench(given.bench([cell], ignore_eos=False)))
    assert "97.3" in natural
    assert "at most 128 out" in natural


# -------------------------------------------------------------------------------------- terminal


@pytest.mark.parametrize("width", [72, 80, 100, 160])
def test_nothing_is_cut_off_and_no_line_is_too_long(width: int) -> None:
    matrix = build()
    printed = shown(matrix, width)
    assert "…" not in printed
    assert all(len(line) <= width for line in printed.splitlines())
    for row in matrix.rows:
        for cell in row.bench:
            assert text.figure(cell.output_tok_per_s) in printed
    # A name may be broken at a hump, but then all of its pieces are there.
    for piece in ("CutlassInt8ScaledMM", "LinearKernel", "smoothquant", "non-inferior"):
        assert piece in printed


@pytest.mark.parametrize("width", [80, 100])
def test_longest_known_kernel_and_five_digit_figures_fit(width: int) -> None:
    kernel = "ChannelWiseTorchFP8ScaledMMLinearKernel"
    server = given.SERVER.model_copy(update={"kernels": (kernel,)})
    slow = [(12345.6, 1234.5, 12345.6)] * 5
    fp8 = VariantInput(
        name="fp8", method="fp8", scheme="FP8_DYNAMIC", measurements=given.both("fp8", server, slow)
    )
    printed = shown(build(given.baseline(), fp8), width)
    assert "ChannelWiseTorchFP8" in printed
    assert "ScaledMMLinearKernel" in printed
    assert printed.count("12,346") == 5 * 2, "TTFT p50 and throughput at five levels, unbroken"


def test_a_longer_task_name_sets_the_overview_closer_instead_of_splitting_it() -> None:
    def named(task: str) -> Matrix:
        result = given.accuracy(suite=task)
        measurement = given.measurement("bf16", task, accuracy=result)
        return build(replace(given.baseline(), measurements=(measurement,)))

    assert "Overview: " not in shown(named("mmlu_offline"), 80)
    assert "Overview: a_task_of_a_very_long_name" in shown(named("a_task_of_a_very_long_name"), 80)


def test_a_narrow_terminal_gets_the_groups_one_below_the_other() -> None:
    printed = shown(build(), 80)
    for title in ("TTFT ms", "TPOT ms", "tok/s"):
        assert f"Latency and throughput: {title}" in printed
    assert "Latency and throughput: " not in shown(build(), 100)


def test_markup_in_a_text_is_shown_and_not_obeyed() -> None:
    assert "[red]*bold*[/red]" in shown(hostile_matrix(), 200)


def test_a_failed_row_is_there_with_its_reason() -> None:
    printed = shown(build())
    assert re.search(r"gptq +W4A16", printed)
    assert "gptq failed: quantize: the Hessian of model.layers.27.mlp.down_proj" in printed


# --------------------------------------------------------------------------------- Markdown and CSV


def test_markdown_cells_cannot_break_the_table() -> None:
    lines = markdown.render(hostile_matrix()).splitlines()
    tables = [line for line in lines if line.startswith("|")]
    overview = tables[:4]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in overview} == {8}
    page = "\n".join(lines)
    assert "\\<script>" in page
    assert "\\[a](http://b)" in page
    assert "\\`c\\`" in page


def test_csv_has_one_line_for_each_variant_and_level() -> None:
    matrix = build()
    rows = list(csv.DictReader(io.StringIO(csv_file.render(matrix))))
    keys = [(row["variant"], row["concurrency"]) for row in rows]
    levels = [str(level) for level in given.LEVELS]
    assert keys == [
        *(("bf16", level) for level in levels),
        *(("awq", level) for level in levels),
        ("gptq", ""),
        *(("fp8", level) for level in levels),
        *(("smoothquant", level) for level in levels),
    ]
    awq = rows[5]
    assert float(awq["ratio_output_tok_per_s"]) == pytest.approx(148.9 / 79.3, rel=1e-5)
    assert float(awq["mmlu_delta_points"]) == pytest.approx(-100 * 9 / 1140, rel=1e-5)
    assert (awq["mmlu_flips_to_wrong"], awq["mmlu_flips_to_right"]) == ("31", "22")
    assert rows[9]["level_marks"] == "client was busy 93 % of the time"


def test_csv_leaves_unknown_figures_empty() -> None:
    rows = csv.DictReader(io.StringIO(csv_file.render(build())))
    failed = next(row for row in rows if row["variant"] == "gptq")
    filled = {name for name, value in failed.items() if value}
    assert filled == {"run", "variant", "method", "scheme", "status", "reason", "weight_source"}


def test_csv_survives_every_character() -> None:
    (base, *_, failed) = csv.DictReader(io.StringIO(csv_file.render(hostile_matrix())))
    assert base["run"] == failed["scheme"] == HOSTILE
    assert failed["reason"] == "quantize: " + " ".join(HOSTILE.split())


def test_another_kernel_than_asked_for_is_loud_everywhere() -> None:
    server = given.SERVER.model_copy(
        update={
            "kernels": ("MacheteLinearKernel",),
            "kernel_asked": "marlin",
            "marks": ("KERNEL: asked for marlin, ran MacheteLinearKernel",),
        }
    )
    measurements = given.both("bf16", server, given.BF16_FIGURES)
    matrix = build(replace(given.baseline(), measurements=measurements))
    assert "NOT marlin" in shown(matrix)
    page = html.render(matrix)
    assert '<span class="sub bad">NOT marlin</span>' in page
    assert '<li class="mark loud">' in page
    assert "NOT marlin" in markdown.render(matrix)


def test_intervals_are_where_there_is_room_and_capacity_where_there_is_a_price() -> None:
    plain = build()
    assert "Capacity" not in shown(plain)
    assert "Capacity" in html.render(plain)
    assert "CNY" not in html.render(plain)
    priced = build(price=Price(per_hour=15, currency="CNY"))
    assert "10,800 CNY a month" in shown(priced)
    cell = plain.rows[1].bench[4]
    interval = f"[{text.ratio_interval(cell.ratio.tpot_interval)}]"
    assert interval in markdown.render(plain)
    assert interval in html.render(plain)
    assert interval not in shown(plain)


# ------------------------------------------------------------------------------------------ HTML


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not nest."""

    VOID = frozenset({"meta", "br", "wbr", "line"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.styles if self._open[-1:] == ["style"] else self.texts).append(data)


def test_the_page_needs_nothing_but_itself() -> None:
    page = Page(html.render(build()))
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert not {"src", "href", "srcset", "xlink:href"} & {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert not re.search(r"url\(|@import|https?://", " ".join(page.styles))


def test_the_page_escapes_everything() -> None:
    page = Page(html.render(hostile_matrix()))
    assert "script" not in page.tags
    joined = "".join(page.texts)
    assert joined.count("<script>alert('x')</script>") >= 6, "run, scheme, kernel, mark, reason..."


def test_the_page_holds_every_row_and_figure() -> None:
    matrix = build()
    page = Page(html.render(matrix))
    texts = [part.strip() for part in page.texts]
    for row in matrix.rows:
        for cell in row.bench:
            for figure in (cell.ttft_ms_p50, cell.tpot_ms_p50, cell.output_tok_per_s):
                assert text.figure(figure) in texts
    assert texts.count("bf16") > 5, "the baseline stands in every section of the benchmark"
    scopes = {value for name, value in page.attributes if name == "scope"}
    assert scopes == {"col", "colgroup", "row", "rowgroup"}


def test_lines_of_the_page_have_as_many_cells_as_the_head() -> None:
    source = html.render(build())
    table = source[source.index('aria-label="Latency and throughput"') :]
    head, body = table[: table.index("</thead>")], table[table.index("<tbody>") :]
    titles = len(re.findall(r'scope="col"', head))
    rows = re.findall(r"<tr.*?</tr>", body[: body.index("</table>")], re.DOTALL)
    assert len(rows) == 4 * len(given.LEVELS)
    first_of_level = [len(re.findall(r"<t[dh]", row)) for row in rows[::4]]
    others = [len(re.findall(r"<t[dh]", row)) for index, row in enumerate(rows) if index % 4]
    assert set(first_of_level) == {titles}
    assert set(others) == {titles - 1}


@pytest.mark.parametrize("render", [html.render, markdown.render, csv_file.render, shown])
def test_a_run_in_which_everything_failed_is_still_reported(render: Any) -> None:
    failed = VariantInput(
        name="bf16",
        method="bf16",
        scheme="BF16",
        failures=(given.failure("bf16", "serve", "port 8000 is taken"),),
    )
    assert "port 8000 is taken" in render(build(failed))
