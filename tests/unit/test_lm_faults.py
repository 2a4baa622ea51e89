"""A server that does not answer rightly gives a clear error, never a score."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.question_model import write_question_model
from fakes.scoring_server import MODEL, Fault, ScoringServer, logprob

from qkit.errors import InputError, MeasurementError, QkitError, ServerError
from qkit.evaluate.lm import PROBE_TEXT, ServedLM, load_tokenizer
from qkit.evaluate.scoring_client import ScoringClient
from qkit.evaluate.scoring_requests import (
    Answer,
    GenerateRequest,
    OptionRequest,
    PromptRequest,
    Request,
    TokenScore,
)

OPTIONS = OptionRequest((1, 2, 3), (10, 11, 12, 13))
PROMPT = PromptRequest((1, 2, 3, 4, 5), 3)
TEXT = GenerateRequest((1, 2, 3), 4)


def ask(
    url: str, *requests: Request, model: str = MODEL, timeout_s: float = 10, attempts: int = 3
) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}

    async def run() -> None:
        client = ScoringClient(
            url, model, timeout_s=timeout_s, attempts=attempts, backoff_s=0.01, concurrency=4
        )
        async with client:
            await client.answer_all(requests, on_answer=answers.__setitem__)

    asyncio.run(run())
    return answers


class TestReplies:
    @pytest.mark.parametrize(
        ("fault", "request_", "message"),
        [
            ("no_logprobs", OPTIONS, "returns no log-probabilities"),
            ("no_logprobs", PROMPT, "returns no log-probabilities"),
            ("ignores_token_ids", OPTIONS, "lacks 4 of 4 answer tokens"),
            ("nan", OPTIONS, "not finite"),
            ("nan", PROMPT, "not finite"),
            ("null", OPTIONS, "a log-probability is None"),
            ("null", PROMPT, "a log-probability is None"),
            ("minus_infinity", OPTIONS, "not finite"),
            ("minus_infinity", PROMPT, "not finite"),
            ("short_echo", PROMPT, "has 5 tokens, expected 6"),
            ("other_echo", PROMPT, "at position 3"),
            ("no_text", TEXT, "no text"),
        ],
    )
    def test_what_a_reply_lacks_is_named(
        self, fault: Fault, request_: Request, message: str
    ) -> None:
        with ScoringServer(fault=fault) as server, pytest.raises(MeasurementError) as caught:
            ask(server.url, request_)
        assert message in str(caught.value)
        assert MODEL in str(caught.value)

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("error_200", "the engine is dead"),
            ("no_choices", "no choices"),
            ("not_json", "does not answer JSON"),
            ("http_422", "HTTP 422 from /v1/completions: bad field"),
        ],
    )
    def test_an_error_inside_the_reply_is_shown(self, fault: Fault, message: str) -> None:
        with ScoringServer(fault=fault) as server, pytest.raises(ServerError) as caught:
            ask(server.url, OPTIONS)
        assert message in str(caught.value)
        assert len(server.bodies) == 1

    def test_a_prompt_the_server_finds_too_long_is_the_callers(self) -> None:
        with ScoringServer(fault="too_long") as server, pytest.raises(InputError) as caught:
            ask(server.url, OPTIONS)
        assert "maximum context length is 16" in str(caught.value)
        assert "max_model_len" in str(caught.value)

    def test_a_text_cut_off_by_a_server_that_stops_is_no_answer(self) -> None:
        with (
            ScoringServer(fault="aborted") as server,
            pytest.raises(ServerError, match=r"cut a text off.*'abort'"),
        ):
            ask(server.url, TEXT)

    @pytest.mark.parametrize("fault_after", [0, 1, 5])
    def test_one_bad_reply_among_many_spoils_the_run(self, fault_after: int) -> None:
        requests = [OptionRequest((n, 2, 3), (10, 11)) for n in range(8)]
        with (
            ScoringServer(fault="ignores_token_ids", fault_after=fault_after) as server,
            pytest.raises(MeasurementError, match="answer tokens"),
        ):
            ask(server.url, *requests)


class TestTheOthers:
    """One request fails for good: what else was answered is kept."""

    @pytest.mark.parametrize("bad", [0, 3, 7])
    def test_answers_that_come_with_the_failure_are_kept(self, bad: int) -> None:
        kept = self.run(bad, late_s=0.0)
        assert sorted(kept) == [n for n in range(8) if n != bad]

    def test_answers_on_their_way_are_waited_for(self) -> None:
        assert sorted(self.run(0, late_s=0.2)) == [1, 2, 3, 4, 5, 6, 7]

    def test_but_not_for_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("qkit.evaluate.scoring_client.DRAIN_S", 0.05)
        assert self.run(0, late_s=60.0) == {}

    def run(self, bad: int, late_s: float) -> dict[int, Answer]:
        class Client(ScoringClient):
            async def answer(self, request: Request) -> Answer:
                if request.prompt[0] == bad:
                    raise ServerError("dead")
                await asyncio.sleep(late_s)
                return (TokenScore(-1.0, is_greedy=True),)

        kept: dict[int, Answer] = {}

        async def run() -> None:
            async with Client("http://127.0.0.1:9", MODEL, concurrency=8, adapt=False) as client:
                await client.answer_all(
                    [OptionRequest((n, 2, 3), (10,)) for n in range(8)], on_answer=kept.__setitem__
                )

        with pytest.raises(ServerError, match="dead"):
            asyncio.run(run())
        return kept


class TestTrouble:
    def test_a_connection_that_is_not_made_in_time_is_tried_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries = 0

        def request(*_: Any, **__: Any) -> Any:
            nonlocal tries
            tries += 1
            raise aiohttp.ConnectionTimeoutError("connection timeout")

        async def describe() -> None:
            async with ScoringClient("http://127.0.0.1:9", MODEL, backoff_s=0.001) as client:
                monkeypatch.setattr(client._session, "request", request)
                await client.describe()

        with pytest.raises(ServerError, match="5 times in a row") as caught:
            asyncio.run(describe())
        assert "within 600 s" not in str(caught.value)
        assert tries == 5

    def test_a_server_without_models_whose_message_has_the_models_name(self) -> None:
        async def describe(url: str) -> None:
            async with ScoringClient(f"{url}/nowhere", "nowhere") as client:
                await client.describe()

        with ScoringServer() as server, pytest.raises(ServerError, match="refuses a request"):
            asyncio.run(describe(server.url))

    @pytest.mark.parametrize("fault", ["http_500", "disconnect"])
    def test_passing_trouble_is_tried_again(self, fault: Fault) -> None:
        with ScoringServer(fault=fault, fault_count=2) as server:
            answers = ask(server.url, OPTIONS)
        assert [score.logprob for score in answers[0] if not isinstance(score, str)] == [
            logprob(OPTIONS.prompt, token) for token in OPTIONS.token_ids
        ]
        assert len(server.bodies) == 3

    @pytest.mark.parametrize(
        ("fault", "shown"), [("http_500", "out of memory"), ("disconnect", "Disconnected")]
    )
    def test_lasting_trouble_ends_after_some_attempts(self, fault: Fault, shown: str) -> None:
        with ScoringServer(fault=fault) as server, pytest.raises(ServerError) as caught:
            ask(server.url, OPTIONS)
        assert "failed 3 times in a row" in str(caught.value)
        assert shown in str(caught.value)
        assert len(server.bodies) == 3

    def test_a_stalled_server_is_an_error_and_not_tried_again(self) -> None:
        with (
            ScoringServer(fault="stall", fault_after=2) as server,
            pytest.raises(ServerError, match=r"did not answer /v1/completions within 0\.2 s"),
        ):
            ask(server.url, OPTIONS, PROMPT, TEXT, timeout_s=0.2)

    def test_nobody_listening_is_an_error(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ServerError, match="failed 3 times") as caught:
                ask(url, OPTIONS)
        assert url in str(caught.value)

    def test_a_wrong_model_name_names_those_served(self) -> None:
        with ScoringServer() as server, pytest.raises(InputError) as caught:
            ask(server.url, OPTIONS, model="other-model")
        assert "does not serve 'other-model'" in str(caught.value)
        assert f"it serves: {MODEL}" in str(caught.value)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    return load_tokenizer(write_question_model(folder, ["Which of these is right?"]))


class TestMeeting:
    """What the LM class asks the server before it scores anything."""

    def meet(self, server: ScoringServer, tokenizer: Any, model: str = MODEL) -> ServedLM:
        return ServedLM(base_url=server.url, model=model, tokenizer=tokenizer)

    def test_the_same_tokenizer_passes(self, tokenizer: Any) -> None:
        tokens = tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids
        with ScoringServer(tokenize=tokens) as server:
            assert self.meet(server, tokenizer).max_length == 4096

    @pytest.mark.parametrize("change", ["other", "shorter", "longer"])
    def test_another_tokenizer_is_refused(self, tokenizer: Any, change: str) -> None:
        tokens = tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids
        theirs = {
            "other": [*tokens[:5], tokens[5] + 1, *tokens[6:]],
            "shorter": tokens[:-1],
            "longer": [*tokens, 1],
        }[change]
        with ScoringServer(tokenize=theirs) as server, pytest.raises(InputError) as caught:
            self.meet(server, tokenizer)
        assert "another tokenizer" in str(caught.value)

    def test_a_server_without_tokenize_passes(self, tokenizer: Any) -> None:
        with ScoringServer(tokenize=None) as server:
            assert self.meet(server, tokenizer).max_length == 4096

    def test_a_wrong_model_is_known_at_once(self, tokenizer: Any) -> None:
        with ScoringServer() as server, pytest.raises(InputError, match="does not serve 'x'"):
            self.meet(server, tokenizer, model="x")
        assert not server.bodies

    @pytest.mark.parametrize("content", [None, "not json"])
    def test_a_folder_without_a_tokenizer_is_refused(
        self, tmp_path: Path, content: str | None
    ) -> None:
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(QkitError, match="does not load"):
            load_tokenizer(tmp_path)
        with pytest.raises(InputError, match="does not exist"):
            load_tokenizer(tmp_path / "absent")
