"""An interrupted suite goes on: nothing that was scored is asked again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.question_model import write_question_model
from fakes.scoring_server import MODEL, ScoringServer

from qkit.errors import ServerError
from qkit.evaluate.accuracy import run_accuracy
from qkit.evaluate.scored_answers import ScoredAnswers, request_key
from qkit.evaluate.scoring_requests import (
    Answer,
    GenerateRequest,
    OptionRequest,
    PromptRequest,
    Request,
    TokenScore,
)
from qkit.measurements import AccuracyResult
from qkit.suites import AccuracySuite

ANSWERS: dict[Request, Answer] = {
    OptionRequest((1, 2), (3, 4)): (TokenScore(-0.1, True), TokenScore(-2.0000000001, False)),
    PromptRequest((1, 2), 1): (TokenScore(-1e-17, False),),
    GenerateRequest((1, 2), 8, stop=("\n",)): "Ünïcode\nand a second line \u2028 here",
}
SUITE = AccuracySuite(task="mmlu_dev", limit=60, num_fewshot=1)


def written(path: Path) -> Path:
    with ScoredAnswers(path, "me") as scored:
        for request, answer in ANSWERS.items():
            scored.keep(request, answer)
    return path


class TestFile:
    def test_answers_come_back_to_the_last_bit(self, tmp_path: Path) -> None:
        with ScoredAnswers(written(tmp_path / "deep" / "a.jsonl"), "me") as scored:
            assert {request: scored.get(request) for request in ANSWERS} == ANSWERS
            assert scored.get(OptionRequest((1, 2), (4, 3))) is None
            assert len(scored) == 3

    @pytest.mark.parametrize(
        "other",
        [
            OptionRequest((1, 3), (3, 4)),
            OptionRequest((1, 2), (3,)),
            PromptRequest((1, 2), 2),
            GenerateRequest((1, 2), 9, stop=("\n",)),
            GenerateRequest((1, 2), 8, stop=("\n",), seed=1),
            GenerateRequest((1, 2), 8, stop=("\n",), temperature=0.5),
            GenerateRequest((1, 2), 8, stop=("\n",), extra=(("top_k", 3),)),
        ],
    )
    def test_every_part_of_a_request_counts(self, other: Request) -> None:
        assert request_key(other) not in {request_key(request) for request in ANSWERS}

    @pytest.mark.parametrize("cut", range(1, 40, 6))
    def test_a_line_that_was_cut_off_is_dropped_and_the_file_goes_on(
        self, tmp_path: Path, cut: int
    ) -> None:
        path = written(tmp_path / "a.jsonl")
        os.truncate(path, path.stat().st_size - cut)
        last = list(ANSWERS)[-1]
        with ScoredAnswers(path, "me") as scored:
            assert len(scored) == 2
            assert scored.get(last) is None
            scored.keep(last, ANSWERS[last])
        with ScoredAnswers(path, "me") as scored:
            assert len(scored) == 3

    def test_a_damaged_line_loses_only_itself(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.jsonl")
        lines = path.read_text().split("\n")
        lines[2] = lines[2].replace("[", "{", 1)
        path.write_text("\n".join(lines))
        with ScoredAnswers(path, "me") as scored:
            assert [scored.get(request) is None for request in ANSWERS] == [False, True, False]

    @pytest.mark.parametrize("content", [None, "", "not json\n", '{"format": 0}\n', "\x00\n"])
    def test_another_identity_or_no_header_starts_anew(
        self, tmp_path: Path, content: str | None
    ) -> None:
        path = written(tmp_path / "a.jsonl")
        if content is not None:
            path.write_text(content)
        with ScoredAnswers(path, "other" if content is None else "me") as scored:
            assert len(scored) == 0
            scored.keep(*next(iter(ANSWERS.items())))
        assert len(path.read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    return write_question_model(folder, ["The following are multiple choice questions"] * 50)


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> AccuracyResult:
    with ScoringServer(max_model_len=8192) as server:
        return score(server, checkpoint)


def score(
    server: ScoringServer, checkpoint: Path, scored: ScoredAnswers | None = None
) -> AccuracyResult:
    return run_accuracy(
        SUITE,
        base_url=server.url,
        model=MODEL,
        tokenizer_path=checkpoint,
        max_model_len=None,
        concurrency=4,
        scored=scored,
    )


def asked(bodies: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(b["prompt"]), tuple(b["logprob_token_ids"])) for b in bodies]


def whole_lines(path: Path) -> list[Any]:
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()[1:]]


def go_on(
    path: Path, checkpoint: Path, undisturbed: AccuracyResult
) -> Iterator[tuple[int, AccuracyResult]]:
    """Finish an interrupted suite on a new server; yield the answers left, and the result."""
    left = {key for key, _ in whole_lines(path)}
    with ScoringServer(max_model_len=8192) as server, ScoredAnswers(path, "me") as scored:
        result = score(server, checkpoint, scored)
    again = {request_key(OptionRequest(*request)) for request in asked(server.bodies)}
    assert not again & left
    assert len(again) == len(server.bodies) == result.requests == 60 - len(left)
    assert result.resumed == len(left)
    for field in ("headline", "scores", "samples", "marks", "num_fewshot"):
        assert getattr(result, field) == getattr(undisturbed, field)
    yield len(left), result


CLIENT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from qkit.evaluate.scored_answers import ScoredAnswers
from test_scored_answers import score
class Server: url = sys.argv[2]
with ScoredAnswers(Path(sys.argv[4]), "me") as scored:
    score(Server, Path(sys.argv[3]), scored)
"""


def test_a_client_killed_in_the_middle_goes_on(
    checkpoint: Path, undisturbed: AccuracyResult, tmp_path: Path
) -> None:
    here = Path(__file__).parent
    path = tmp_path / "scored.jsonl"
    with ScoringServer(max_model_len=8192, delay_s=0.05) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(here), server.url, str(checkpoint), str(path)],
            env={**os.environ, "PYTHONPATH": str(here.parent), "HF_HUB_OFFLINE": "1"},
        )
        try:
            deadline = time.monotonic() + 180
            while len(whole_lines(path)) < 12 and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
    assert process.returncode == -signal.SIGKILL
    ((left, _),) = go_on(path, checkpoint, undisturbed)
    assert 12 <= left < 60


@pytest.mark.parametrize("fault", ["disconnect", "stall", "http_500"])
def test_a_server_lost_in_the_middle_loses_no_question(
    checkpoint: Path,
    undisturbed: AccuracyResult,
    tmp_path: Path,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qkit.evaluate import lm
    from qkit.evaluate.scoring_client import ScoringClient

    def impatient(*args: Any, **settings: Any) -> ScoringClient:
        settings |= {"timeout_s": 1.0, "attempts": 2}
        return ScoringClient(*args, **settings, backoff_s=0.01)

    monkeypatch.setattr(lm, "ScoringClient", impatient)
    path = tmp_path / "scored.jsonl"
    with (
        ScoringServer(fault=fault, fault_after=25, max_model_len=8192) as server,
        ScoredAnswers(path, "me") as scored,
        pytest.raises(ServerError),
    ):
        score(server, checkpoint, scored)
    monkeypatch.setattr(lm, "ScoringClient", ScoringClient)
    ((left, _),) = go_on(path, checkpoint, undisturbed)
    assert left == 25
