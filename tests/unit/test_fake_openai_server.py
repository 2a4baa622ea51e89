"""The fake's replies have the shape that scorers read; its timings are tested by the benchmark."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from fakes.openai_server import SAMPLED_TOKEN, FakeServer, token_logprob


def post(server: FakeServer, **body: Any) -> tuple[int, dict[str, Any]]:
    async def run() -> tuple[int, dict[str, Any]]:
        url = f"{server.url}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            return response.status, await response.json()

    return asyncio.run(run())


SCORE: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 1,
    "logprobs": 1,
    "logprob_token_ids": [3, 4],
    "return_tokens_as_token_ids": True,
}


def test_named_log_probabilities() -> None:
    with FakeServer() as server:
        status, reply = post(server, **SCORE)
    assert status == 200
    assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}
    (choice,) = reply["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:0"]
    assert choice["logprobs"]["top_logprobs"] == [
        {f"token_id:{i}": token_logprob(i) for i in (SAMPLED_TOKEN, 3, 4)}
    ]


def test_tokens_go_by_their_text_unless_asked_otherwise() -> None:
    with FakeServer() as server:
        _, reply = post(server, **SCORE | {"return_tokens_as_token_ids": False})
    assert list(reply["choices"][0]["logprobs"]["top_logprobs"][0]) == [" w0", " w3", " w4"]


@pytest.mark.parametrize("batch", [[[5, 6], [7]], ["ab", "c"]])
def test_one_choice_per_prompt(batch: Any) -> None:
    with FakeServer() as server:
        _, reply = post(server, **SCORE | {"prompt": batch})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["prompt_tokens"] == 3


def test_log_probabilities_left_out() -> None:
    with FakeServer(logprobs=False) as server:
        _, reply = post(server, **SCORE)
    assert reply["choices"][0]["logprobs"] is None
    with FakeServer(missing_logprob_ids=frozenset({4})) as server:
        _, reply = post(server, **SCORE)
    top = reply["choices"][0]["logprobs"]["top_logprobs"][0]
    assert set(top) == {"token_id:0", "token_id:3"}


def test_named_ids_without_logprobs_are_refused_as_vllm_does() -> None:
    with FakeServer() as server:
        status, reply = post(server, **{k: v for k, v in SCORE.items() if k != "logprobs"})
    assert status == 400
    assert reply["error"]["param"] == "logprob_token_ids"
