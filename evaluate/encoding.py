"""From lm-eval's texts and settings to token ids and requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval.models.utils import handle_stop_sequences

from qkit.errors import InputError
from qkit.evaluate.scoring_requests import GenerateRequest

#: lm-eval's own default for tasks that do not say how much to generate.
DEFAULT_MAX_GEN_TOKS = 256


class PromptEncoder:
    """A tokenizer, and whether prompts begin with its BOS token.

    Args:
        tokenizer: Of the served checkpoint.
        add_bos: None does what the tokenizer does by itself.

    Raises:
        InputError: BOS is asked of a tokenizer that has none.
    """

    def __init__(self, tokenizer: Any, add_bos: bool | None) -> None:
        self._tokenizer = tokenizer
        self._ahead: dict[str, list[int]] = {}
        self.add_bos: bool = _adds_bos(tokenizer) if add_bos is None else add_bos
        if self.add_bos and tokenizer.bos_token_id is None:
            raise InputError(
                "the tokenizer has no BOS token",
                where=getattr(tokenizer, "name_or_path", None) or None,
                fix="leave `add_bos_token` out",
            )

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Return a text's token ids.

        Args:
            text: What to encode.
            bos: Whether BOS stands before it; None is as prompts have it, but never a second one,
                since chat templates write their own.
        """
        tokens = self._ahead.get(text)
        if tokens is None:
            tokens = self._plain([text])[0]
        if bos is None:
            bos = self.add_bos and not text.startswith(self._tokenizer.bos_token)
        return [self._tokenizer.bos_token_id, *tokens] if bos else list(tokens)

    def ahead(self, texts: Iterable[str]) -> None:
        """Tokenize many texts at once, on all cores; `encode` then only looks them up."""
        self.forget()
        if different := list(dict.fromkeys(texts)):
            self._ahead.update(zip(different, self._plain(different), strict=True))

    def forget(self) -> None:
        """Drop what was tokenized ahead."""
        self._ahead.clear()

    def _plain(self, texts: list[str]) -> list[list[int]]:
        ids = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return list(ids["input_ids"])


def _adds_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer puts BOS before a text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]


def generation(prompt: Sequence[int], settings: Mapping[str, Any], *, seed: int) -> GenerateRequest:
    """Read a task's generation settings the way lm-eval's own API client does.

    Args:
        prompt: Token ids.
        settings: `generation_kwargs` of the task. Without `temperature` it is greedy, without
            `max_gen_toks` it gives 256 tokens.
        seed: Of sampling.
    """
    rest = dict(settings)
    rest.pop("do_sample", None)
    fallback = rest.pop("max_gen_toks", DEFAULT_MAX_GEN_TOKS)
    return GenerateRequest(
        prompt=tuple(prompt),
        max_tokens=int(rest.pop("max_tokens", fallback)),
        temperature=float(rest.pop("temperature", 0)),
        stop=tuple(handle_stop_sequences(rest.pop("until", None), None)),
        seed=seed,
        extra=tuple((name, _frozen(value)) for name, value in sorted(rest.items())),
    )


def _frozen(value: Any) -> Any:
    """Return a value that can be part of a key; as JSON it is the same."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Say where two different tokenizations part."""
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    return f"token {at} is {_at(theirs, at)} there and {_at(ours, at)} here"


def _at(tokens: Sequence[int], position: int) -> str:
    return str(tokens[position]) if position < len(tokens) else "missing"
