"""Which scripts calibration text is written in, and which the model's tokenizer knows.

A quantized model keeps best what it was calibrated with, so text of one script for a model of many
languages is worth a warning. Scripts, not languages: English and French are both Latin and cannot
be told apart here.

The standard library knows no script property, but the first word of a letter's Unicode name is its
script ("LATIN SMALL LETTER A"), once compatibility forms are folded (NFKC).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

#: Names of scripts by the first word of a letter's name, where the word is not the usual name.
_SCRIPTS = {
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "HIRAGANA": "Kana",
    "KATAKANA": "Kana",
    "KATAKANA-HIRAGANA": "Kana",
}
#: Data with this share of its letters in one script counts as data of one script.
ONE_SCRIPT_SHARE = 0.98
#: A script counts as known to a tokenizer with this share of its tokens of letters. Qwen2.5's seven
#: are between 1.8 % (Thai) and 67 % (Latin); the next, Kana aside, has 0.2 %.
KNOWN_SHARE = 0.01
TOKENIZER_FILE = "tokenizer.json"


def script_of(letter: str) -> str:
    """Return a letter's script, for example "Latin", "Han", "Cyrillic" or "Kana"."""
    folded = unicodedata.normalize("NFKC", letter)[0]
    word = unicodedata.name(folded, "unknown").split(" ", 1)[0].split("-UNIFIED", 1)[0]
    return _SCRIPTS.get(word, word.capitalize())


def script_mix(characters: Mapping[str, int]) -> dict[str, float]:
    """Return the share of every script among the letters, the largest first.

    Args:
        characters: How often each character occurs; what is no letter does not count.
    """
    found = Counter[str]()
    for character, count in characters.items():
        if character.isalpha():
            found[script_of(character)] += count
    total = found.total()
    return {script: count / total for script, count in found.most_common()}


def tokenizer_scripts(folder: Path) -> dict[str, float] | None:
    """Return the share of every script among a vocabulary's tokens that hold letters.

    Every token counts once, under the script of its first letter. A tokenizer's vocabulary is what
    its makers' training text was made of, and is there without any word of theirs on languages.

    Returns:
        The shares, the largest first; None where there is no tokenizer.json that can be read.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415  (used only where there is a question)

    if not (folder / TOKENIZER_FILE).is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    # The library raises a bare Exception; that the file is broken is told where it is needed.
    except Exception:
        return None
    tokens = tokenizer.decode_batch([[index] for index in range(tokenizer.get_vocab_size())])
    firsts = Counter(
        letter for token in tokens if (letter := next(filter(str.isalpha, token), None))
    )
    return script_mix(firsts)


def one_script_warning(data: Mapping[str, float], model: Mapping[str, float] | None) -> str | None:
    """Return a warning where data is of one script and the model of several, else None.

    Args:
        data: Script mix of the calibration text.
        model: That of the tokenizer's vocabulary; None where it is not known.
    """
    if not data or model is None:
        return None
    script, share = next(iter(data.items()))
    others = [name for name, part in model.items() if part >= KNOWN_SHARE and name != script]
    if share < ONE_SCRIPT_SHARE or not others:
        return None
    return (
        f"{100 * share:.3g} % of the calibration's letters are {script}, and the model's vocabulary"
        f" also holds {', '.join(others)}: text in those may lose more accuracy than is measured on"
        f" {script} text"
    )


def mix_label(mix: Mapping[str, float], shown: int = 5) -> str:
    """Return a script mix in one line, for example "Latin 99.2 %, Han 0.8 %"."""
    parts = [f"{script} {100 * share:.3g} %" for script, share in list(mix.items())[:shown]]
    rest = 1 - sum(list(mix.values())[:shown])
    if len(mix) > shown:
        parts.append(f"others {100 * rest:.2g} %")
    return ", ".join(parts) or "no letters"
