"""Questions per second of qkit's scorer against lm-eval's own client, on one running server.

    qkit serve VARIANT --port 8000
    python scripts/bench_scoring.py --url http://127.0.0.1:8000 --tokenizer VARIANT \
        --task mmlu_dev --num-fewshot 5 --limit 60

lm-eval's `local-completions` needs the package `tenacity` (in the dev group). With
VLLM_SERVER_DEV_MODE=1 on the server, its prefix cache is emptied before each side runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI

from qkit.errors import QkitError
from qkit.evaluate.harness_results import headline_metric
from qkit.evaluate.lm import ServedLM, load_tokenizer
from qkit.evaluate.prefix_order import minimum_prefill
from qkit.evaluate.quiet import quiet_lm_eval
from qkit.evaluate.scoring_requests import OptionRequest, Request
from qkit.evaluate.server_metrics import parse_samples, reset_prefix_cache
from qkit.evaluate.task_catalog import load_task
from qkit.suites import AccuracySuite

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"


@dataclass(frozen=True)
class Side:
    """One client's run: seconds, tokens the server computed, and log-likelihoods in order."""

    seconds: float
    prefilled: float | None
    score: float
    loglikelihoods: tuple[float, ...]
    questions: int


class CountingLM(ServedLM):
    """Remembers what it sent, for the minimum a prefix cache allows."""

    sent: list[Request]
    block_size: int

    def _ask(self, requests: Any) -> Any:
        self.sent = list(dict.fromkeys(requests))
        self.block_size = self._served.block_size
        return super()._ask(requests)


async def read_metrics(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        return parse_samples(await response.text())


async def empty_cache(url: str) -> bool:
    async with aiohttp.ClientSession() as session:
        return await reset_prefix_cache(session, url)


def measure(lm: Any, suite: AccuracySuite, url: str, data: Path | None) -> Side:
    task = load_task(suite, data=data)
    if not asyncio.run(empty_cache(url)):
        click.echo("note: the server's prefix cache could not be emptied", err=True)
    before = asyncio.run(read_metrics(url))
    started = time.monotonic()
    with quiet_lm_eval():
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=task.roots,
            task_manager=task.manager,
            num_fewshot=suite.num_fewshot,
            limit=suite.limit,
            bootstrap_iters=0,
        )
    seconds = time.monotonic() - started
    after = asyncio.run(read_metrics(url))
    samples = [entry for logged in results["samples"].values() for entry in logged]
    loglikelihoods = [
        float(response[0]) for entry in samples for response in entry["filtered_resps"]
    ]
    row = results["results"][suite.task]
    prefilled = None
    if PROMPT_TOKENS in after and HITS in after:
        prefilled = (after[PROMPT_TOKENS] - before.get(PROMPT_TOKENS, 0)) - (
            after[HITS] - before.get(HITS, 0)
        )
    return Side(
        seconds=seconds,
        prefilled=prefilled,
        score=float(row[",".join(headline_metric(results, suite.task))]),
        loglikelihoods=tuple(loglikelihoods),
        questions=len(samples),
    )


@click.command(help=__doc__)
@click.option("--url", required=True, help="Root of a running vLLM server.")
@click.option("--model", default=None, help="Served name; by default the only one served.")
@click.option("--tokenizer", type=click.Path(path_type=Path), required=True)
@click.option("--task", default="mmlu_dev", show_default=True)
@click.option("--num-fewshot", type=int, default=0, show_default=True)
@click.option("--limit", type=int, default=None, help="Documents per task.")
@click.option("--data", type=click.Path(path_type=Path), default=None)
@click.option("--concurrency", type=int, default=32, show_default=True)
@click.option("--ours-only", is_flag=True, help="Do not run lm-eval's own client.")
def main(
    url: str,
    model: str | None,
    tokenizer: Path,
    task: str,
    num_fewshot: int,
    limit: int | None,
    data: Path | None,
    concurrency: int,
    ours_only: bool,
) -> None:
    url = url.rstrip("/").removesuffix("/v1")
    suite = AccuracySuite(task=task, num_fewshot=num_fewshot, limit=limit)
    try:
        lm = CountingLM(
            base_url=url,
            model=model or served_name(url),
            tokenizer=load_tokenizer(tokenizer),
            concurrency=concurrency,
        )
        ours = measure(lm, suite, url, data)
    except QkitError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    report = {
        "task": task,
        "num_fewshot": num_fewshot,
        "questions": ours.questions,
        "ours_s": round(ours.seconds, 2),
        "ours_questions_per_s": round(ours.questions / ours.seconds, 2),
        "ours_requests": lm.usage.requests,
        "ours_prompt_tokens_sent": lm.usage.prompt_tokens,
        "ours_prefilled_tokens": ours.prefilled,
        "score": ours.score,
    }
    options = [request for request in lm.sent if isinstance(request, OptionRequest)]
    if len(options) == len(lm.sent):
        least = minimum_prefill([request.prompt for request in options], lm.block_size)
        report |= {
            "block_size": lm.block_size,
            "minimum_prefilled_tokens": least,
            "prefilled_over_minimum": round((ours.prefilled or 0) / least, 4)
            if ours.prefilled is not None
            else None,
        }
    if not ours_only:
        theirs = measure(
            LocalCompletionsAPI(
                base_url=f"{url}/v1/completions",
                model=lm._client.model,
                tokenizer=str(tokenizer),
                tokenizer_backend="huggingface",
                num_concurrent=concurrency,
                max_length=lm.max_length,
                timeout=3600,
            ),
            suite,
            url,
            data,
        )
        pairs = zip(ours.loglikelihoods, theirs.loglikelihoods, strict=True)
        report |= {
            "lm_eval_s": round(theirs.seconds, 2),
            "lm_eval_questions_per_s": round(theirs.questions / theirs.seconds, 2),
            "lm_eval_prefilled_tokens": theirs.prefilled,
            "speedup": round(theirs.seconds / ours.seconds, 1),
            "largest_loglikelihood_difference": max(abs(a - b) for a, b in pairs),
            "same_score": ours.score == theirs.score,
        }
    click.echo(json.dumps(report, indent=1))


def served_name(url: str) -> str:
    async def ask() -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
            return str((await response.json())["data"][0]["id"])

    return asyncio.run(ask())


if __name__ == "__main__":
    main()
