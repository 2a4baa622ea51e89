"""The fidelity suite against a fake server: what is stored, what is resumed, what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.fidelity_server import FidelityServer, distribution
from fakes.scoring_server import MODEL
from fakes.tokenizers_for_tests import write_byte_tokenizer

from qkit.errors import InputError, MeasurementError, QkitError, ServerError
from qkit.evaluate.fidelity import run_fidelity
from qkit.evaluate.fidelity_client import FidelityClient
from qkit.evaluate.fidelity_scores import Journal, Scores, WindowScores, read_scores
from qkit.measurements import FidelityResult
from qkit.suites import FidelitySuite

TEXTS = [f"Document {n} says that {n} squared is {n * n}." for n in range(10)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("model") / "checkpoint")
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )
    return folder


@pytest.fixture
def suite(tmp_path: Path) -> FidelitySuite:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return FidelitySuite(
        text=str(text),
        window_tokens=16,
        tokens=200,
        top_logprobs=10,
        greedy_prompts=3,
        greedy_prompt_tokens=8,
        greedy_tokens=5,
    )


def run(
    suite: FidelitySuite, server: FidelityServer, checkpoint: Path, file: Path, **arguments: Any
) -> FidelityResult:
    return run_fidelity(
        suite,
        base_url=server.url,
        model=MODEL,
        tokenizer_path=checkpoint,
        max_model_len=None,
        scores_file=file,
        **{"key": "k", "timeout_s": 5, **arguments},
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    client = partial(FidelityClient, attempts=2, backoff_s=0.001)
    monkeypatch.setattr("qkit.evaluate.fidelity.FidelityClient", client)


def stored(path: Path) -> Scores:
    scores = read_scores(path)
    assert scores is not None
    return scores


def test_scores_are_the_servers(suite: FidelitySuite, checkpoint: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    with FidelityServer() as server:
        result = run(
            suite,
            server,
            checkpoint,
            tmp_path / "f" / "s.npz",
            on_progress=lambda done, total: progress.append((done, total)),
        )
    scores = stored(tmp_path / "f" / "s.npz")
    assert (result.scored_tokens, result.documents, result.unit) == (200, 10, "document")
    assert scores.top_ids.shape == (200, 10)
    window = next(b["prompt"] for b in server.bodies if "prompt_logprobs" in b)
    for i in range(15):
        expected = distribution(window[: i + 1])
        assert scores.token[i] == window[i + 1]
        assert scores.logprob[i] == pytest.approx(expected[window[i + 1]])
        assert scores.top_logprobs[i] == pytest.approx(np.sort(expected)[::-1][:10])
        assert expected[scores.top_ids[i]] == pytest.approx(scores.top_logprobs[i])
    assert result.perplexity == pytest.approx(np.exp(-scores.logprob.astype(float).mean()))
    assert scores.generated.shape == (3, 5)
    total = result.windows + 3
    assert progress == [(n, total) for n in range(1, total + 1)]
    assert not (tmp_path / "f" / "s.jsonl").exists()
    assert all(body["temperature"] == 0 for body in server.bodies)


def test_an_interrupted_suite_goes_on_where_it_stopped(
    suite: FidelitySuite, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "s.npz"
    with (
        FidelityServer(fault="disconnect", fault_after=7) as server,
        pytest.raises(ServerError),
    ):
        run(suite, server, checkpoint, file)
    assert not file.exists()
    journal = file.with_suffix(".jsonl")
    kept = len(journal.read_text().splitlines()) - 1
    assert kept >= 4  # seven were answered, at most three of them to requests then given up
    with journal.open("a") as stream:
        stream.write('{"window": 3, "logpr')  # as a kill leaves it
    with FidelityServer() as server:
        result = run(suite, server, checkpoint, file)
        assert len(server.bodies) == result.windows + 3 - kept
    with FidelityServer() as server:
        whole = run(suite, server, checkpoint, tmp_path / "whole.npz")
    assert whole.perplexity == result.perplexity
    assert (stored(file).top_ids == stored(tmp_path / "whole.npz").top_ids).all()


def test_finished_scores_without_a_result_are_taken_as_they_are(
    suite: FidelitySuite, checkpoint: Path, tmp_path: Path
) -> None:
    with FidelityServer() as server:
        first = run(suite, server, checkpoint, tmp_path / "s.npz")
        sent = len(server.bodies)
        again = run(suite, server, checkpoint, tmp_path / "s.npz")
        assert len(server.bodies) == sent
        assert again.scores_hash == first.scores_hash
        for change in ({"resume": False}, {"key": "other"}, {"key": ""}, {"backwards": True}):
            run(suite, server, checkpoint, tmp_path / "s.npz", **change)
            sent += first.windows + 3
            assert len(server.bodies) == sent, change


def test_backwards_sends_the_same_in_opposite_order(
    suite: FidelitySuite, checkpoint: Path, tmp_path: Path
) -> None:
    orders = []
    for backwards in (False, True):
        with FidelityServer() as server:
            run(suite, server, checkpoint, tmp_path / f"{backwards}.npz", backwards=backwards)
            windows = [b["prompt"] for b in server.bodies if "prompt_logprobs" in b]
            orders.append(windows)
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0][0] in orders[1][-4:]  # four are under way at once
    one, other = (stored(tmp_path / f"{b}.npz") for b in (False, True))
    assert (one.logprob == other.logprob).all()


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("no_logprobs", MeasurementError, "log-probabilities of no prompt tokens"),
        ("short_echo", MeasurementError, "log-probabilities of 15 prompt tokens, expected 16"),
        ("other_echo", MeasurementError, "lacks the prompt's own token"),
        ("minus_infinity", MeasurementError, "not finite"),
        ("no_text", MeasurementError, "no token ids of the generated text"),
        ("no_choices", ServerError, "without a completion"),
        ("http_500", ServerError, "failed 2 times"),
        ("not_json", ServerError, "does not answer JSON"),
    ],
)
def test_replies_that_lack_something_are_errors(
    suite: FidelitySuite,
    checkpoint: Path,
    tmp_path: Path,
    fault: Any,
    kind: type[QkitError],
    message: str,
) -> None:
    with FidelityServer(fault=fault) as server, pytest.raises(kind, match=message):
        run(suite, server, checkpoint, tmp_path / "s.npz")
    assert not (tmp_path / "s.npz").exists()


def test_too_many_log_probabilities_name_the_flag(
    suite: FidelitySuite, checkpoint: Path, tmp_path: Path
) -> None:
    with (
        FidelityServer(max_logprobs=5) as server,
        pytest.raises(InputError, match="fewer than 10 log-probabilities") as caught,
    ):
        run(suite, server, checkpoint, tmp_path / "s.npz")
    assert "--max-logprobs 10" in (caught.value.fix or "")


def test_another_tokenizer_is_refused(
    suite: FidelitySuite, checkpoint: Path, tmp_path: Path
) -> None:
    with (
        FidelityServer(tokenize=[1, 2, 3]) as server,
        pytest.raises(InputError, match="another tokenizer"),
    ):
        run(suite, server, checkpoint, tmp_path / "s.npz")
    assert server.bodies == []


def test_a_broken_file_of_scores_is_none(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    assert read_scores(path) is None
    path.write_bytes(b"PK\x03\x04 cut")
    assert read_scores(path) is None


def test_a_journal_of_another_key_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    first = Journal(path, "a", resume=True)
    first.add_window(0, WindowScores([-1.0], [[1]], [[-0.5]]))
    first.add_generated(1, [4, 5])
    first.close()
    again = Journal(path, "a", resume=True)
    assert again.windows[0].logprobs == [-1.0]
    assert again.generated == {1: (4, 5)}
    again.close()
    other = Journal(path, "b", resume=True)
    assert (other.windows, other.generated) == ({}, {})
    other.close()
    assert len(path.read_text().splitlines()) == 1
