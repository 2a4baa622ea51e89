"""Reads a vLLM completion reply strictly: what it lacks is an error that names it.

A missing, cut or infinite log-probability never becomes a score.
"""

from __future__ import annotations

import json
import math
from typing import Any

from qkit.errors import MeasurementError, ServerError
from qkit.evaluate.scoring_requests import (
    Answer,
    GenerateRequest,
    OptionRequest,
    PromptRequest,
    Request,
    TokenScore,
)

#: Why a text ends that is whole; vLLM also knows "abort" and "error".
_WHOLE = ("stop", "length", "repetition")
#: vLLM writes this for a log-probability of minus infinity.
CLAMPED_LOGPROB = -9999.0


def read_answer(request: Request, reply: Any, *, where: str) -> Answer:
    """Return a request's answer from the parsed reply.

    Args:
        request: What was asked.
        reply: The server's parsed JSON.
        where: Server and model, for error messages.

    Raises:
        ServerError: The reply is an error, no completion, or a text that was cut off.
        MeasurementError: It lacks log-probabilities or text, or they are not finite.
    """
    choice = _choice(reply, where)
    match request:
        case OptionRequest():
            return _option_scores(request, choice, where)
        case PromptRequest():
            return _prompt_scores(request, choice, where)
        case GenerateRequest():
            text = choice.get("text")
            if not isinstance(text, str):
                raise _incomplete("the reply has no text", where)
            if (reason := choice.get("finish_reason")) not in _WHOLE:
                raise ServerError(
                    f"the server cut a text off (finish_reason {reason!r})",
                    where=where,
                    fix="a server that is being stopped does this; see its log, then run again",
                )
            return text


def error_message(reply: Any) -> str:
    """Return the human part of an error reply, text or parsed, at most a few lines of it."""
    if isinstance(reply, str):
        try:
            reply = json.loads(reply)
        except ValueError:
            return str(reply).strip()[:500] or "(empty reply)"
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        if isinstance(error, dict):
            return str(error.get("message", error))[:500]
        return str(error)[:500]
    return str(reply)[:500]


def _choice(reply: Any, where: str) -> dict[str, Any]:
    if isinstance(reply, dict) and (reply.get("error") or reply.get("object") == "error"):
        raise ServerError(f"the server answers an error: {error_message(reply)}", where=where)
    try:
        choice = reply["choices"][0]
    except (KeyError, IndexError, TypeError):
        choice = None
    if not isinstance(choice, dict):
        raise ServerError(
            "the reply has no choices", where=where, fix="give the URL of a vLLM OpenAI server"
        )
    return choice


def _option_scores(
    request: OptionRequest, choice: dict[str, Any], where: str
) -> tuple[TokenScore, ...]:
    logprobs = _logprobs(choice, positions=1, where=where)
    top = logprobs["top_logprobs"][0]
    if not isinstance(top, dict):
        raise _incomplete("the reply has no log-probabilities of the answer tokens", where)
    missing = [token for token in request.token_ids if _name(token) not in top]
    if missing:
        raise _incomplete(
            f"the reply lacks {len(missing)} of {len(request.token_ids)} answer tokens "
            f"(ids {', '.join(map(str, missing[:8]))}): the server does not honour "
            "`logprob_token_ids`",
            where,
        )
    best = _finite(logprobs["token_logprobs"][0], where)
    values = [_finite(top[_name(token)], where) for token in request.token_ids]
    # By value, as lm-eval decides it: of two tokens with the same score both are greedy.
    return tuple(TokenScore(value, value >= best) for value in values)


def _prompt_scores(
    request: PromptRequest, choice: dict[str, Any], where: str
) -> tuple[TokenScore, ...]:
    # One position more than the prompt has: vLLM always generates a token.
    logprobs = _logprobs(choice, positions=len(request.prompt) + 1, where=where)
    scores = []
    for position in range(request.scored_from, len(request.prompt)):
        sent, repeated = _name(request.prompt[position]), logprobs["tokens"][position]
        if repeated != sent:
            raise _incomplete(
                f"the reply repeats {repeated!r} at position {position}, where {sent!r} was sent",
                where,
            )
        top = logprobs["top_logprobs"][position]
        if not isinstance(top, dict) or not top:
            raise _incomplete("the reply has no log-probabilities of the prompt's tokens", where)
        value = _finite(logprobs["token_logprobs"][position], where)
        scores.append(TokenScore(value, value == max(_finite(v, where) for v in top.values())))
    return tuple(scores)


def _logprobs(choice: dict[str, Any], positions: int, where: str) -> dict[str, list[Any]]:
    """Return the log-probabilities of a choice, checked for presence and length."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise _incomplete("the server returns no log-probabilities", where)
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        values = logprobs.get(key)
        if not isinstance(values, list) or len(values) != positions:
            found = len(values) if isinstance(values, list) else "no"
            raise _incomplete(f"the reply has {found} {key}, expected {positions}", where)
    return logprobs


def _finite(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _incomplete(f"a log-probability is {value!r}", where)
    if not math.isfinite(value) or value <= CLAMPED_LOGPROB:
        raise MeasurementError(
            f"a log-probability is not finite ({value})",
            where=where,
            fix="the checkpoint computes infinities or NaN; check it, or serve it in another dtype",
        )
    return float(value)


def _name(token: int) -> str:
    """Return a token as vLLM writes it with `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def _incomplete(what: str, where: str) -> MeasurementError:
    return MeasurementError(
        what,
        where=where,
        fix="accuracy needs exact log-probabilities: serve with vLLM 0.32 or newer, without a "
        "proxy that strips them",
    )
