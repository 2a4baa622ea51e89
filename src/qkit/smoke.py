"""A few prompts before hours of evaluation: does the variant answer like a language model?"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from typing import Any

from qkit.errors import MeasurementError, ServerError

PROMPTS = (
    "The capital of France is",
    "Question: What is 2 + 2?\nAnswer:",
    "def add(a, b):\n    return",
    "Once upon a time",
)
TOKENS = 16
TIMEOUT_S = 300


def smoke_check(base_url: str, model: str) -> None:
    """Ask for a few greedy continuations and refuse a broken variant.

    Raises:
        ServerError: The server does not answer the request.
        MeasurementError: A log-probability is not finite, or every continuation repeats a single
            token.
    """
    stuck = []
    for prompt in PROMPTS:
        tokens, logprobs = _continue(base_url, model, prompt)
        if not all(math.isfinite(value) for value in logprobs):
            raise MeasurementError(
                "the served model answers with log-probabilities that are not finite",
                where=base_url,
                fix="the variant is broken: look at its qkit.json, and quantize it again with "
                "other calibration data or settings",
            )
        if len(tokens) == TOKENS and len(set(tokens)) == 1:
            stuck.append(tokens[0])
    if len(stuck) == len(PROMPTS):
        raise MeasurementError(
            f"the served model repeats one token on every prompt ({stuck[0]!r})",
            where=base_url,
            fix="the variant is broken: quantize it again with other calibration data or settings",
        )


def _continue(base_url: str, model: str, prompt: str) -> tuple[list[str], list[float]]:
    """Return the tokens of a greedy continuation and their log-probabilities."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "top_p": 1,
        "repetition_penalty": 1,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            answer: dict[str, Any] = json.load(reply)
        logprobs = answer["choices"][0]["logprobs"]
        return list(logprobs["tokens"]), [float(v) for v in logprobs["token_logprobs"]]
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:500]
        raise ServerError(
            f"the server refuses a plain completion (HTTP {error.code})",
            where=base_url,
            detail=detail,
        ) from None
    except (urllib.error.URLError, OSError) as error:
        raise ServerError(f"the server does not answer: {error}", where=base_url) from None
    except (KeyError, IndexError, TypeError, ValueError):
        raise ServerError(
            "the server's completion has no log-probabilities",
            where=base_url,
            fix="qkit needs an OpenAI-compatible server that supports `logprobs`, such as vLLM",
        ) from None
