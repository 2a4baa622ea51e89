"""Our scorer against lm-eval's own client, on the real vLLM.

The server computes in float32: in bfloat16, what a token is batched with moves log-likelihoods by
several thousandths on this model, and every client then disagrees with itself that much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from fakes.question_model import write_question_model
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from qkit.evaluate.accuracy import run_accuracy
from qkit.evaluate.drawing import draw_documents
from qkit.evaluate.harness_results import headline_metric, samples_of, task_scores
from qkit.evaluate.lm import ServedLM, load_tokenizer
from qkit.evaluate.quiet import quiet_lm_eval
from qkit.evaluate.task_catalog import load_task, num_fewshot
from qkit.evaluate.tasks.mmlu_dev import questions
from qkit.recipe import Serve
from qkit.server import RunningServer, ServerSpec, serve
from qkit.suites import AccuracySuite

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-4
MODEL = "question-model"
TEXTS = [f"{q['question']}\n" + "\n".join(q["choices"]) + "\nAnswer:" for q in questions()[:40]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_question_model(tmp_path_factory.mktemp("model") / "checkpoint", TEXTS)


@pytest.fixture(scope="module")
def server(
    serve_python: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    spec = ServerSpec(
        python=serve_python,
        model_path=checkpoint,
        name=MODEL,
        method=None,
        accelerator="cpu",
        # One process with one compute thread, as in recipes/demo.yaml: enough on few cores.
        serve=Serve(
            kv_cache_gib=1,
            enforce_eager=True,
            args=("--dtype", "float32", "--distributed-executor-backend", "uni"),
            env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"},
        ),
        log=tmp_path_factory.mktemp("log") / "server.log",
    )
    with serve(spec) as running:
        yield running


def lm_eval_client(server: RunningServer, checkpoint: Path, max_length: int) -> Any:
    return LocalCompletionsAPI(
        base_url=f"{server.base_url}/v1/completions",
        model=MODEL,
        tokenizer=str(checkpoint),
        tokenizer_backend="huggingface",
        num_concurrent=16,
        max_length=max_length,
        timeout=600,
    )


def our_lm(server: RunningServer, checkpoint: Path, max_length: int | None = None) -> ServedLM:
    return ServedLM(
        base_url=server.base_url,
        model=MODEL,
        tokenizer=load_tokenizer(checkpoint),
        max_model_len=max_length,
    )


def instances(kind: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, i, ("task", i, 1)) for i, args in enumerate(arguments)]


@pytest.mark.parametrize("shots", [0, 5])
def test_option_task(server: RunningServer, checkpoint: Path, shots: int) -> None:
    """The same score, the same answers, the same log-likelihoods; few-shot uses the cache."""
    suite = AccuracySuite(task="mmlu_dev", limit=40, num_fewshot=shots)
    ours = run_accuracy(
        suite,
        base_url=server.base_url,
        model=MODEL,
        tokenizer_path=checkpoint,
        max_model_len=None,
    )
    loaded = load_task(suite, data=None)
    client = lm_eval_client(server, checkpoint, 8192)
    with quiet_lm_eval():
        theirs = lm_eval.simple_evaluate(
            model=client,
            tasks=loaded.roots,
            task_manager=loaded.manager,
            num_fewshot=num_fewshot(suite),
            samples=draw_documents(loaded.leaves, suite.limit, suite.seed),
        )
    assert theirs is not None
    metric = headline_metric(theirs, suite.task)
    assert task_scores(theirs, metric, suite.task)[0] == ours.headline
    other = samples_of(theirs, metric, loaded.leaves)
    assert len(other) == len(ours.samples) == 40
    for one, two in zip(ours.samples, other, strict=True):
        assert (one.doc_hash, one.value, one.target) == (two.doc_hash, two.value, two.target)
        assert one.loglikelihoods == pytest.approx(two.loglikelihoods, abs=TOLERANCE)
    assert len({sample.loglikelihoods for sample in ours.samples}) > 30
    if shots:
        # Forty questions drawn over 57 subjects share no examples; asked again, they share all.
        again = run_accuracy(
            suite,
            base_url=server.base_url,
            model=MODEL,
            tokenizer_path=checkpoint,
            max_model_len=None,
        )
        assert again.cached_tokens is not None
        assert again.cached_tokens > 0.8 * again.prompt_tokens
        for one, two in zip(ours.samples, again.samples, strict=True):
            assert one.loglikelihoods == pytest.approx(two.loglikelihoods, abs=TOLERANCE)


def test_options_of_several_tokens(server: RunningServer, checkpoint: Path) -> None:
    pairs = [
        (q["question"] + "\nAnswer:", f" {choice}")
        for q in questions()[:15]
        for choice in q["choices"]
    ]
    asked = instances("loglikelihood", pairs)
    ours = our_lm(server, checkpoint).loglikelihood(asked)
    theirs = lm_eval_client(server, checkpoint, 8192).loglikelihood(asked)
    assert [a[0] for a in ours] == pytest.approx([a[0] for a in theirs], abs=TOLERANCE)
    assert [a[1] for a in ours] == [a[1] for a in theirs]


def test_rolling_windows(server: RunningServer, checkpoint: Path) -> None:
    asked = instances("loglikelihood_rolling", [(" ".join(TEXTS[:n]),) for n in (1, 4, 20)])
    ours = our_lm(server, checkpoint, 256).loglikelihood_rolling(asked)
    theirs = lm_eval_client(server, checkpoint, 256).loglikelihood_rolling(asked)
    # A text's log-likelihood is the sum over thousands of tokens, so the tolerance is per token.
    tokens = [len(load_tokenizer(checkpoint)(request.args[0]).input_ids) for request in asked]
    assert max(tokens) > 4 * 256
    for one, two, count in zip(ours, theirs, tokens, strict=True):
        assert one / count == pytest.approx(two / count, abs=TOLERANCE / 10)


def test_generation(server: RunningServer, checkpoint: Path) -> None:
    settings = {"until": ["\n\n", "Answer"], "max_gen_toks": 24, "do_sample": False}
    asked = instances("generate_until", [(text, dict(settings)) for text in TEXTS[:12]])
    ours = our_lm(server, checkpoint).generate_until(asked)
    theirs = lm_eval_client(server, checkpoint, 8192).generate_until(asked)
    assert ours == theirs
    assert any(ours)
