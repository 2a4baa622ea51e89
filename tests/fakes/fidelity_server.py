"""A fake server of whole next-token distributions: known ones, which a variant may shift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fakes.scoring_server import VOCABULARY, Fault, ScoringServer
from numpy.typing import NDArray


def distribution(before: Sequence[int], shift: float = 0.0) -> NDArray[np.float64]:
    """Natural log-probabilities of all tokens after the given ones."""
    seed = sum((i + 1) * t for i, t in enumerate(before[-3:]))
    tokens = np.arange(VOCABULARY)
    logits = -((seed * 31 + tokens * 17) % 101) / 8 + shift * np.sin(tokens * (1 + seed % 7))
    return np.asarray(logits - np.log(np.exp(logits).sum()))


@dataclass
class FidelityServer(ScoringServer):
    """Answers prompt log-probabilities and greedy token ids as vLLM does.

    Args:
        shift: How far the distributions are from those of a server with 0.
        max_logprobs: Most log-probabilities of a position.
    """

    shift: float = 0.0
    max_logprobs: int = 20

    async def _instead(self, request: Any, fault: Fault | None) -> Any:
        from aiohttp import web

        asked = self.bodies[-1].get("prompt_logprobs", 0)
        if asked > self.max_logprobs:
            message = (
                f"Requested prompt logprobs of {asked}, which is greater than max allowed: "
                f"{self.max_logprobs}"
            )
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        return await super()._instead(request, fault)

    def _choice(
        self, index: int, prompt: list[int], body: dict[str, Any], fault: Fault | None
    ) -> dict[str, Any]:
        if "prompt_logprobs" in body:
            positions = [self._position(prompt, i, body, fault) for i in range(len(prompt))]
            if fault == "short_echo":
                positions.pop()
            answer = None if fault == "no_logprobs" else positions
            return {"index": index, "text": "x", "prompt_logprobs": answer}
        if "return_token_ids" in body:
            ids: list[int] = []
            while len(ids) < body["max_tokens"]:
                ids.append(int(distribution([*prompt, *ids], self.shift).argmax()))
            return {"index": index, "text": "x", "token_ids": None if fault == "no_text" else ids}
        return super()._choice(index, prompt, body, fault)

    def _position(
        self, prompt: list[int], position: int, body: dict[str, Any], fault: Fault | None
    ) -> dict[str, Any] | None:
        if position == 0:
            return None
        logprobs = distribution(prompt[:position], self.shift)
        likely = np.argsort(-logprobs, kind="stable")[: body["prompt_logprobs"]].tolist()
        tokens = dict.fromkeys([prompt[position], *likely])
        if fault == "other_echo":
            tokens.pop(prompt[position])
        found = {str(t): {"logprob": float(logprobs[t]), "rank": 1} for t in tokens}
        if fault == "minus_infinity":
            found[str(likely[0])]["logprob"] = -9999.0
        return found
