"""The concurrency benchmark: a closed loop at each level, every figure from raw records.

One sweep on one running server. A cell (one concurrency level) is: check that the server is
alive, empty its prefix cache, warm up at the same concurrency with prompts of its own, read its
counters, send the measured requests, read the counters again. What fails is counted, never
raised: a server that dies in the middle leaves failed cells with their reason behind the
finished ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from yarl import URL

from qkit.errors import InputError, MeasurementError
from qkit.evaluate import server_metrics
from qkit.evaluate.bench_requests import PATHS, SAMPLING, request_body, to_record
from qkit.evaluate.latency import ClientLoad, summarize
from qkit.evaluate.load import Breaker, ClientWatch, closed_loop, not_sent, open_session
from qkit.evaluate.prompts import (
    CellPrompts,
    Prompt,
    Vocabulary,
    load_vocabulary,
    plan_prompts,
    prompts_hash,
)
from qkit.evaluate.server_metrics import Counters
from qkit.evaluate.server_watch import token_mark, watching_server
from qkit.evaluate.stream import RawReply
from qkit.measurements import BenchCell, BenchResult
from qkit.suites import BenchSuite

try:
    import uvloop
except ImportError:  # there is none for some platforms; asyncio's own loop is slower but right
    _new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

#: The warm-up stops after so many tokens; by then every shape of the measured part has run.
_WARMUP_TOKENS_MAX = 32
#: A dead server is believed after so many unanswered requests, or one whole round if larger.
_UNANSWERED_MIN = 3
#: A chat template begins every prompt alike; so many tokens a request may hit the prefix cache.
_TEMPLATE_TOKENS = 64

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
) -> BenchResult:
    """Measure a running server at every concurrency level of a suite.

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

    Raises:
        InputError: The requests do not fit the served length, the URL or the tokenizer cannot be
            used, or `input_tokens` is too small for different prompts.
        MeasurementError: Not one request of the whole sweep succeeded.
    """
    _check_length(suite, max_model_len)
    root = _root(base_url)
    vocabulary = load_vocabulary(tokenizer_path)
    cells = plan_prompts(suite, vocabulary)
    sweep = _Sweep(suite, root, model, vocabulary, on_progress or _no_progress, gpus)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        measured = runner.run(sweep.run(cells))
    _require_one_success(measured, where=root)
    return BenchResult(
        endpoint=suite.endpoint,
        input_tokens=suite.input_tokens,
        output_tokens=suite.output_tokens,
        ignore_eos=suite.ignore_eos,
        sampling=SAMPLING,
        seed=suite.seed,
        prompt_hash=prompts_hash(cells),
        cells=measured,
        duration_s=time.perf_counter() - sweep.origin,
    )


class _Sweep:
    """What all cells of a run have in common."""

    def __init__(
        self,
        suite: BenchSuite,
        root: str,
        model: str,
        vocabulary: Vocabulary,
        on_progress: Progress,
        gpus: int,
    ) -> None:
        self._gpus = gpus
        self.origin = time.perf_counter()
        self._suite = suite
        self._root = root
        self._url = root + PATHS[suite.endpoint]
        self._model = model
        self._vocabulary = vocabulary
        self._on_progress = on_progress

    async def run(self, cells: Sequence[CellPrompts]) -> tuple[BenchCell, ...]:
        """Measure one cell after the other."""
        async with open_session() as session:
            return tuple([await self._cell(session, cell) for cell in cells])

    async def _cell(self, session: aiohttp.ClientSession, cell: CellPrompts) -> BenchCell:
        dead = await server_metrics.why_dead(session, self._root)
        if dead is not None:
            lost = _Measured(
                [not_sent(dead) for _ in cell.measured], Counters(), ClientLoad(0, 0, 0)
            )
            return self._summarize(cell, lost)
        await server_metrics.reset_prefix_cache(session, self._root)
        breaker = Breaker(limit=max(_UNANSWERED_MIN, cell.concurrency))
        send_all = partial(
            closed_loop,
            session,
            self._url,
            concurrency=cell.concurrency,
            timeout_s=self._suite.timeout_s,
            breaker=breaker,
        )
        warmup_tokens = min(_WARMUP_TOKENS_MAX, self._suite.output_tokens)
        await send_all(self._bodies(cell.warmup, max_tokens=warmup_tokens))
        bodies = self._bodies(cell.measured)
        watch = ClientWatch()
        before = await server_metrics.scrape(session, self._root)
        async with watching_server(self._root, gpus=self._gpus) as seen, watch.watching():
            replies = await send_all(bodies, on_done=self._counter(cell))
        after = await server_metrics.scrape(session, self._root)
        side = seen.result()
        found = self._summarize(cell, _Measured(replies, after.since(before), watch.load))
        mark = token_mark(side, found.requests)
        marks = (*found.marks, *((mark,) if mark else ()))
        return found.model_copy(update={"server": side, "marks": marks})

    def _bodies(self, prompts: Sequence[Prompt], *, max_tokens: int | None = None) -> list[bytes]:
        return [request_body(self._suite, self._model, p, max_tokens=max_tokens) for p in prompts]

    def _counter(self, cell: CellPrompts) -> Callable[[], None]:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            self._on_progress(f"concurrency {cell.concurrency}", done, len(cell.measured))

        return count

    def _summarize(self, cell: CellPrompts, measured: _Measured) -> BenchCell:
        records = [
            to_record(
                raw,
                index=index,
                origin_s=self.origin,
                suite=self._suite,
                prompt=prompt,
                vocabulary=self._vocabulary,
            )
            for index, (raw, prompt) in enumerate(zip(measured.replies, cell.measured, strict=True))
        ]
        return summarize(
            cell.concurrency,
            records,
            server=measured.server,
            client=measured.client,
            shared_prefix_tokens=_TEMPLATE_TOKENS if self._suite.endpoint == "chat" else 0,
        )


@dataclass(frozen=True)
class _Measured:
    """One cell before its replies are read."""

    replies: list[RawReply]
    server: Counters
    client: ClientLoad


def _check_length(suite: BenchSuite, max_model_len: int | None) -> None:
    needed = suite.input_tokens + suite.output_tokens
    if max_model_len is not None and needed > max_model_len:
        raise InputError(
            f"the benchmark asks for {suite.input_tokens} + {suite.output_tokens} = {needed} "
            f"tokens a request, but the model is served with {max_model_len}",
            where="bench.input_tokens, bench.output_tokens",
            fix=(
                f"lower bench.input_tokens or bench.output_tokens to {max_model_len} in sum, or "
                f"raise serve.max_model_len to {needed} if the checkpoint allows it"
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
