"""Prompts of the benchmark: unique within a sweep, and the same for every variant of a run.

They are a pure function of the suite (seed, levels, counts, length) and of the vocabulary, so two
variants of one checkpoint get the same prompts, and no prompt comes twice: not in the warm-up,
not at another level. Otherwise a prefix cache would answer part of the work.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from qkit.errors import InputError
from qkit.suites import BenchSuite

#: Token ids for the completions endpoint, text for the chat endpoint.
Prompt = tuple[int, ...] | str

_DRAWS = 100
#: A plain word with its leading space. BPE tokenizers split text before spaces, so a row of such
#: tokens is cut into the same tokens again and keeps its length.
_WORD = re.compile(r" [A-Za-z]{2,}")
_FEWEST_WORDS = 32


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that a prompt may be made of, and the tokenizer they come from."""

    tokenizer: Tokenizer
    #: Ids that are neither special nor added, ascending.
    ordinary: tuple[int, ...]

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def words(self) -> tuple[int, ...]:
        """Return the ids that are plain words, or else all that are whole characters."""
        shown = {i: self.tokenizer.decode([i], skip_special_tokens=False) for i in self.ordinary}
        words = tuple(i for i, text in shown.items() if _WORD.fullmatch(text))
        if len(words) >= _FEWEST_WORDS:
            return words
        return tuple(i for i, text in shown.items() if text.strip() and "\ufffd" not in text)


@dataclass(frozen=True)
class CellPrompts:
    """Prompts of one concurrency level, in the order they are sent."""

    concurrency: int
    warmup: tuple[Prompt, ...]
    measured: tuple[Prompt, ...]


def load_vocabulary(tokenizer_path: Path) -> Vocabulary:
    """Read the vocabulary of a checkpoint folder or of a tokenizer.json.

    Raises:
        InputError: There is no readable tokenizer.json.
    """
    path = tokenizer_path / "tokenizer.json" if tokenizer_path.is_dir() else tokenizer_path
    if not path.is_file():
        raise InputError(
            "the benchmark needs the checkpoint's tokenizer.json, which is not there",
            where=path,
            fix="save the tokenizer beside the weights with tokenizer.save_pretrained(FOLDER)",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every parse error
        raise InputError(f"the tokenizer cannot be read: {error}", where=path) from error
    added = set(tokenizer.get_added_tokens_decoder())
    ids = set(tokenizer.get_vocab(with_added_tokens=False).values()) - added
    if not ids:
        raise InputError("the tokenizer has no token that is not special", where=path)
    return Vocabulary(tokenizer=tokenizer, ordinary=tuple(sorted(ids)))


def requests_at(suite: BenchSuite, concurrency: int) -> int:
    """Return how many requests are measured at a level."""
    return max(suite.min_requests, suite.requests_per_slot * concurrency)


def plan_prompts(suite: BenchSuite, vocabulary: Vocabulary) -> tuple[CellPrompts, ...]:
    """Draw all prompts of a sweep, one cell a level, all of them different.

    The warm-up has one prompt a slot. On the completions endpoint every prompt is exactly
    `input_tokens` ids; on the chat endpoint it is text of about that length, to which the server
    adds its template.

    Raises:
        InputError: `input_tokens` is too small for that many different prompts.
    """
    ids = vocabulary.words() if suite.endpoint == "chat" else vocabulary.ordinary
    seen: set[Prompt] = set()

    def draw(concurrency: int, part: str, index: int) -> Prompt:
        for attempt in range(_DRAWS):
            # A string seeds through SHA-512, the same in every Python version.
            rng = random.Random(f"{suite.seed}/{concurrency}/{part}/{index}/{attempt}")
            drawn = tuple(rng.choices(ids, k=suite.input_tokens))
            prompt: Prompt = drawn
            if suite.endpoint == "chat":
                prompt = vocabulary.tokenizer.decode(list(drawn)).strip()
            if prompt and prompt not in seen:
                seen.add(prompt)
                return prompt
        raise InputError(
            f"a vocabulary of {len(ids)} tokens does not give enough different prompts of "
            f"{suite.input_tokens} tokens",
            where="bench.input_tokens",
            fix="raise bench.input_tokens, or lower bench.requests_per_slot or bench.concurrency",
        )

    return tuple(
        CellPrompts(
            concurrency=level,
            warmup=tuple(draw(level, "warmup", i) for i in range(level)),
            measured=tuple(draw(level, "measured", i) for i in range(requests_at(suite, level))),
        )
        for level in suite.concurrency
    )


def prompts_hash(cells: tuple[CellPrompts, ...]) -> str:
    """Return the SHA-256 over all prompts of a sweep, warm-up included, in sending order."""
    digest = hashlib.sha256()
    for prompt in _all(cells):
        digest.update(json.dumps(prompt, ensure_ascii=False).encode("utf-8") + b"\n")
    return digest.hexdigest()


def _all(cells: tuple[CellPrompts, ...]) -> Iterator[Prompt]:
    for cell in cells:
        yield from cell.warmup
        yield from cell.measured
