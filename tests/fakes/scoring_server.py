"""A fake completion server for the scorer: exact known log-probabilities, a prefix cache, faults.

Log-probabilities are a function of the last tokens before a position, so a test can compute what
every answer must be. The prefix cache counts like vLLM's: whole blocks, reusable once the request
that computes them has been answered, and never for prompt log-probabilities.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiohttp import web

Fault = Literal[
    "no_logprobs",  # a reply without log-probabilities, as a server started without them gives
    "ignores_token_ids",  # only the most likely token, as a server that does not know the field
    "nan",  # one log-probability is NaN
    "null",  # one log-probability is null
    "minus_infinity",  # one is what vLLM writes for minus infinity
    "short_echo",  # prompt log-probabilities of some positions only
    "other_echo",  # prompt log-probabilities of another prompt
    "aborted",  # a text cut off by a server that is being stopped
    "no_text",  # a choice without text
    "error_200",  # HTTP 200 with an error inside
    "no_choices",
    "not_json",
    "too_long",  # HTTP 400, vLLM's message of a prompt over the served length
    "http_422",
    "http_500",
    "disconnect",  # the connection is dropped
    "stall",  # never an answer
]
VOCABULARY = 320
MODEL = "fake-model"


def logprob(before: Sequence[int], token: int) -> float:
    """Log-probability of a token after the given ones."""
    seed = sum((i + 1) * t for i, t in enumerate(before[-3:]))
    return -0.5 - ((seed * 31 + token * 17) % 101) / 8


def best(before: Sequence[int]) -> int:
    """The most likely token after the given ones, the first of equals."""
    return max(range(VOCABULARY), key=lambda token: logprob(before, token))


def _name(token: int) -> str:
    return f"token_id:{token}"


@dataclass
class ScoringServer:
    """The server; use it in a `with` block.

    Args:
        fault: What every completion request gets instead of a right answer.
        fault_after: Completion requests answered rightly before the fault sets in.
        fault_count: Completion requests that get the fault; None is all that follow.
        tokenize: Tokens that /tokenize answers; None is a server without /tokenize.
        max_model_len: Served length as /v1/models tells it.
        block_size: Tokens in a block of the prefix cache.
        caches_prefixes: Whether it reads its prefix cache.
        delay_s: Time a completion request takes.
        slots: Completion requests it works on at once; the others wait. None is all of them.
        started: When its process began, as /metrics tells it.
    """

    fault: Fault | None = None
    fault_after: int = 0
    fault_count: int | None = None
    tokenize: list[int] | None = None
    max_model_len: int | None = 4096
    block_size: int = 16
    caches_prefixes: bool = True
    delay_s: float = 0.0
    slots: int | None = None
    started: float = 1.79664751661e09
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    prefilled: int = 0
    hits: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    running: int = 0

    def __enter__(self) -> Self:
        self._cache: set[tuple[int, ...]] = set()
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        self._free = asyncio.Semaphore(self.slots or 1_000_000)
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._completions),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=(
                f"process_start_time_seconds {self.started}\n"
                f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.hits)}\n'
                f'vllm:cache_config_info{{_block_size_resolved="True",block_size="'
                f'{self.block_size}",enable_prefix_caching="{self.caches_prefixes}",'
                f'engine="0"}} 1.0\n'
                f'vllm:num_requests_running{{engine="0"}} {float(self.running)}\n'
                f'vllm:num_requests_waiting{{engine="0"}} {float(self.in_flight - self.running)}\n'
            )
        )

    async def _tokenize(self, _: web.Request) -> web.Response:
        if self.tokenize is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"count": len(self.tokenize), "tokens": self.tokenize})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["model"] != MODEL:
            message = f"The model `{body['model']}` does not exist. Valid aliases: {MODEL}."
            return web.json_response({"error": {"message": message, "code": 404}}, status=404)
        number = len(self.bodies) - self.fault_after
        self.bodies.append(body)
        faulty = number >= 0 and (self.fault_count is None or number < self.fault_count)
        fault = self.fault if faulty else None
        if (answer := await self._instead(request, fault)) is not None:
            return answer
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        async with self._free:
            self.running += 1
            for prompt in prompts:
                self._look_up(prompt, body)
            await asyncio.sleep(self.delay_s)
            for prompt in prompts:
                self._keep(prompt)
            self.running -= 1
        self.in_flight -= 1
        choices = [self._choice(i, p, body, fault) for i, p in enumerate(prompts)]
        reply = {"id": "cmpl-0", "model": MODEL, "choices": choices, "usage": {}}
        return web.Response(text=json.dumps(reply), content_type="application/json")

    async def _instead(
        self, request: web.Request, fault: Fault | None
    ) -> web.StreamResponse | None:
        match fault:
            case "error_200":
                return web.json_response({"error": {"message": "the engine is dead"}})
            case "no_choices":
                return web.json_response({"choices": []})
            case "not_json":
                return web.Response(text="<html>proxy</html>")
            case "too_long":
                message = "This model's maximum context length is 16 tokens. However, ..."
                return web.json_response({"error": {"message": message}}, status=400)
            case "http_422":
                return web.json_response({"error": {"message": "bad field"}}, status=422)
            case "http_500":
                return web.json_response({"error": {"message": "out of memory"}}, status=500)
            case "disconnect":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case "stall":
                await self._stop.wait()
                return web.Response()
        return None

    def _blocks(self, prompt: list[int]) -> list[tuple[int, ...]]:
        whole = len(prompt) // self.block_size * self.block_size
        return [tuple(prompt[:end]) for end in range(self.block_size, whole + 1, self.block_size)]

    def _look_up(self, prompt: list[int], body: dict[str, Any]) -> None:
        found = 0
        if not body.get("echo") and self.caches_prefixes:
            for block in self._blocks(prompt[:-1]):
                if block not in self._cache:
                    break
                found += self.block_size
        self.hits += found
        self.prefilled += len(prompt) - found

    def _keep(self, prompt: list[int]) -> None:
        self._cache.update(self._blocks(prompt))

    def _choice(
        self, index: int, prompt: list[int], body: dict[str, Any], fault: Fault | None
    ) -> dict[str, Any]:
        if "logprobs" not in body:
            text = "".join(chr(ord("a") + t % 26) for t in prompt[-body["max_tokens"] :])
            for stop in body.get("stop", ()):
                text = text.split(stop)[0]
            choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": "stop"}
            if fault == "no_text":
                del choice["text"]
            if fault == "aborted":
                choice |= {"text": text[:1], "finish_reason": "abort"}
            return choice
        tokens, values, tops = [], [], []
        for position in range(len(prompt)) if body.get("echo") else ():
            before, token = prompt[:position], prompt[position]
            top = {_name(t): logprob(before, t) for t in (token, best(before))}
            tokens.append(_name(token))
            values.append(logprob(before, token) if position else None)
            tops.append(top if position else None)
        sampled = best(prompt)
        named = [] if fault == "ignores_token_ids" else body.get("logprob_token_ids", [])
        tokens.append(_name(sampled))
        values.append(logprob(prompt, sampled))
        tops.append({_name(t): logprob(prompt, t) for t in [sampled, *named]})
        wrong: dict[str | None, float | None] = {
            "nan": float("nan"),
            "null": None,
            "minus_infinity": -9999.0,
        }
        if fault in wrong:
            values[-2:] = [wrong[fault]] * len(values[-2:])
            for top in tops:
                if top:
                    top[list(top)[-1]] = wrong[fault]
        if fault == "short_echo":
            tokens, values, tops = tokens[1:], values[1:], tops[1:]
        if fault == "other_echo":
            tokens = [_name(0), *tokens[:-1]]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        return {
            "index": index,
            "text": "x",
            "logprobs": None if fault == "no_logprobs" else logprobs,
            "finish_reason": "length",
        }
