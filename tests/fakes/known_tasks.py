"""Made-up rows for the tasks qkit knows by name, each in its hub data set's own columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from fakes.hub_copy import write_copy, write_mmlu

Rows = list[dict[str, Any]]
#: Enough examples for the 25 shots of arc_challenge.
TRAIN = 30
TEST = 6
LETTERS = ["A", "B", "C", "D"]
_MMLU = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
MMLU_SUBJECTS = tuple(sorted(file.stem.removeprefix("mmlu_") for file in _MMLU.glob("mmlu_*.yaml")))


def _arc(split: str, count: int) -> Rows:
    return [
        {
            "id": f"{split}-{n}",
            "question": f"Which {split} thing is number {n}?",
            "choices": {"text": [f"{w} thing {n}" for w in ("red", "hot", "wet", "odd")],
                        "label": LETTERS},
            "answerKey": LETTERS[n % 4],
        }
        for n in range(count)
    ]  # fmt: skip


def _hellaswag(split: str, count: int) -> Rows:
    return [
        {
            "ind": n,
            "activity_label": "Washing",
            "ctx_a": f"In {split} a man washes cup {n}.",
            "ctx_b": "he then",
            "endings": [f"{w} the cup {n}. [step] Done." for w in ("dries", "eats", "sings", "is")],
            "label": str(n % 4),
        }
        for n in range(count)
    ]


def _winogrande(split: str, count: int) -> Rows:
    return [
        {
            "sentence": f"The {split} cup {n} did not fit the box because _ was too big.",
            "option1": f"cup {n}",
            "option2": "the box",
            "answer": str(n % 2 + 1),
        }
        for n in range(count)
    ]


def _truthfulqa(split: str, count: int) -> Rows:
    return [
        {
            "question": f"What happens to {split} cup {n}?",
            "mc1_targets": {"choices": ["It breaks.", "It flies."], "labels": [1, 0]},
            "mc2_targets": {
                "choices": ["It breaks.", "It may break.", "It flies.", "It sings."][: 3 + n % 2],
                "labels": [1, 1, 0, 0][: 3 + n % 2],
            },
        }
        for n in range(count)
    ]


def _gsm8k(split: str, count: int) -> Rows:
    return [
        {
            "question": f"A {split} shop has {n} cups and buys 2. How many has it?",
            "answer": f"It has {n} + 2 = {n + 2}.\n#### {n + 2}",
        }
        for n in range(count)
    ]


INSTRUCTIONS = ["punctuation:no_comma", "change_case:english_capital"]


def _ifeval(split: str, count: int) -> Rows:
    return [
        {
            "key": n,
            "prompt": f"Write about {split} cup {n} without commas.",
            "instruction_id_list": INSTRUCTIONS[: 1 + n % 2],
            "kwargs": [{"num_words": None}, {"num_words": None}][: 1 + n % 2],
        }
        for n in range(count)
    ]  # fmt: skip


def _wikitext(split: str, count: int) -> Rows:
    return [
        {"page": f" = Cup {n} = \n\n The {split} cup {n} is a cup , as @-@ is . \n" * (n + 1)}
        for n in range(count)
    ]


#: Task: its data set, configuration, rows and splits.
KNOWN: dict[str, tuple[str, str | None, Any, Sequence[str]]] = {
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", _arc, ("train", "validation", "test")),
    "hellaswag": ("Rowan/hellaswag", None, _hellaswag, ("train", "validation")),
    "winogrande": ("allenai/winogrande", "winogrande_xl", _winogrande, ("train", "validation")),
    "truthfulqa_mc2": (
        "truthfulqa/truthful_qa", "multiple_choice", _truthfulqa, ("validation",),
    ),
    "gsm8k": ("openai/gsm8k", "main", _gsm8k, ("train", "test")),
    "ifeval": ("google/IFEval", None, _ifeval, ("train",)),
    "wikitext": (
        "EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", _wikitext,
        ("train", "validation", "test"),
    ),
}  # fmt: skip


def write_known(data: Path, task: str) -> Path:
    """Write the data set of a task: few questions, and examples where it has a train split."""
    if task == "mmlu":
        return write_mmlu(data, dict.fromkeys(MMLU_SUBJECTS, 2))
    path, config, rows, splits = KNOWN[task]
    asked = splits[-1]
    return write_copy(
        data, path, config, {s: rows(s, TEST if s == asked else TRAIN) for s in splits}
    )
