"""A fake OpenAI server with set timings and faults, so that measurements have a known truth.

    with FakeServer(first_token_s=0.05, token_gap_s=0.01) as server:
        run_bench(suite, base_url=server.url, ...)
        assert server.requests ...

Reply shapes are those of vLLM 0.32. As a program (`python openai_server.py --port 0`) it prints
its URL and serves until its standard input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiohttp import web

Fault = Literal[
    "http_503",  # HTTP 503 with an error body
    "http_400",  # HTTP 400 in vLLM's shape
    "error_in_stream",  # HTTP 200, then an error event and [DONE], as vLLM does
    "json_error_200",  # HTTP 200 with a JSON error instead of a stream
    "cut",  # connection dropped half-way
    "short",  # stream closed properly half-way, without finish reason and [DONE]
    "empty",  # HTTP 200 without a body
    "no_tokens",  # a stream with role, finish and [DONE], but no token
    "stall",  # half of the tokens, then nothing more
    "silent",  # never an answer
    "early_finish",  # finish_reason "stop" after half of the tokens
    "disconnect",  # connection dropped before the response headers
]
MODEL = "fake-model"
#: The greedy token: no other has a higher log-probability.
SAMPLED_TOKEN = 0
#: Tokens per cache block, as on vLLM's CUDA platform.
BLOCK = 16
_WORDS = (" one", " zwei", " trois", " četiri", " пять", " 六", " 🙂", " ocho")


def token_logprob(token_id: int) -> float:
    """Log-probability of a token in every completion with log-probabilities."""
    return -0.5 - (token_id * 7 % 101) / 8


@dataclass
class Seen:
    """One generation request as the server got it."""

    number: int
    path: str
    body: dict[str, Any]


@dataclass
class _Job:
    """A generation request being answered."""

    request: web.Request
    body: dict[str, Any]
    number: int
    arrival: float
    fault: Fault | None

    @property
    def chat(self) -> bool:
        return "chat" in self.request.path


@dataclass
class FakeServer:
    """A server in a thread of its own, as a context manager.

    Args (all seconds are delays the server keeps):
        first_token_s: From a request's arrival to its first token chunk.
        token_gap_s: Between token chunks.
        tokens_per_chunk: Tokens in one chunk.
        usage: What usage it sends: none, only a final chunk (if asked), or the running count
            too (if asked).
        role_s: On the chat endpoint, from arrival to the chunk that has only the role.
        reasoning_chunks: So many of the first chat chunks are reasoning.
        crlf: Lines end with CRLF.
        split_writes: Every event is written in two halves, mid-character where there is one.
        first_request_extra_s: Added to first_token_s of the first request.
        fault, fault_on: What goes wrong, with which request numbers (from 0; all by default).
        die_after: Refuse all connections after so many generation requests, and drop open ones.
        slots: Requests that are answered at once; others wait until one has ended.
        preempt_every: Count a preemption with every so manieth request.
        reset_allowed: Whether /reset_prefix_cache exists.
        metrics: Whether /metrics exists.
        logprobs: Whether replies carry log-probabilities when asked to.
        missing_logprob_ids: Token ids that are left out of them though asked for.
        max_model_len: As /v1/models tells; longer requests get HTTP 400.
    """

    first_token_s: float = 0.0
    token_gap_s: float = 0.0
    tokens_per_chunk: int = 1
    usage: Literal["none", "final", "continuous"] = "continuous"
    role_s: float = 0.0
    reasoning_chunks: int = 0
    crlf: bool = False
    split_writes: bool = False
    first_request_extra_s: float = 0.0
    fault: Fault | None = None
    fault_on: Callable[[int], bool] | None = None
    die_after: int | None = None
    slots: int | None = None
    preempt_every: int | None = None
    reset_allowed: bool = True
    metrics: bool = True
    logprobs: bool = True
    missing_logprob_ids: frozenset[int] = frozenset()
    max_model_len: int = 4096
    port: int = 0
    #: Whether the tokens of a whole completion differ, as a sound model's do.
    vary_tokens: bool = False

    requests: list[Seen] = field(default_factory=list, init=False)
    resets: int = field(default=0, init=False)
    hit_tokens: int = field(default=0, init=False)
    query_tokens: int = field(default=0, init=False)
    generated_tokens: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    running: int = field(default=0, init=False)
    #: Most requests that ran at the same moment.
    running_max: int = field(default=0, init=False)
    _cached: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False)
    _dead: bool = field(default=False, init=False, repr=False)
    _ready: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    @property
    def is_dead(self) -> bool:
        """Whether it died of `die_after` or `kill`."""
        return self._dead

    @property
    def url(self) -> str:
        """Root URL."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout=10):
            raise RuntimeError("the fake server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)

    def kill(self) -> None:
        """Die as a killed process does: refuse new connections, drop the open ones."""
        self._loop.call_soon_threadsafe(self._die)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._room = asyncio.Semaphore(self.slots or 1)
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        if self.metrics:
            app.router.add_get("/metrics", self._metrics)
        if self.reset_allowed:
            app.router.add_post("/reset_prefix_cache", self._reset)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        assert runner.server is not None
        self._server = runner.server
        self._listener = await self._loop.create_server(runner.server, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        self._die()
        await runner.cleanup()

    def _die(self) -> None:
        self._dead = True
        self._listener.close()
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    # What is beside generation

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "fake"})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": MODEL,
            "object": "model",
            "created": 1,
            "owned_by": "vllm",
            "root": MODEL,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _: web.Request) -> web.Response:
        label = f'{{engine="0",model_name="{MODEL}"}}'
        rows = [
            ("num_requests_running", "gauge", self.running),
            ("prefix_cache_queries_total", "counter", self.query_tokens),
            ("prefix_cache_hits_total", "counter", self.hit_tokens),
            ("num_preemptions_total", "counter", self.preemptions),
            ("prompt_tokens_total", "counter", self.query_tokens),
            ("generation_tokens_total", "counter", self.generated_tokens),
        ]
        lines = []
        for name, kind, value in rows:
            lines += [f"# HELP vllm:{name} What the fake counted.", f"# TYPE vllm:{name} {kind}"]
            lines.append(f"vllm:{name}{label} {float(value)}")
        return web.Response(text="\n".join(lines) + "\n")

    async def _reset(self, _: web.Request) -> web.Response:
        self.resets += 1
        self._cached.clear()
        return web.json_response({"success": True})

    # Generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        arrival = self._loop.time()
        number = len(self.requests)
        body = await request.json()
        self.requests.append(Seen(number, request.path, body))
        if self.die_after is not None and number >= self.die_after:
            self._die()
        if self._dead:
            return web.Response()
        fault = self.fault if self.fault_on is None or self.fault_on(number) else None
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            async with self._room if self.slots else contextlib.nullcontext():
                if self.slots:
                    arrival = self._loop.time()
                return await self._answer(_Job(request, body, number, arrival, fault))
        finally:
            self.running -= 1

    async def _answer(self, job: _Job) -> web.StreamResponse:
        body, fault = job.body, job.fault
        if fault == "http_503":
            return _error(503, "The engine is overloaded", "ServiceUnavailableError")
        if fault == "http_400":
            return _error(400, "This request is not to the server's taste", "BadRequestError")
        if fault == "json_error_200":
            return _error(200, "out of memory", "InternalServerError")
        if fault == "empty":
            return web.Response(content_type="text/event-stream")
        if fault == "disconnect":
            _drop(job.request)
            return web.Response()
        if fault == "silent":
            await self._stop.wait()
        prompts = _prompts(body)
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        max_tokens = int(body.get("max_tokens") or 16)
        if any(len(prompt) + max_tokens > self.max_model_len for prompt in prompts):
            message = f"This model's maximum context length is {self.max_model_len} tokens."
            return _error(400, message, "BadRequestError")
        for prompt in prompts:
            self._count_prefix(prompt)
        if self.preempt_every and job.number % self.preempt_every == 0:
            self.preemptions += 1
        if body.get("stream"):
            return await self._stream(job, prompt_tokens)
        await asyncio.sleep(self.first_token_s + self.token_gap_s * (max_tokens - 1))
        self.generated_tokens += max_tokens * len(prompts)
        return self._whole(body, prompts, max_tokens, chat=job.chat)

    def _count_prefix(self, prompt: tuple[Any, ...]) -> None:
        self.query_tokens += len(prompt)
        hit = 0
        # The last token is always computed, so a full repeat hits one block less.
        for end in range(BLOCK, len(prompt), BLOCK):
            if prompt[:end] in self._cached:
                hit = end
            self._cached.add(prompt[:end])
        self.hit_tokens += hit

    async def _stream(self, job: _Job, prompt_tokens: int) -> web.StreamResponse:
        body, fault, chat = job.body, job.fault, job.chat
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(job.request)
        options = body.get("stream_options") or {}
        running = self.usage == "continuous" and options.get("continuous_usage_stats")

        async def event(value: dict[str, Any] | str) -> None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            await self._write(response, text)

        def chunk(choice: dict[str, Any], tokens: int) -> dict[str, Any]:
            value = _envelope(chat, stream=True)
            value["choices"] = [{"index": 0, "logprobs": None, "finish_reason": None, **choice}]
            if running:
                value["usage"] = _usage(prompt_tokens, tokens)
            return value

        if chat:
            await self._until(job.arrival + self.role_s)
            await event(chunk({"delta": {"role": "assistant", "content": ""}}, 0))
        wanted = int(body["max_tokens"])
        half = max(1, wanted // 2)
        limit = 0 if fault == "no_tokens" else wanted
        if fault in ("cut", "short", "error_in_stream", "stall", "early_finish"):
            limit = half
        first = job.arrival + self.first_token_s
        if job.number == 0:
            first += self.first_request_extra_s
        sent = 0
        for index, size in enumerate(_sizes(limit, self.tokens_per_chunk)):
            await self._until(first + index * self.token_gap_s)
            text = "".join(_WORDS[(sent + k) % len(_WORDS)] for k in range(size))
            sent += size
            self.generated_tokens += size
            delta: dict[str, Any] = {"text": text}
            if chat:
                key = "reasoning" if index < self.reasoning_chunks else "content"
                delta = {"delta": {key: text}}
            if sent == limit and fault in (None, "early_finish"):
                delta["finish_reason"] = "length" if sent == wanted else "stop"
            await event(chunk(delta, sent))
        if fault == "no_tokens":
            empty: dict[str, Any] = {"delta": {"content": ""}} if chat else {"text": ""}
            await event(chunk({**empty, "finish_reason": "stop"}, 0))
        elif fault == "cut":
            await asyncio.sleep(0.02)  # what was written before the drop arrives
            _drop(job.request)
            return response
        elif fault == "stall":
            await self._stop.wait()
        elif fault == "short":
            return response
        elif fault == "error_in_stream":
            await event(_error_value(500, "Internal server error", "InternalServerError"))
        if self.usage != "none" and options.get("include_usage") and fault != "error_in_stream":
            final = _envelope(chat, stream=True)
            await event({**final, "choices": [], "usage": _usage(prompt_tokens, sent)})
        await event("[DONE]")
        return response

    async def _write(self, response: web.StreamResponse, payload: str) -> None:
        end = "\r\n" if self.crlf else "\n"
        data = f"data: {payload}{end}{end}".encode()
        if not self.split_writes:
            await response.write(data)
            return
        middle = next((i + 1 for i, byte in enumerate(data) if byte >= 0xC0), len(data) // 2)
        await response.write(data[:middle])
        await asyncio.sleep(0.002)
        await response.write(data[middle:])

    async def _until(self, moment: float) -> None:
        delay = moment - self._loop.time()
        if delay > 0:
            await asyncio.sleep(delay)

    def _whole(
        self, body: dict[str, Any], prompts: list[tuple[Any, ...]], max_tokens: int, *, chat: bool
    ) -> web.Response:
        """Answer a request that does not stream."""
        wanted_ids = body.get("logprob_token_ids")
        if wanted_ids and body.get("logprobs") is None:
            message = "when using `logprob_token_ids`, `logprobs` must be set."
            return _error(400, message, "BadRequestError", param="logprob_token_ids")
        # As vLLM: ids by name only if asked for by return_tokens_as_token_ids, else their text.
        shown = "token_id:{}" if body.get("return_tokens_as_token_ids") else " w{}"
        name = shown.format(SAMPLED_TOKEN)
        text = "".join(_WORDS[k % len(_WORDS)] for k in range(max_tokens))
        choices = []
        for index in range(len(prompts)):
            choice: dict[str, Any] = {"index": index, "finish_reason": "length"}
            choice |= {"stop_reason": None, "logprobs": None}
            if chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            if body.get("logprobs") is not None and self.logprobs and not chat:
                ids = dict.fromkeys([SAMPLED_TOKEN, *(wanted_ids or [])])
                top = {
                    shown.format(i): token_logprob(i)
                    for i in ids
                    if i not in self.missing_logprob_ids
                }
                names = [f"token_id:{k}" for k in range(max_tokens)]
                choice["logprobs"] = {
                    "text_offset": [k * len(name) for k in range(max_tokens)],
                    "token_logprobs": [token_logprob(SAMPLED_TOKEN)] * max_tokens,
                    "tokens": names if self.vary_tokens else [name] * max_tokens,
                    "top_logprobs": [top] * max_tokens,
                }
            choices.append(choice)
        value = _envelope(chat, stream=False)
        usage = _usage(sum(map(len, prompts)), max_tokens * len(prompts))
        return web.json_response({**value, "choices": choices, "usage": usage})


def _sizes(tokens: int, per_chunk: int) -> Iterator[int]:
    for start in range(0, tokens, per_chunk):
        yield min(per_chunk, tokens - start)


def _prompts(body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the prompts as sequences of tokens; a character counts as a token of its own."""
    if "messages" in body:
        return [tuple("".join(message["content"] for message in body["messages"]))]
    prompt = body["prompt"]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [tuple(prompt)]
    return [tuple(one) for one in prompt]


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": total,
        "completion_tokens": completion_tokens,
    }


def _envelope(chat: bool, *, stream: bool) -> dict[str, Any]:
    kind = "text_completion"
    if chat:
        kind = "chat.completion.chunk" if stream else "chat.completion"
    return {"id": "cmpl-fake", "object": kind, "created": 1, "model": MODEL}


def _error_value(code: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _error(status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    return web.json_response(_error_value(status, message, kind, param), status=status)


def _drop(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def main() -> None:
    """Serve until standard input closes; print the URL first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-token-s", type=float, default=0.02)
    parser.add_argument("--token-gap-s", type=float, default=0.02)
    args = parser.parse_args()
    with FakeServer(
        port=args.port, first_token_s=args.first_token_s, token_gap_s=args.token_gap_s
    ) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
