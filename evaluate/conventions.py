"""What the field reports known tasks with, and what they need beside qkit. Literal tables.

Few-shot counts: Hugging Face's Open LLM Leaderboard, version 1 (Beeching et al., 2023, "About"
page) for its six tasks; Zhou et al., 2023, "Instruction-Following Evaluation for Large Language
Models" for ifeval; perplexity has no examples.
"""

from __future__ import annotations

from dataclasses import dataclass

_LEADERBOARD = "Open LLM Leaderboard v1"


@dataclass(frozen=True)
class FewShot:
    """A conventional number of examples and where the convention comes from."""

    count: int
    source: str


#: Few-shot counts by task; the value in a recipe or on the command line goes first.
FEWSHOT: dict[str, FewShot] = {
    "arc_challenge": FewShot(25, _LEADERBOARD),
    "hellaswag": FewShot(10, _LEADERBOARD),
    "mmlu": FewShot(5, _LEADERBOARD),
    "mmlu_stem": FewShot(5, _LEADERBOARD),
    "mmlu_humanities": FewShot(5, _LEADERBOARD),
    "mmlu_social_sciences": FewShot(5, _LEADERBOARD),
    "mmlu_other": FewShot(5, _LEADERBOARD),
    "winogrande": FewShot(5, _LEADERBOARD),
    "truthfulqa_mc2": FewShot(0, _LEADERBOARD),
    "gsm8k": FewShot(5, _LEADERBOARD),
    "ifeval": FewShot(0, "Zhou et al., 2023"),
    "wikitext": FewShot(0, "perplexity of the text alone"),
}


@dataclass(frozen=True)
class Extra:
    """What a task's code needs beside lm-eval.

    Attributes:
        name: lm-eval's own name of the extra, as in `lm_eval[name]`.
        modules: Modules it imports.
        nltk_data: Resource of NLTK it reads, which it would fetch by itself while it is imported.
    """

    name: str
    modules: tuple[str, ...]
    nltk_data: str | None = None


#: Extras by the folder of lm-eval's tasks that needs them, at any depth.
EXTRAS: dict[str, Extra] = {
    "ifeval": Extra("ifeval", ("langdetect", "immutabledict", "nltk"), "tokenizers/punkt_tab"),
    "minerva_math": Extra("math", ("sympy", "antlr4", "math_verify")),
    "math": Extra("math", ("sympy", "antlr4", "math_verify")),
}
