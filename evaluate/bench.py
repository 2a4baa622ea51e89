"""The benchmark: a sweep over levels of load, every figure from raw records.

One sweep on one running server. A cell (one level) is, for each repeat: check that the server is
alive, empty its prefix cache, warm up under the same load with prompts of its own, read its
counters, send the measured requests, read the counters again. What fails is counted, never
raised: a server that dies in the middle leaves failed cells with their reason behind the
finished ones. Every finished cell is handed to the caller at once, so that nothing measured is
lost if the process is killed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from yarl import URL

from qkit.errors import InputError, MeasurementError
from qkit.evaluate import server_metrics
from qkit.evaluate.bench_requests import PATHS, request_body, to_record
from qkit.evaluate.cell_marks import ClientLoad
from qkit.evaluate.cell_plan import CellPlanner
from qkit.evaluate.client_watch import worst
from qkit.evaluate.clients import Clients, breaker_limit, new_event_loop
from qkit.evaluate.load import Bodies, Breaker, not_sent
from qkit.evaluate.load_search import conclude, next_level
from qkit.evaluate.prompts import TEMPLATE_TOKENS, prompts_hash
from qkit.evaluate.repeats import is_enough
from qkit.evaluate.server_metrics import Counters
from qkit.evaluate.server_watch import combine_sides, token_mark, watching_server
from qkit.evaluate.stream import RawReply
from qkit.evaluate.summary import summarize
from qkit.evaluate.workloads.units import CellPrompts, Unit
from qkit.evaluate.workloads.vocabulary import Vocabulary, load_vocabulary
from qkit.levels import Level
from qkit.measurements import BenchCell, BenchResult, LoadSearch, RequestRecord, ServerSide
from qkit.suites import BenchSuite

#: The warm-up stops after so many tokens; by then every shape of the measured part has run.
_WARMUP_TOKENS_MAX = 32

#: Called with what is being measured, requests done and requests in all.
Progress = Callable[[str, int, int], None]


def run_bench(
    suite: BenchSuite,
    *,
    base_url: str,
    model: str,
    tokenizer_path: Path,
    max_model_len: int | None,
    on_progress: Progress | None = None,
    gpus: int = 0,
    on_cell: Callable[[BenchResult], None] | None = None,
    earlier: BenchResult | None = None,
) -> BenchResult:
    """Measure a running server at every level of a suite.

    Prompts depend on the suite and the vocabulary alone, so all variants of a checkpoint get the
    same ones. Runs its own event loop (uvloop where there is one) and returns when all is done.

    Args:
        suite: Levels, counts, lengths, endpoint, seed.
        base_url: Root of the server, such as http://127.0.0.1:8000; a final /v1 is dropped.
        model: Name the server knows the model by.
        tokenizer_path: Checkpoint folder, or its tokenizer.json.
        max_model_len: Served length in tokens, or None if it is not known.
        on_progress: Called after every measured request; it should be quick.
        gpus: GPUs of this machine that the server runs on, to be watched.
        on_cell: Called after every cell with what there is so far.
        earlier: What an interrupted sweep of the same suite left; its levels with figures are
            taken over and not measured again.

    Raises:
        InputError: The requests do not fit the served length, the URL or the tokenizer cannot be
            used, or `input_tokens` is too small for different prompts.
        MeasurementError: Not one request of the whole sweep succeeded.
    """
    _check_length(suite, max_model_len)
    root = _root(base_url)
    vocabulary = load_vocabulary(tokenizer_path)
    planner = CellPlanner(suite, vocabulary, max_model_len=max_model_len)
    target = _Target(root, root + PATHS[suite.endpoint], model, gpus)
    sweep = _Sweep(suite, target, vocabulary, planner, on_progress, on_cell, earlier)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(sweep.run())
    result = sweep.result(complete=True)
    _require_one_success(result.cells, where=root)
    return result


@dataclass(frozen=True, slots=True)
class _Target:
    """The server: its root, the endpoint's URL, the model's name, and the GPUs it runs on."""

    root: str
    url: str
    model: str
    gpus: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    """One repeat of a cell: its records, and what server and client saw."""

    records: list[RequestRecord]
    server: Counters
    client: ClientLoad
    reusable_tokens: float
    side: ServerSide | None = None


class _Sweep:
    """The cells of a run, one after the other, and what they have in common."""

    def __init__(
        self,
        suite: BenchSuite,
        target: _Target,
        vocabulary: Vocabulary,
        planner: CellPlanner,
        on_progress: Progress | None,
        on_cell: Callable[[BenchResult], None] | None,
        earlier: BenchResult | None,
    ) -> None:
        self._origin = time.perf_counter()
        self._suite = suite
        self._target = target
        self._vocabulary = vocabulary
        self._planner = planner
        self._on_progress = on_progress or _no_progress
        self._on_cell = on_cell or _no_cell
        self._prompt_hash = prompts_hash(suite, planner.named)
        same = earlier if earlier and earlier.prompt_hash == self._prompt_hash else None
        self._before_s = same.duration_s if same else 0.0
        self._kept = {
            cell.level: cell
            for cell in (same.cells if same else ())
            if cell.output_tok_per_s is not None
        }
        self._cells: dict[Level, BenchCell] = {}
        self._search: LoadSearch | None = None

    def result(self, *, complete: bool) -> BenchResult:
        """Return what there is: all of it, or as much as was measured so far."""
        suite = self._suite
        return BenchResult(
            endpoint=suite.endpoint,
            input_tokens=suite.input_tokens,
            output_tokens=suite.output_tokens,
            ignore_eos=suite.ignore_eos,
            workload=self._planner.description,
            hits_expected=self._planner.hits_expected,
            sampling=suite.sampling.sent(),
            seed=suite.seed,
            prompt_hash=self._prompt_hash,
            arrival=suite.arrival if suite.rates else None,
            cells=tuple(self._cells.values()),
            search=self._search,
            complete=complete,
            duration_s=self._before_s + time.perf_counter() - self._origin,
        )

    async def run(self) -> None:
        """Measure the named levels, and then those that the search asks for."""
        async with Clients(self._suite.clients) as clients:
            for level in self._suite.levels:
                await self._measure(clients, level)
            objective = self._suite.objective
            if objective is None or self._suite.search_cells == 0:
                return
            for _ in range(self._suite.search_cells):
                verdicts = self._verdicts()
                level_or_none = next_level(verdicts)
                # A level that could not be judged is one at which the server failed.
                if level_or_none is None or None in verdicts.values():
                    break
                await self._measure(clients, level_or_none)
            self._search = conclude(str(objective), self._verdicts())

    def _verdicts(self) -> dict[Level, bool | None]:
        return {
            level: cell.goodput.met if cell.goodput else None for level, cell in self._cells.items()
        }

    async def _measure(self, clients: Clients, level: Level) -> None:
        """Measure one level, again with more client processes where one was too slow."""
        kept = self._kept.get(level)
        if kept is not None:
            self._cells[level] = kept
            return
        streams = self._streams(level)
        repeats = await self._repeats(clients, level, streams)
        while any(r.client.is_bottleneck for r in repeats) and clients.add(streams):
            repeats = await self._repeats(clients, level, streams)
        found = summarize(
            level,
            [record for repeat in repeats for record in repeat.records],
            server=server_metrics.total([repeat.server for repeat in repeats]),
            client=worst([repeat.client for repeat in repeats]),
            shared_prefix_tokens=TEMPLATE_TOKENS if self._suite.endpoint == "chat" else 0,
            reusable_tokens=sum(repeat.reusable_tokens for repeat in repeats),
            objective=self._suite.objective,
        )
        side = combine_sides([repeat.side for repeat in repeats if repeat.side])
        mark = token_mark(side, found.requests) if side else None
        marks = (*found.marks, *((mark,) if mark else ()))
        self._cells[level] = found.model_copy(update={"server": side, "marks": marks})
        self._on_cell(self.result(complete=False))

    def _streams(self, level: Level) -> int:
        """Return how many requests are expected under way at once, from the cell before it."""
        if level.concurrency is not None:
            return level.concurrency
        last = next(reversed(self._cells.values()), None)
        if last is None or not last.in_flight_max:
            return 1
        return math.ceil(last.in_flight_max * level.value / last.level.value)

    async def _repeats(self, clients: Clients, level: Level, streams: int) -> list[_Repeat]:
        """Measure a level as often as the suite asks for."""
        suite = self._suite
        repeats: list[_Repeat] = []
        figures: list[tuple[float | None, float | None]] = []
        while len(repeats) < suite.repeats_max:
            repeats.append(await self._repeat(clients, level, len(repeats), streams))
            cell = summarize(
                level,
                repeats[-1].records,
                server=repeats[-1].server,
                client=repeats[-1].client,
            )
            figures.append((cell.output_tok_per_s, cell.tpot_ms.p50))
            if cell.output_tok_per_s is None:
                break  # what fails once fails the cell; the others would only take time
            by_figure = list(zip(*figures, strict=True))
            if len(repeats) >= suite.repeats and is_enough(by_figure, suite.target_percent):
                break
        return repeats

    async def _repeat(self, clients: Clients, level: Level, number: int, streams: int) -> _Repeat:
        session, root = clients.session, self._target.root
        cell = self._planner.prompts(level, number)
        dead = await server_metrics.why_dead(session, root)
        if dead is not None:
            replies = [not_sent(dead) for _ in cell.turns]
            lost = ClientLoad(0.0, 0.0, 0.0)
            return _Repeat(self._records(number, cell, replies), Counters(), lost, 0)
        await server_metrics.reset_prefix_cache(session, root)
        breaker = Breaker(breaker_limit(streams))
        warmup = self._bodies(cell.warmup, max_tokens=_WARMUP_TOKENS_MAX)
        await clients.send(
            self._planner.load(level, -1, self._target.url, cell.warmup, warmup),
            streams=streams,
            breaker=breaker,
            on_done=_no_count,
        )
        bodies = self._bodies(cell.measured)
        load = self._planner.load(level, number, self._target.url, cell.measured, bodies)
        before = await server_metrics.scrape(session, root)
        on_done = self._counter(level, len(cell.turns))
        async with watching_server(root, gpus=self._target.gpus) as watch:
            sent = await clients.send(load, streams=streams, breaker=breaker, on_done=on_done)
        after = await server_metrics.scrape(session, root)
        replies = [raw for unit in sent.replies for raw in unit]
        records = self._records(number, cell, replies)
        reusable = cell.reusable_tokens
        return _Repeat(records, after.since(before), sent.client, reusable, watch.result())

    def _bodies(
        self, units: Sequence[Unit], *, max_tokens: int | None = None
    ) -> tuple[Bodies, ...]:
        suite, model = self._suite, self._target.model
        return tuple(
            tuple(request_body(suite, model, turn, max_tokens=max_tokens) for turn in unit.turns)
            for unit in units
        )

    def _counter(self, level: Level, total: int) -> Callable[[], None]:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            self._on_progress(level.name, done, total)

        return count

    def _records(
        self, number: int, cell: CellPrompts, replies: Sequence[RawReply]
    ) -> list[RequestRecord]:
        first = number * len(cell.turns)
        return [
            to_record(
                raw,
                index=first + index,
                repeat=number,
                origin_s=self._origin,
                suite=self._suite,
                turn=turn,
                vocabulary=self._vocabulary,
            )
            for index, (raw, turn) in enumerate(zip(replies, cell.turns, strict=True))
        ]


def _check_length(suite: BenchSuite, max_model_len: int | None) -> None:
    needed = suite.request_tokens.fewest
    if max_model_len is not None and needed > max_model_len:
        raise InputError(
            f"the benchmark asks for {needed} tokens a request (prompt and answer), but the model "
            f"is served with {max_model_len}",
            where="bench.input_tokens, bench.output_tokens, bench.workload",
            fix=(
                f"lower them to {max_model_len} in sum, or raise serve.max_model_len to {needed} "
                "if the checkpoint allows it"
            ),
        )


def _root(base_url: str) -> str:
    """Return the server's root without a final slash or /v1."""
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        url = URL(root)
    except ValueError as error:
        raise InputError(f"the server's URL is not valid: {error}", where=base_url) from None
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError(
            f"the server's URL is not an http address: {base_url!r}",
            fix="give it as http://HOST:PORT",
        )
    return root


def _require_one_success(cells: Sequence[BenchCell], *, where: str) -> None:
    records = [record for cell in cells for record in cell.requests]
    if any(record.status == "ok" for record in records):
        return
    first = records[0]
    raise MeasurementError(
        f"not one of {len(records)} benchmark requests succeeded; "
        f"the first failed with {first.status!r}: {first.error}",
        where=where,
        fix="see what the server's log says about it; `curl URL/v1/models` shows the model's name",
    )


def _no_progress(_name: str, _done: int, _total: int) -> None:
    """Take progress nobody asked for."""


def _no_cell(_result: BenchResult) -> None:
    """Take a cell nobody asked for."""


def _no_count() -> None:
    """Take the end of a warm-up's request."""
