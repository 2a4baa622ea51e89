"""The HTTP client of the scorer: several requests in flight, bounded retries, counted tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from qkit.errors import InputError, QkitError, ServerError
from qkit.evaluate.adaptive import START, ConcurrencyLimit
from qkit.evaluate.prefix_order import PrefixScheduler
from qkit.evaluate.scoring_replies import error_message, read_answer
from qkit.evaluate.scoring_requests import (
    Answer,
    GenerateRequest,
    OptionRequest,
    PromptRequest,
    Request,
    ServedModel,
    Usage,
)
from qkit.evaluate.server_metrics import scrape, scrape_load

#: Assumed where the server does not tell: the smaller block costs at most a little waiting.
DEFAULT_BLOCK_SIZE = 16
#: Sent with every request, because vLLM otherwise takes the checkpoint's generation_config.json.
SAMPLING: Mapping[str, float] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
#: Seconds between two looks at the server's load.
LOAD_PERIOD_S = 0.5
#: Seconds that answers on their way have once one request has failed for good.
DRAIN_S = 5.0
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_BLOCK_SIZE = re.compile(r'\bblock_size="(\d+)"')
_CACHES_PREFIXES = re.compile(r'\benable_prefix_caching="True"')
_TOO_LONG = re.compile(r"context length|max_model_len|too long|maximum.*tokens", re.IGNORECASE)


@dataclass
class ScoringClient:
    """Asynchronous client of one server; use it in an `async with` block.

    Args:
        base_url: Root of the server, with or without `/v1`.
        model: Name the model is served under.
        concurrency: Requests in flight at first.
        adapt: Whether that number follows the server's load.
        timeout_s: Seconds of silence after which a request has failed.
        attempts: How often a request is sent before a refused connection, HTTP 429 or 5xx is an
            error.
        backoff_s: Wait after the first attempt; it doubles each time.
    """

    base_url: str
    model: str
    concurrency: int = START
    timeout_s: float = 600.0
    attempts: int = 5
    backoff_s: float = 0.5
    usage: Usage = field(default_factory=Usage)
    adapt: bool = True

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/").removesuffix("/v1")
        self._limit = ConcurrencyLimit(self.concurrency, timeout_s=self.timeout_s)

    async def __aenter__(self) -> Self:
        """Open the connections."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self.timeout_s),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._session.close()

    # ------------------------------------------------------------------------- about the server

    async def describe(self) -> ServedModel:
        """Ask what is served.

        Raises:
            InputError: The model's name is not among those served.
            ServerError: The server does not answer, or not as an OpenAI server.
        """
        _, reply = await self._send("GET", "/v1/models")
        try:
            cards = {str(card["id"]): card for card in reply["data"]}
        except (KeyError, TypeError) as error:
            raise self._unusable("/v1/models does not list models") from error
        if self.model not in cards:
            raise self._wrong_model(cards)
        length = cards[self.model].get("max_model_len")
        cache = await self._cache_config()
        block_size = _BLOCK_SIZE.search(cache)
        return ServedModel(
            name=self.model,
            max_model_len=length if isinstance(length, int) else None,
            block_size=int(block_size[1]) if block_size else DEFAULT_BLOCK_SIZE,
            caches_prefixes=_CACHES_PREFIXES.search(cache) is not None,
        )

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the server's tokens of a text; None where it has no `/tokenize`."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        status, reply = await self._send("POST", "/tokenize", body, accept=(404, 405, 501))
        if status != 200:
            return None
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(tokens, list):
            raise self._unusable("/tokenize answers without `tokens`")
        return tokens

    async def _cache_config(self) -> str:
        """Return what `/metrics` says of the server's cache, empty where it says nothing."""
        try:
            async with self._session.get(f"{self.base_url}/metrics") as response:
                found = _CACHE_CONFIG.search(await response.text())
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""
        return found[1] if found else ""

    # ---------------------------------------------------------------------------------- scoring

    async def answer_all(
        self,
        requests: Sequence[Request],
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        caches_prefixes: bool = True,
        backwards: bool = False,
        on_answer: Callable[[int, Answer], None],
    ) -> None:
        """Answer requests, several at a time, in an order that shares prefixes.

        Args:
            requests: What to send.
            block_size: Tokens in a block of the server's prefix cache.
            caches_prefixes: Whether it has one; without, no request waits for another.
            backwards: Send them the other way round.
            on_answer: Called with a request's index and its answer as soon as it is there; also
                for those on their way when another request fails.

        Raises:
            MeasurementError: A reply lacks what was asked for.
            InputError: The server refuses a request because of what it asks.
            ServerError: The server is gone, stalls, or keeps failing.
        """
        # vLLM does not read its prefix cache for prompt log-probabilities, so those do not wait.
        scheduler = PrefixScheduler(
            [
                None if isinstance(r, PromptRequest) or not caches_prefixes else r.prompt
                for r in requests
            ],
            block_size,
            backwards=backwards,
        )
        before = await scrape(self._session, self.base_url)
        running: dict[asyncio.Task[Answer], int] = {}
        watch = asyncio.create_task(self._follow_load(running)) if self.adapt else None
        try:
            while True:
                while len(running) < self._limit.value:
                    index = scheduler.next()
                    if index is None:
                        break
                    running[asyncio.create_task(self.answer(requests[index]))] = index
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                finished = {running.pop(task): task for task in done}
                for index in finished:
                    scheduler.finished(index)
                if error := _hand_over(finished, on_answer):
                    # What the server is about to answer is not asked again by the next run.
                    if running:
                        done, _ = await asyncio.wait(running, timeout=DRAIN_S)
                        _hand_over({running.pop(task): task for task in done}, on_answer)
                    raise error
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if watch:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
        hits = (await scrape(self._session, self.base_url)).since(before).prefix_hit_tokens
        if hits is None or self.usage.cached_tokens is None:
            self.usage.cached_tokens = None
        else:
            self.usage.cached_tokens += round(hits)

    async def _follow_load(self, running: Mapping[asyncio.Task[Answer], int]) -> None:
        """Adapt the limit to what the server says, until cancelled."""
        while True:
            await asyncio.sleep(LOAD_PERIOD_S)
            self._limit.observe(await scrape_load(self._session, self.base_url), len(running))

    async def answer(self, request: Request) -> Answer:
        """Send one request and read its reply."""
        body: dict[str, Any] = {"model": self.model, "prompt": list(request.prompt), **SAMPLING}
        match request:
            case OptionRequest():
                body |= {
                    "max_tokens": 1,
                    "logprobs": 1,
                    "logprob_token_ids": list(request.token_ids),
                    "return_tokens_as_token_ids": True,
                }
            case PromptRequest():
                body |= {
                    "max_tokens": 1,
                    "logprobs": 1,
                    "echo": True,
                    "return_tokens_as_token_ids": True,
                }
            case GenerateRequest():
                body |= {
                    "max_tokens": request.max_tokens,
                    "temperature": request.temperature,
                    "seed": request.seed,
                    **({"stop": list(request.stop)} if request.stop else {}),
                    **dict(request.extra),
                }
        started = time.monotonic()
        _, reply = await self._send("POST", "/v1/completions", body)
        self._limit.replied(time.monotonic() - started)
        answer = read_answer(request, reply, where=f"{self.base_url} (model {self.model!r})")
        self.usage.requests += 1
        self.usage.prompt_tokens += len(request.prompt)
        return answer

    # ------------------------------------------------------------------------------------- HTTP

    async def _send(
        self, method: str, path: str, body: Any = None, accept: tuple[int, ...] = ()
    ) -> tuple[int, Any]:
        """Send a request, again where that can help; return status and parsed reply."""
        trouble = ""
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(self.backoff_s * 2 ** (attempt - 1))
            try:
                url = self.base_url + path
                async with self._session.request(method, url, json=body) as response:
                    status, text = response.status, await response.text()
            except aiohttp.ConnectionTimeoutError as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            except TimeoutError as error:
                raise ServerError(
                    f"the server did not answer {path} within {self.timeout_s:g} s",
                    where=self.base_url,
                    fix="look at the server's log; a slow server needs a longer time-out or fewer "
                    "requests at once",
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                try:
                    return status, json.loads(text)
                except ValueError as error:
                    raise self._unusable(f"{path} does not answer JSON: {text[:200]!r}") from error
            if status in accept:
                return status, None
            message = f"HTTP {status} from {path}: {error_message(text)}"
            if status != 429 and status < 500:
                raise await self._refused(path, status, message)
            trouble = message
        raise ServerError(
            f"the server failed {self.attempts} times in a row",
            where=self.base_url,
            detail=trouble,
            fix="look at the server's log, then run again",
        )

    async def _refused(self, path: str, status: int, message: str) -> InputError | ServerError:
        if status == 404 and self.model in message and path != "/v1/models":
            try:
                _, reply = await self._send("GET", "/v1/models")
                return self._wrong_model([str(card["id"]) for card in reply["data"]])
            except (ServerError, KeyError, TypeError):
                return self._wrong_model([])
        if status == 400 and _TOO_LONG.search(message):
            return InputError(
                "a prompt is longer than the server accepts",
                where=self.base_url,
                detail=message,
                fix="serve with a larger max_model_len, or ask for fewer few-shot examples",
            )
        return ServerError("the server refuses a request", where=self.base_url, detail=message)

    def _wrong_model(self, served: Sequence[str] | Mapping[str, Any]) -> InputError:
        return InputError(
            f"the server does not serve {self.model!r}",
            where=self.base_url,
            fix=f"it serves: {', '.join(served) or 'nothing it names'}",
        )

    def _unusable(self, what: str) -> ServerError:
        return ServerError(what, where=self.base_url, fix="give the URL of a vLLM OpenAI server")


def _hand_over(
    finished: Mapping[int, asyncio.Task[Answer]], on_answer: Callable[[int, Answer], None]
) -> QkitError | None:
    """Pass on the answers of finished requests; return the first error among them."""
    first: QkitError | None = None
    for index, task in finished.items():
        try:
            answer = task.result()
        except QkitError as error:
            first = first or error
        else:
            on_answer(index, answer)
    return first
