"""The tokens that prompts are made of, and the tokenizer that counts them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from qkit.errors import InputError

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

    def text(self, ids: tuple[int, ...]) -> str:
        """Return the text of token ids, without white space around it."""
        return self.tokenizer.decode(list(ids)).strip()

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The ids that are plain words, or else all that are whole characters."""
        shown = {i: self.tokenizer.decode([i], skip_special_tokens=False) for i in self.ordinary}
        words = tuple(i for i, text in shown.items() if _WORD.fullmatch(text))
        if len(words) >= _FEWEST_WORDS:
            return words
        return tuple(i for i, text in shown.items() if text.strip() and "\ufffd" not in text)


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
