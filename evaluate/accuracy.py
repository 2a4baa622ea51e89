"""Runs one accuracy suite: lm-eval's own task, scored on a served variant, every sample kept."""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lm_eval

from qkit.errors import InputError, MeasurementError
from qkit.evaluate.adaptive import START
from qkit.evaluate.drawing import Documents, draw_documents
from qkit.evaluate.harness_results import Results, headline_metric, samples_of, task_scores
from qkit.evaluate.lm import OnProgress, ServedLM, load_tokenizer
from qkit.evaluate.quiet import BOOTSTRAP_ITERATIONS, quiet_lm_eval
from qkit.evaluate.scored_answers import ScoredAnswers
from qkit.evaluate.task_catalog import LoadedTask, load_task, num_fewshot
from qkit.hashing import hash_tokenizer, hash_value
from qkit.measurements import AccuracyResult
from qkit.suites import AccuracySuite

#: lm-eval's own seeds; `seed` is added to them, so that 0 gives lm-eval's few-shot examples.
LM_EVAL_SEED = 1234

#: Truncated documents that a mark names.
CUT_SHOWN = 5


def run_accuracy(
    suite: AccuracySuite,
    *,
    base_url: str,
    model: str,
    tokenizer_path: Path,
    max_model_len: int | None,
    data: Path | None = None,
    concurrency: int = START,
    backwards: bool = False,
    scored: ScoredAnswers | None = None,
    on_progress: OnProgress | None = None,
) -> AccuracyResult:
    """Score a served variant on one lm-eval task or group.

    Group scores and their standard errors are lm-eval's own; for `mmlu` that is the mean over all
    questions, not over subjects.

    Args:
        suite: Task, few-shot count, limit, seed and template.
        base_url: Root of the server.
        model: Name the model is served under.
        tokenizer_path: Folder of the served checkpoint.
        max_model_len: Served length in tokens; None asks the server.
        data: Folder of hub data sets in their own layout.
        concurrency: Requests in flight at first; their number follows the server's load.
        backwards: Ask the other way round, so that other questions share a batch.
        scored: Answers an interrupted attempt left, and where new ones are kept.
        on_progress: Called after every request with those finished and all known so far.

    Raises:
        InputError: The task, its data, the model's name or the tokenizer cannot be used, or a
            prompt does not fit the served length and is not to be truncated.
        HubUnreachableError: The task's data cannot be had.
        ServerError: The server is gone, stalls, or keeps failing.
        MeasurementError: The server does not give exact log-probabilities.
    """
    started = time.monotonic()
    tokenizer = load_tokenizer(tokenizer_path)
    if suite.chat_template and not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template",
            where=tokenizer_path,
            fix="leave `chat_template` off, or use an instruct checkpoint",
        )
    task = load_task(suite, data=data)
    documents = draw_documents(task.leaves, suite.limit, suite.seed)
    lm = ServedLM(
        base_url=base_url,
        model=model,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        add_bos_token=suite.add_bos_token,
        truncate=suite.truncate,
        scored=scored,
        concurrency=concurrency,
        backwards=backwards,
        seed=suite.seed,
        on_progress=on_progress,
    )
    shots = num_fewshot(suite)
    results = _evaluate(suite, lm, task, documents, shots)
    headline = headline_metric(results, suite.task)
    scores = tuple(task_scores(results, headline, suite.task, task.leaves))
    first = scores[0]
    if not math.isfinite(first.value):
        raise MeasurementError(f"the score of {suite.task!r} is not finite ({first.value})")
    cut = _by_document(lm.cut_tokens, documents)
    return AccuracyResult(
        suite=suite.task,
        harness=f"lm-eval {importlib.metadata.version('lm_eval')}",
        headline=first,
        scores=scores,
        samples=tuple(samples_of(results, headline, task.leaves, cut)),
        num_fewshot=first.num_fewshot if first.num_fewshot is not None else shots,
        limit=suite.limit,
        seed=suite.seed,
        chat_template=suite.chat_template,
        fewshot_as_multiturn=suite.fewshot_as_multiturn,
        system_prompt=suite.system_prompt,
        add_bos_token=lm.add_bos_token,
        template_hash=hash_value(tokenizer.chat_template) if tokenizer.chat_template else None,
        tokenizer_hash=hash_tokenizer(tokenizer_path),
        truncate=suite.truncate,
        truncated=len(cut),
        resumed=lm.resumed,
        duration_s=time.monotonic() - started,
        requests=lm.usage.requests,
        prompt_tokens=lm.usage.prompt_tokens,
        cached_tokens=lm.usage.cached_tokens,
        marks=_marks(suite, task.leaves, documents, cut),
    )


def _marks(
    suite: AccuracySuite,
    tasks: Mapping[str, Any],
    documents: Documents | None,
    cut: Mapping[tuple[str, int], int],
) -> tuple[str, ...]:
    """Say what a reader of the score must know: not all questions, or not whole ones."""
    marks = []
    if documents is not None:
        drawn = sum(map(len, documents.values()))
        each = f" of each of {len(documents)} tasks" if len(documents) > 1 else ""
        total = sum(len(task.eval_docs) for task in tasks.values())
        if drawn < total:
            marks.append(
                f"limit: {suite.limit}{each}, {drawn:,} of {total:,} questions drawn with seed "
                f"{suite.seed}"
            )
    if cut:
        first = ", ".join(f"{task} {number}" for task, number in sorted(cut)[:CUT_SHOWN])
        more = ", ..." if len(cut) > CUT_SHOWN else ""
        marks.append(
            f"truncated: {len(cut):,} questions lost up to {max(cut.values()):,} tokens at their "
            f"beginning ({first}{more})"
        )
    return tuple(marks)


def _by_document(
    cut: Mapping[tuple[str, int], int], documents: Documents | None
) -> dict[tuple[str, int], int]:
    """Number documents as the task does: where some were drawn, lm-eval counts only those."""
    if documents is None:
        return dict(cut)
    return {(task, documents[task][number]): tokens for (task, number), tokens in cut.items()}


def _evaluate(
    suite: AccuracySuite,
    lm: ServedLM,
    task: LoadedTask,
    documents: Documents | None,
    shots: int | None,
) -> Results:
    seed = LM_EVAL_SEED + suite.seed
    try:
        with quiet_lm_eval():
            results: Results | None = lm_eval.simple_evaluate(
                model=lm,
                tasks=task.roots,
                task_manager=task.manager,
                num_fewshot=shots,
                samples=documents,
                bootstrap_iters=BOOTSTRAP_ITERATIONS,
                log_samples=True,
                apply_chat_template=suite.chat_template,
                system_instruction=suite.system_prompt,
                fewshot_as_multiturn=suite.fewshot_as_multiturn,
                random_seed=suite.seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
    except AssertionError as error:  # how lm-eval refuses too many few-shot examples
        raise InputError(
            f"lm-eval refuses the settings of the task {suite.task!r}",
            detail=str(error),
            fix="ask for fewer few-shot examples",
        ) from error
    if results is None:
        raise MeasurementError(f"lm-eval returned no result for {suite.task!r}")
    return results
