"""What the benchmark sends, and how a reply becomes a record."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from qkit.evaluate.stream import RawReply, read_reply
from qkit.evaluate.workloads.units import Message, Prompt, Turn
from qkit.evaluate.workloads.vocabulary import Vocabulary
from qkit.measurements import RequestRecord
from qkit.suites import BenchSuite

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def request_fields(
    suite: BenchSuite, turn: Turn, *, max_tokens: int | None = None
) -> dict[str, Any]:
    """Return what a request says, but the model: explicit sampling, streaming, usage, length.

    Args:
        suite: The benchmark.
        turn: The request.
        max_tokens: Bounds the answer further, for a warm-up.
    """
    tokens = min(turn.output_tokens, max_tokens or turn.output_tokens)
    fields: dict[str, Any] = {**suite.sampling.sent(), "max_tokens": tokens, "stream": True}
    # The running count tells chunks with a token from those without, whatever their text is.
    fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if suite.ignore_eos:
        fields |= {"ignore_eos": True, "min_tokens": tokens}
    if suite.endpoint == "chat":
        fields["messages"] = _messages(turn.prompt)
    else:
        fields["prompt"] = turn.prompt
    return fields


def request_body(
    suite: BenchSuite, model: str, turn: Turn, *, max_tokens: int | None = None
) -> bytes:
    """Return a request's JSON; the arguments are those of `request_fields`."""
    return json.dumps(
        {"model": model, **request_fields(suite, turn, max_tokens=max_tokens)}
    ).encode()


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [asdict(message) for message in prompt if isinstance(message, Message)]


def to_record(
    raw: RawReply,
    *,
    index: int,
    origin_s: float,
    suite: BenchSuite,
    turn: Turn,
    vocabulary: Vocabulary,
    repeat: int = 0,
) -> RequestRecord:
    """Read a raw reply into what is stored; times are rounded to microseconds after `origin_s`.

    An answer of another length than asked under `ignore_eos` is a failure ("length"): it did not
    do the work it is compared by. Lengths that are only estimated are not judged.
    """
    reply = read_reply(raw)
    token_s = tuple(round(arrival - origin_s, 6) for arrival in reply.token_s)
    output_tokens, estimated = reply.output_tokens, False
    if output_tokens is None and reply.text:
        output_tokens, estimated = vocabulary.count(reply.text), True
    prompt_tokens = reply.prompt_tokens
    if prompt_tokens is None and suite.endpoint == "completions" and _is_ids(turn.prompt):
        prompt_tokens = len(turn.prompt)
    status, error = reply.status, reply.error
    if status == "ok" and suite.ignore_eos and not estimated and output_tokens is not None:
        asked = turn.output_tokens
        if output_tokens != asked:
            status = "length"
            error = f"{output_tokens} output tokens, not the {asked} that were asked for"
    return RequestRecord(
        index=index,
        repeat=repeat,
        status=status,
        error=error,
        scheduled_s=_after(origin_s, raw.scheduled_s),
        start_s=round(raw.start_s - origin_s, 6),
        written_s=_after(origin_s, raw.written_s),
        first_token_s=token_s[0] if token_s else None,
        last_token_s=token_s[-1] if token_s else None,
        end_s=round(raw.end_s - origin_s, 6),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_estimated=estimated,
        finish_reason=reply.finish_reason,
        chunk_s=token_s,
    )


def _after(origin_s: float, moment: float | None) -> float | None:
    return None if moment is None else round(moment - origin_s, 6)


def _is_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, tuple) and isinstance(prompt[0], int)
