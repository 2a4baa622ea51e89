"""Asks a vLLM server for the log-probabilities of a prompt's tokens, with the most likely others.

vLLM's completion endpoint returns, for every position of a prompt, the log-probability of the
prompt's own token and those of the K most likely ones (`prompt_logprobs`; K is at most the server's
`--max-logprobs`, 20 by default). It takes no list of tokens to score there (`logprob_token_ids` is
for generated positions only), so both sides of a comparison have their own K tokens. Such requests
do not read the prefix cache.
"""

from __future__ import annotations

from typing import Any

from qkit.errors import InputError, MeasurementError, ServerError
from qkit.evaluate.fidelity_scores import WindowScores
from qkit.evaluate.fidelity_windows import Ids
from qkit.evaluate.scoring_client import SAMPLING, ScoringClient
from qkit.evaluate.scoring_replies import CLAMPED_LOGPROB

_FIX = "fidelity needs a vLLM server's `prompt_logprobs` and `return_token_ids`, without a proxy"


class FidelityClient(ScoringClient):
    """A `ScoringClient` for whole next-token distributions and greedy token ids."""

    async def score(self, tokens: Ids, top: int) -> WindowScores:
        """Return the scores of a window.

        Args:
            tokens: Token ids, at least 2.
            top: Most likely tokens to return of each position.

        Raises:
            InputError: The server returns fewer log-probabilities than asked for.
            ServerError: The server is gone, stalls, refuses or keeps failing.
            MeasurementError: The reply lacks what was asked for, or it is not finite.
        """
        body = {"prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": top}
        try:
            choice = await self._complete(body)
        except ServerError as error:
            if "max allowed" in (error.detail or ""):
                raise InputError(
                    f"the server returns fewer than {top} log-probabilities a position",
                    where=self.base_url,
                    detail=error.detail,
                    fix=f"serve with `--max-logprobs {top}` (`serve.args`), or lower "
                    "`fidelity.top_logprobs`",
                ) from error
            raise
        return read_scores_reply(choice, tokens, top, where=self.base_url)

    async def continue_greedily(self, tokens: Ids, most: int) -> tuple[int, ...]:
        """Return the token ids that greedy decoding appends to a prompt.

        Raises:
            ServerError: The server is gone, stalls, refuses or keeps failing.
            MeasurementError: The reply has no token ids.
        """
        body = {"prompt": list(tokens), "max_tokens": most, "return_token_ids": True}
        ids = (await self._complete(body)).get("token_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise MeasurementError(
                "the reply has no token ids of the generated text", where=self.base_url, fix=_FIX
            )
        return tuple(ids)

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        _, reply = await self._send(
            "POST", "/v1/completions", {"model": self.model, **SAMPLING, **body}
        )
        try:
            choice = reply["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            detail = str(reply)[:500]
            raise ServerError(
                "the server answers without a completion", where=self.base_url, detail=detail
            )
        return choice


def read_scores_reply(choice: dict[str, Any], tokens: Ids, top: int, *, where: str) -> WindowScores:
    """Return the scores in one choice of a completion reply.

    Every position has the prompt's own token and the `top` most likely ones, which may be the same.

    Raises:
        MeasurementError: Positions or tokens are missing, or a log-probability is not finite.
    """
    positions = choice.get("prompt_logprobs")
    if not isinstance(positions, list) or len(positions) != len(tokens):
        found = len(positions) if isinstance(positions, list) else "no"
        what = f"the reply has log-probabilities of {found} prompt tokens, expected {len(tokens)}"
        raise MeasurementError(what, where=where, fix=_FIX)
    logprobs, top_ids, top_logprobs = [], [], []
    for token, entry in zip(tokens[1:], positions[1:], strict=True):
        values = _values(entry, where)
        if token not in values:
            what = f"the reply lacks the prompt's own token {token}"
            raise MeasurementError(what, where=where, fix=_FIX)
        logprobs.append(values[token])
        if len(values) == top + 1:
            others = {
                i: v for i, v in values.items() if i != token
            }  # it is not among the likeliest
        else:
            others = values
        if len(others) != top:
            what = f"the reply has {len(others)} log-probabilities of a position, expected {top}"
            raise MeasurementError(what, where=where, fix=_FIX)
        ranked = sorted(others.items(), key=lambda item: (-item[1], item[0]))
        top_ids.append([i for i, _ in ranked])
        top_logprobs.append([v for _, v in ranked])
    return WindowScores(logprobs, top_ids, top_logprobs)


def _values(entry: Any, where: str) -> dict[int, float]:
    """Return log-probability by token id of one position."""
    try:
        values = {int(token): float(value["logprob"]) for token, value in entry.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise MeasurementError(
            "the reply has no log-probabilities of a prompt token", where=where, fix=_FIX
        ) from None
    if not all(CLAMPED_LOGPROB < value <= 1e-3 for value in values.values()):
        raise MeasurementError(
            "a log-probability is not finite",
            where=where,
            fix="the checkpoint computes infinities or NaN; check it, or serve it in another dtype",
        )
    return values
