"""A fake completions server that streams a thousand paced answers and keeps the truth about them.

    with PacedServer(first_token_s=0.05, token_gap_s=0.02) as server:
        run_bench(suite, base_url=server.url, ...)
    for answer in server.answers: ...

It runs in processes of its own that share a port, writes encoded chunks straight to the socket,
and stamps what it did on the machine's monotonic clock, which is also the client's. As a program
(`python paced_server.py`) it prints its URL, serves until its standard input closes, and prints
its answers as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


def _event(value: object) -> bytes:
    payload = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode())
    data = payload + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _token(prompt_tokens: int, sent: int, last: bool) -> bytes:
    choice = {"index": 0, "text": " ok", "finish_reason": "length" if last else None}
    return _event({"id": "cmpl-1", "choices": [choice], "usage": _usage(prompt_tokens, sent)})


@functools.cache
def _chunks(prompt_tokens: int, tokens: int) -> list[bytes]:
    """Encode an answer once, so that no request waits for another's encoding."""
    return [_token(prompt_tokens, k + 1, k + 1 == tokens) for k in range(tokens)]


def _usage(prompt_tokens: int, sent: int) -> dict[str, int]:
    total = prompt_tokens + sent
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sent, "total_tokens": total}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server really did with a request, seconds of the monotonic clock."""

    #: First number of its prompt, by which it can be told from others.
    prompt: list[int]
    max_tokens: int
    arrived_s: float
    first_s: float
    last_s: float


class _Connection(asyncio.Protocol):
    """One keep-alive connection; requests come one after the other."""

    def __init__(self, first_token_s: float, token_gap_s: float, answers: list[Answer]) -> None:
        self._first_token_s, self._gap_s, self._answers = first_token_s, token_gap_s, answers
        self._buffer = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        arrived = time.perf_counter()
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(body) < length:
            return
        self._buffer = body[length:]
        if head.startswith(b"POST /v1/completions"):
            task = asyncio.ensure_future(self._stream(json.loads(body[:length]), arrived))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._transport.write(_EMPTY if head.startswith(b"GET /health") else _MISSING)

    async def _stream(self, body: dict[str, Any], arrived: float) -> None:
        loop, write = asyncio.get_running_loop(), self._transport.write
        tokens, prompt = int(body["max_tokens"]), body["prompt"]
        chunks = _chunks(len(prompt), tokens)
        start = loop.time() + self._first_token_s - (time.perf_counter() - arrived)
        write(_HEAD)
        first = 0.0
        for index, chunk in enumerate(chunks):
            await asyncio.sleep(max(0.0, start + index * self._gap_s - loop.time()))
            if self._transport.is_closing():
                return
            now = time.perf_counter()
            first = first or now
            write(chunk)
        final = {"id": "cmpl-1", "choices": [], "usage": _usage(len(prompt), tokens)}
        write(_event(final) + _event(b"[DONE]") + b"0\r\n\r\n")
        self._answers.append(Answer(prompt[:8], tokens, arrived, first, now))


async def _serve(listener: socket.socket, first_token_s: float, gap_s: float, pipe: Any) -> None:
    answers: list[Answer] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Connection(first_token_s, gap_s, answers), sock=listener, backlog=4096
    )
    pipe.send("ready")
    await loop.run_in_executor(None, pipe.recv)
    pipe.send(answers)
    server.close()


def _run(port: int, first_token_s: float, gap_s: float, pipe: Any) -> None:
    with asyncio.Runner() as runner:
        runner.run(_serve(_listen(port), first_token_s, gap_s, pipe))


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    return listener


def main() -> None:
    """Serve until standard input closes; print the URL first and the answers last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-token-s", type=float, default=0.05)
    parser.add_argument("--token-gap-s", type=float, default=0.02)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    with _listen(0) as reserved:  # bound, not listening: it gets no connections
        port = reserved.getsockname()[1]
        pipes = []
        for _ in range(args.processes):
            ours, theirs = multiprocessing.Pipe()
            given = (port, args.first_token_s, args.token_gap_s, theirs)
            multiprocessing.Process(target=_run, args=given, daemon=True).start()
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        print(f"http://127.0.0.1:{port}", flush=True)
        sys.stdin.read()
        for pipe in pipes:
            pipe.send("stop")
        answers = [answer for pipe in pipes for answer in pipe.recv()]
    shown = [[a.prompt, a.max_tokens, a.arrived_s, a.first_s, a.last_s] for a in answers]
    print(json.dumps(shown), flush=True)


@dataclass
class PacedServer:
    """The server in processes of its own; `answers` are there once it has ended.

    Args:
        first_token_s: From a request's arrival to its first chunk.
        token_gap_s: Between chunks.
        processes: Of the server.
    """

    first_token_s: float = 0.05
    token_gap_s: float = 0.02
    processes: int = 1
    url: str = field(default="", init=False)
    answers: list[Answer] = field(default_factory=list, init=False)

    def __enter__(self) -> Self:
        options = {
            "--first-token-s": self.first_token_s,
            "--token-gap-s": self.token_gap_s,
            "--processes": self.processes,
        }
        command = [sys.executable, str(Path(__file__).resolve())]
        command += [part for name, value in options.items() for part in (name, str(value))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *_: object) -> None:
        out, _err = self._process.communicate(timeout=30)
        self.answers = [Answer(*values) for values in json.loads(out)]


if __name__ == "__main__":
    main()
