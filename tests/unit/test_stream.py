from __future__ import annotations

import json
from typing import Any

import pytest

from qkit.evaluate.stream import RawReply, SseParser, error_message, read_events, read_reply

TEXT = "data: " + json.dumps({"choices": [{"text": "naïve 六🙂"}]}, ensure_ascii=False) + "\n\n"


def payloads(*pieces: bytes) -> list[str]:
    parser = SseParser()
    return [payload for piece in pieces for payload in parser.feed(piece)]


def chunk(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def delta(finish: str | None = None, **content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def raw(*values: dict[str, Any] | str, **more: Any) -> RawReply:
    """Build a reply whose event k arrives at second k + 1 after the start."""
    reads = [
        (1.0 + k, b"data: " + (v if isinstance(v, str) else json.dumps(v)).encode() + b"\n\n")
        for k, v in enumerate(values)
    ]
    return RawReply(**{"start_s": 0.0, "end_s": 99.0, "http_status": 200, "reads": reads} | more)


# The event-stream format


def test_several_events_in_one_read() -> None:
    assert payloads(b"data: a\n\ndata: b\n\ndata: [DONE]\n\n") == ["a", "b", "[DONE]"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_and_every_split(end: bytes) -> None:
    stream = b": hello" + end + TEXT.encode().replace(b"\n", end) + b"data: [DONE]" + end + end
    expected = [TEXT.removeprefix("data: ").rstrip(), "[DONE]"]
    for cut in range(len(stream) + 1):
        assert payloads(stream[:cut], stream[cut:]) == expected, cut
    assert payloads(*(stream[i : i + 1] for i in range(len(stream)))) == expected


def test_comments_and_other_fields_are_skipped() -> None:
    stream = b": ping\n\nevent: message\nid: 7\nretry: 10\ndata: x\n\n:\n\ndatax: no\n\n"
    assert payloads(stream) == ["x"]


def test_one_leading_space_goes_and_data_lines_are_joined() -> None:
    assert payloads(b"data:x\n\n", b"data:  y\n\n", b"data: 1\ndata: 2\n\n") == ["x", " y", "1\n2"]


def test_byte_order_mark_is_skipped_also_when_split() -> None:
    stream = b"\xef\xbb\xbfdata: x\n\n"
    for cut in range(len(stream)):
        assert payloads(stream[:cut], stream[cut:]) == ["x"]


def test_event_cut_off_by_the_end_is_dropped() -> None:
    assert payloads(b'data: whole\n\ndata: {"choi') == ["whole"]


def test_an_event_arrives_with_the_read_that_completes_it() -> None:
    reads = [(1.0, b"data: a\n\ndata: b"), (2.0, b"\n"), (3.0, b"\ndata: c\n\ndata: d\n\n")]
    assert list(read_events(reads)) == [(1.0, "a"), (3.0, "b"), (3.0, "c"), (3.0, "d")]


# Which chunk carries a token


def test_times_come_from_token_chunks_alone() -> None:
    reply = read_reply(
        raw(
            delta(role="assistant", content=""),
            delta(content="Hel"),
            delta(content="lo"),
            delta(content="", finish="stop"),
            {"choices": [], "usage": usage(7, 5)},
            "[DONE]",
        )
    )
    assert reply.status == "ok"
    assert reply.token_s == (2.0, 3.0)
    assert (reply.text, reply.finish_reason) == ("Hello", "stop")
    assert (reply.prompt_tokens, reply.output_tokens) == (7, 5)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_a_reasoning_delta_is_a_token(key: str) -> None:
    events = [
        delta(role="assistant", content=""),
        delta(**{key: "hm"}),
        delta(content="a"),
        "[DONE]",
    ]
    reply = read_reply(raw(*events))
    assert reply.token_s == (2.0, 3.0)
    assert reply.text == "hma"


def test_a_tool_call_delta_is_a_token() -> None:
    call = {"index": 0, "function": {"arguments": "{"}}
    assert read_reply(raw(delta(tool_calls=[call]), "[DONE]")).token_s == (1.0,)


def test_null_content_is_no_token() -> None:
    assert read_reply(raw(delta(role="assistant", content=None), "[DONE]")).status == "empty"


def test_running_usage_finds_tokens_without_text() -> None:
    # Half a character and an unshown special token have no text of their own.
    reply = read_reply(
        raw(
            {**delta(role="assistant", content=""), "usage": usage(3, 0)},
            {**delta(content=""), "usage": usage(3, 1)},
            {**delta(content="é"), "usage": usage(3, 2)},
            {**delta(content="", finish="stop"), "usage": usage(3, 2)},
            {"choices": [], "usage": usage(3, 2)},
            "[DONE]",
        )
    )
    assert reply.token_s == (2.0, 3.0)
    assert reply.output_tokens == 2


def test_usage_on_the_last_chunk_only_is_not_a_running_count() -> None:
    reply = read_reply(raw(chunk("a"), chunk("b"), chunk("", "stop", usage=usage(3, 9)), "[DONE]"))
    assert reply.token_s == (1.0, 2.0)
    assert reply.output_tokens == 9


def test_without_usage_tokens_are_unknown() -> None:
    reply = read_reply(raw(chunk("a"), chunk("b", "length"), "[DONE]"))
    assert (reply.status, reply.output_tokens, reply.prompt_tokens) == ("ok", None, None)


# What counts as a failure


@pytest.mark.parametrize(
    ("reply", "status", "words"),
    [
        (raw(failure="refused", http_status=None, error="no route"), "refused", "no route"),
        (raw(failure="timeout", http_status=None, end_s=5.0), "timeout", "no answer within 5.0 s"),
        (raw(chunk("a"), failure="timeout", end_s=5.0), "timeout", "last bytes came 4.0 s before"),
        (
            RawReply(0.0, 1.0, 503, [(1.0, b'{"error": {"message": "too busy"}}')]),
            "http",
            "HTTP 503: too busy",
        ),
        (RawReply(0.0, 1.0, 404, [(1.0, b"<p>lost</p>")]), "http", "HTTP 404: <p>lost</p>"),
        (RawReply(0.0, 1.0, 500, []), "http", "(empty body)"),
        (raw(chunk("a"), {"error": {"message": "boom"}}, "[DONE]"), "stream", "boom"),
        (
            raw(chunk("a"), {"object": "error", "message": "old boom"}, "[DONE]"),
            "stream",
            "old boom",
        ),
        (raw(chunk("a"), chunk("", "abort"), "[DONE]"), "stream", "'abort'"),
        (raw(chunk("a"), "{broken", "[DONE]"), "stream", "not JSON"),
        (raw(chunk("a"), "[1]", "[DONE]"), "stream", "not a JSON object"),
        (
            RawReply(0.0, 1.0, 200, [(1.0, b'{"error": {"message": "oom"}}')]),
            "stream",
            "without an event stream: oom",
        ),
        (RawReply(0.0, 1.0, 200, []), "empty", "empty body"),
        (raw("[DONE]"), "empty", "without a token"),
        (raw(delta(role="assistant", content=""), delta("stop", content="")), "empty", "token"),
        (raw(chunk("a"), chunk("b")), "cut", "after 2 token chunks"),
        (
            raw(chunk("a"), failure="cut", error="ClientPayloadError: gone"),
            "cut",
            "ClientPayloadError: gone (after 1 token chunks)",
        ),
        (raw(failure="cut", http_status=None, error="ServerDisconnectedError"), "cut", "Server"),
    ],
)
def test_failures(reply: RawReply, status: str, words: str) -> None:
    read = read_reply(reply)
    assert read.status == status
    assert read.error is not None
    assert words in read.error


@pytest.mark.parametrize(
    "reply",
    [
        raw(chunk("a"), chunk("b", "length")),  # finished, [DONE] lost
        raw(chunk("a"), chunk("b"), "[DONE]"),  # a server without finish reasons
        raw(chunk("a", "stop"), "[DONE]", failure="cut", error="reset after the end"),
    ],
)
def test_a_finished_answer_is_a_success(reply: RawReply) -> None:
    assert read_reply(reply).status == "ok"


def test_error_messages() -> None:
    assert error_message({"error": "plain"}) == "plain"
    assert error_message({"error": {"code": 1}}) == "{'code': 1}"
    assert error_message({"error": None, "choices": []}) is None
