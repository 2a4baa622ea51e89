"""Small tokenizers made on the spot, so that tests need no checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

#: Two-letter words with their leading space, one token each.
WORDS = tuple(f" {a}{b}" for a in "bcdfgklm" for b in "aeiou")


def write_byte_tokenizer(folder: Path, *, words: bool = False) -> Path:
    """Save a byte-level tokenizer (256 ids, with `words` 40 more, then two special ones)."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for a, b in (word[1:] for word in WORDS) if words else ():
        for left, right in (("Ġ", a), (f"Ġ{a}", b)):
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
