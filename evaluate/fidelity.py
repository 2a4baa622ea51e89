"""Runs the fidelity suite on a served variant: scores a fixed text and continues its beginnings.

Every variant is scored for itself, the baseline too; distances are computed afterwards, from the
stored log-probabilities (`qkit.evaluate.matrix_fidelity`). So the baseline is scored once, and a
variant that is added later needs only itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from qkit.errors import InputError
from qkit.evaluate.fidelity_client import FidelityClient
from qkit.evaluate.fidelity_scores import (
    Journal,
    Scores,
    hash_scores,
    make_scores,
    read_scores,
    write_scores,
)
from qkit.evaluate.fidelity_text import BUNDLED, Document, hash_documents, read_documents
from qkit.evaluate.fidelity_windows import (
    FEWEST_DOCUMENTS,
    SHORTEST,
    Work,
    make_prompts,
    make_windows,
)
from qkit.evaluate.lm import PROBE_TEXT, load_tokenizer
from qkit.hashing import hash_tokenizer, hash_value
from qkit.measurements import FidelityResult
from qkit.suites import WINDOW_TOKENS, FidelitySuite

#: Requests in flight. The server computes logits of whole windows, one request after another, so
#: more of them wait instead of going faster.
CONCURRENCY = 4

OnProgress = Callable[[int, int], None]


def run_fidelity(
    suite: FidelitySuite,
    *,
    base_url: str,
    model: str,
    tokenizer_path: Path,
    max_model_len: int | None,
    scores_file: Path,
    key: str = "",
    resume: bool = True,
    backwards: bool = False,
    timeout_s: float = 600.0,
    on_progress: OnProgress | None = None,
) -> FidelityResult:
    """Score a served variant on a text.

    Args:
        suite: Text, lengths and counts.
        base_url: Root of the server.
        model: Name the model is served under.
        tokenizer_path: Folder of the served checkpoint.
        max_model_len: Served length in tokens; None asks the server.
        scores_file: Where the log-probabilities go; a journal lies beside it while they come.
        key: Measurement's key: with an equal one, what is scored already is not scored again.
        resume: Whether to look for such scores.
        backwards: Send the last window first. A second run in the same order would be batched alike
            and show less noise than there is.
        timeout_s: Seconds of silence after which a request has failed.
        on_progress: Called after every request with those finished and all of them.

    Raises:
        InputError: Text, lengths, model's name or tokenizer cannot be used.
        ServerError: The server is gone, stalls, or keeps failing; what was scored is kept.
        MeasurementError: The server does not give the log-probabilities.
    """
    started = time.monotonic()
    documents = read_documents(suite.text)
    tokenizer = load_tokenizer(tokenizer_path)
    client = FidelityClient(base_url, model, timeout_s=timeout_s)
    served = asyncio.run(_meet(client, _tokenize(tokenizer, PROBE_TEXT)))
    length = served if max_model_len is None else min(served or max_model_len, max_model_len)
    window_tokens = window_length(suite, length)
    work = make_work(suite, documents, window_tokens, lambda text: _tokenize(tokenizer, text))
    tokens_hash = hash_value([[w.tokens for w in part] for part in (work.windows, work.prompts)])
    own_key = hash_value([key, tokens_hash, backwards]) if key else ""
    scores = _stored(scores_file, own_key) if resume else None
    if scores is None:
        journal = Journal(scores_file.with_suffix(".jsonl"), own_key, resume=resume)
        try:
            order = -1 if backwards else 1
            asyncio.run(_ask_all(client, suite, work, journal, order, on_progress))
        finally:
            journal.close()
        scores = make_scores(own_key, work, journal.windows, journal.generated)
        write_scores(scores_file, scores)
        journal.remove()
    return FidelityResult(
        text=suite.text or BUNDLED,
        text_hash=hash_documents(documents),
        tokenizer_hash=hash_tokenizer(tokenizer_path),
        tokens_hash=tokens_hash,
        documents=work.documents,
        windows=len(work.windows),
        window_tokens=window_tokens,
        scored_tokens=work.scored_tokens,
        top_logprobs=suite.top_logprobs,
        unit="document" if work.documents >= FEWEST_DOCUMENTS else "window",
        greedy_prompts=len(work.prompts),
        greedy_prompt_tokens=suite.greedy_prompt_tokens,
        greedy_tokens=suite.greedy_tokens,
        perplexity=scores.perplexity,
        scores_hash=hash_scores(scores_file),
        duration_s=time.monotonic() - started,
    )


def window_length(suite: FidelitySuite, served: int | None) -> int:
    """Return the tokens of a window: as asked for, else what is usual or fits.

    Raises:
        InputError: Windows or generations do not fit the served length, or it is not known.
    """
    wanted = suite.window_tokens
    if served is None:
        if wanted is None:
            raise InputError(
                "the server does not say how many tokens it serves",
                fix="set `fidelity.window_tokens`",
            )
        return wanted
    longest = served - 1  # the server always generates a token
    greedy = suite.greedy_prompt_tokens + suite.greedy_tokens if suite.greedy_prompts else 0
    for name, needed in (("window_tokens", wanted or SHORTEST), ("greedy_tokens", greedy)):
        if needed > longest + (name == "greedy_tokens"):
            raise InputError(
                f"`fidelity.{name}` does not fit the served length of {served} tokens: "
                f"{needed} are needed",
                fix="lower it, or serve with a larger max_model_len",
            )
    return wanted or min(WINDOW_TOKENS, longest)


def make_work(
    suite: FidelitySuite,
    documents: Sequence[Document],
    window_tokens: int,
    tokenize: Callable[[str], list[int]],
) -> Work:
    """Return all requests of a suite.

    Raises:
        InputError: The text is too short for one window.
    """
    ids = [tokenize(document.text) for document in documents]
    windows = make_windows(ids, window_tokens=window_tokens, tokens=suite.tokens)
    if not windows:
        raise InputError("the text has fewer than two tokens", where=suite.text)
    prompts = make_prompts(
        windows, prompts=suite.greedy_prompts, prompt_tokens=suite.greedy_prompt_tokens
    )
    return Work(windows, prompts)


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    # Not verbose: a document is longer than any model's length, and cut into windows afterwards.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _stored(path: Path, key: str) -> Scores | None:
    """Return the scores of the same key, where a run ended between storing them and the result."""
    scores = read_scores(path) if key else None
    return scores if scores is not None and scores.key == key else None


async def _meet(client: FidelityClient, probe: list[int]) -> int | None:
    """Check that the server serves the model with our tokenizer; return its length in tokens."""
    async with client:
        served = await client.describe()
        theirs = await client.tokenize(PROBE_TEXT)
    if theirs is not None and theirs != probe:
        raise InputError(
            f"the server of {served.name!r} has another tokenizer: it splits a probe text into "
            f"{len(theirs)} tokens, ours into {len(probe)}, not all alike",
            where=client.base_url,
            fix="give the tokenizer of the checkpoint that is served",
        )
    return served.max_model_len


async def _ask_all(
    client: FidelityClient,
    suite: FidelitySuite,
    work: Work,
    journal: Journal,
    order: int,
    on_progress: OnProgress | None,
) -> None:
    """Ask for everything the journal lacks, a few requests at a time."""
    total = len(work.windows) + len(work.prompts)
    slots = asyncio.Semaphore(CONCURRENCY)

    async def score(index: int) -> None:
        async with slots:
            tokens = work.windows[index].tokens
            journal.add_window(index, await client.score(tokens, suite.top_logprobs))
            report()

    async def continue_greedily(index: int) -> None:
        async with slots:
            tokens = work.prompts[index].tokens
            ids = await client.continue_greedily(tokens, suite.greedy_tokens)
            journal.add_generated(index, ids)
            report()

    def report() -> None:
        if on_progress is not None:
            on_progress(len(journal.windows) + len(journal.generated), total)

    windows = [i for i in range(len(work.windows)) if i not in journal.windows]
    prompts = [i for i in range(len(work.prompts)) if i not in journal.generated]
    async with client:
        # One kind after the other: what is batched together should not depend on their speeds.
        await _gather([score(index) for index in windows[::order]])
        await _gather([continue_greedily(index) for index in prompts[::order]])


async def _gather(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
