"""What a streamed OpenAI reply says, read after the request has ended.

While a request runs, the client only stamps and keeps the bytes it gets (`RawReply`); everything
here is pure and happens later, so that parsing one stream never delays the time stamp of another.
The event-stream format is that of the HTML standard, section 9.2 (server-sent events).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

#: Why a request ended early ("client": the process that sent it died); what a server says inside
#: a reply is found later.
TransportFailure = Literal["refused", "cut", "timeout", "client"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
_DONE = "[DONE]"
#: Finish reasons by which vLLM says that the answer is not what was asked for.
_BAD_FINISH = frozenset({"abort", "error"})
_DELTA_TEXT = ("reasoning", "reasoning_content", "content")


@dataclass(slots=True)
class RawReply:
    """One request as the client saw it: seconds of `time.perf_counter` and undecoded bytes."""

    start_s: float
    end_s: float = 0.0
    http_status: int | None = None
    #: Arrival and content of every read. Events that came in one read share its time stamp.
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    failure: TransportFailure | None = None
    error: str | None = None
    #: When it was due by the open loop's schedule.
    scheduled_s: float | None = None
    #: When its body had been handed to the operating system.
    written_s: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a raw reply means. `status` is "ok" or a failure word of `RequestRecord.status`."""

    status: str
    error: str | None
    #: Arrival of every chunk that carried a token.
    token_s: tuple[float, ...]
    #: All text, reasoning included.
    text: str
    prompt_tokens: int | None
    output_tokens: int | None
    finish_reason: str | None


class SseParser:
    """Incremental parser of the `data` fields of an event stream.

    Bytes are decoded line by line, so a character split over two reads stays whole. Comments and
    other fields (`event`, `id`, `retry`) are skipped. An event that the stream's end cuts off is
    dropped, as the standard says.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []
        self._at_start = True
        self._skip_lf = False

    def feed(self, data: bytes) -> list[str]:
        """Return the payloads of the events that `data` completes, in order."""
        if self._skip_lf and data:
            # The CR of a CRLF ended the last read and has already counted as the line's end.
            data = data.removeprefix(b"\n")
            self._skip_lf = False
        self._buffer += data
        if self._at_start:
            if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
                return []
            self._buffer = self._buffer.removeprefix(_BOM)
            self._at_start = False
        if self._buffer.endswith(b"\r"):
            self._skip_lf = True
        *lines, self._buffer = _LINE_END.split(self._buffer)
        payloads = []
        for line in lines:
            if not line:
                if self._data:
                    payloads.append("\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                value = line[5:].decode("utf-8", errors="replace")
                self._data.append(value.removeprefix(" "))
        return payloads


def read_events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Yield (arrival, payload) of every event; the arrival is that of the read completing it.

    Several events in one read share its time stamp: the network handed them over together, and
    nothing finer is known on the client's side.
    """
    parser = SseParser()
    for arrival, data in reads:
        for payload in parser.feed(data):
            yield arrival, payload


class _Collector:
    """Gathers the chunks of one reply."""

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self.text: list[str] = []
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False
        self._continuous: bool | None = None
        self._counted = 0

    def add(self, arrival: float, payload: str) -> None:
        """Take one event in."""
        if payload == _DONE:
            self.done = True
            return
        try:
            chunk = json.loads(payload)
        except ValueError:
            self.error = self.error or f"an event is not JSON: {payload[:200]}"
            return
        if not isinstance(chunk, dict):
            self.error = self.error or f"an event is not a JSON object: {payload[:200]}"
            return
        if message := error_message(chunk):
            self.error = self.error or message
            return
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        choices = chunk.get("choices")
        if choices:
            self._add_choice(arrival, choices[0], usage)

    def _add_choice(self, arrival: float, choice: dict[str, Any], usage: Any) -> None:
        text = _choice_text(choice)
        tool_call = bool((choice.get("delta") or {}).get("tool_calls"))
        if self._continuous is None:
            self._continuous = isinstance(usage, dict)
        if self._continuous and isinstance(usage, dict):
            # The running count tells a token without text of its own (half a character, or a
            # special token that is not shown) from a chunk that carries none (the role).
            counted = int(usage.get("completion_tokens") or 0)
            carries_token = counted > self._counted
            self._counted = max(counted, self._counted)
        else:
            carries_token = bool(text) or tool_call
        if text:
            self.text.append(text)
        if carries_token:
            self.token_s.append(arrival)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


def read_reply(raw: RawReply) -> Reply:
    """Work out what a raw reply contains and whether it counts as a success.

    A chunk carries a token when the server's running usage grew with it
    (`stream_options.continuous_usage_stats`) or, from a server that sends none, when its text,
    reasoning or tool call is not empty. A role-only or empty delta, the trailing usage chunk and
    `[DONE]` carry none.

    The first of these that applies is the status: "refused", "timeout", "client", "http" (status
    other than 200), "stream" (an error inside a 200 reply, or no event stream), "cut" (neither a
    finish reason nor `[DONE]`), "empty" (no token), "ok".
    """
    got = _Collector()
    if raw.http_status == 200:
        for arrival, payload in read_events(raw.reads):
            got.add(arrival, payload)
    status, error = _judge(raw, got)
    usage = got.usage or {}
    return Reply(
        status=status,
        error=error,
        token_s=tuple(got.token_s),
        text="".join(got.text),
        prompt_tokens=_count(usage, "prompt_tokens"),
        output_tokens=_count(usage, "completion_tokens"),
        finish_reason=got.finish_reason,
    )


def _judge(raw: RawReply, got: _Collector) -> tuple[str, str | None]:
    """Return the status of a reply and the reason where it is not "ok"."""
    body = b"".join(data for _, data in raw.reads)
    verdict: tuple[str, str | None] = "ok", None
    if raw.failure in ("refused", "timeout", "client"):
        verdict = raw.failure, _timeout_reason(raw) if raw.failure == "timeout" else raw.error
    elif raw.http_status is not None and raw.http_status != 200:
        verdict = "http", f"HTTP {raw.http_status}: {_body_message(body)}"
    elif got.error:
        verdict = "stream", got.error
    elif got.finish_reason in _BAD_FINISH:
        verdict = "stream", f"the server ended the answer with {got.finish_reason!r}"
    elif got.finish_reason or got.done:
        if not got.token_s:
            verdict = "empty", "the stream ended without a token"
    elif raw.failure == "cut":
        verdict = "cut", f"{raw.error} (after {len(got.token_s)} token chunks)"
    elif not body:
        verdict = "empty", "HTTP 200 with an empty body"
    elif got.token_s:
        verdict = "cut", f"no finish reason and no [DONE] after {len(got.token_s)} token chunks"
    else:
        verdict = "stream", f"HTTP 200 without an event stream: {_body_message(body)}"
    return verdict


def _timeout_reason(raw: RawReply) -> str:
    """Tell a request that was never answered from one that stalled half-way."""
    if not raw.reads:
        return f"no answer within {raw.end_s - raw.start_s:.1f} s"
    silent = raw.end_s - raw.reads[-1][0]
    return (
        f"not complete within {raw.end_s - raw.start_s:.1f} s; "
        f"the last bytes came {silent:.1f} s before the end"
    )


def error_message(value: dict[str, Any]) -> str | None:
    """Return the message of an OpenAI error object, in its present or vLLM's older shape."""
    error = value.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    if error:
        return str(error)
    if value.get("object") == "error":
        return str(value.get("message") or value)
    return None


def _body_message(body: bytes) -> str:
    """Return what a body that is no event stream says, in one line."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    message = error_message(value) if isinstance(value, dict) else None
    return " ".join((message or text or "(empty body)").split())[:300]


def _choice_text(choice: dict[str, Any]) -> str:
    """Return a chunk's text: of a completion, or reasoning and content of a chat delta."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return "".join(delta.get(key) or "" for key in _DELTA_TEXT)
    return choice.get("text") or ""


def _count(usage: dict[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return int(value) if isinstance(value, int) else None
