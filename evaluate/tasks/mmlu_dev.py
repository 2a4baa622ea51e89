"""Questions of the task `mmlu_dev`, read from the installed lm-eval package.

lm-eval's chain-of-thought variant of MMLU keeps the development questions of every subject in its
YAML files, with the options inside the question's text and the answer at the end of the worked
solution. This module takes them apart again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import datasets
import lm_eval.tasks
import yaml
from lm_eval.api.samplers import ContextSampler

SOURCE = Path(lm_eval.tasks.__file__).parent / "mmlu" / "flan_cot_fewshot"
_QUESTION = re.compile(
    r"\s*(?P<question>.*?)\s*\(A\)\s*(?P<a>.*?)\s*\(B\)\s*(?P<b>.*?)\s*\(C\)\s*(?P<c>.*?)"
    r"\s*\(D\)\s*(?P<d>.*?)\s*",
    re.DOTALL,
)
_FIFTH_OPTION = re.compile(r"\(E\)")
_ANSWER = re.compile(r"answer is \(?([ABCD])\)?")


class Question(TypedDict):
    """One question with four options; `answer` is the index of the right one."""

    subject: str
    question: str
    choices: list[str]
    answer: int


def parse(subject: str, question: str, solution: str) -> Question | None:
    """Take a question apart; None where it does not have exactly four options and an answer."""
    parts = _QUESTION.fullmatch(question)
    answers = _ANSWER.findall(solution)
    if parts is None or not answers or _FIFTH_OPTION.search(question):
        return None
    return Question(
        subject=subject,
        question=parts["question"],
        choices=[parts[option] for option in "abcd"],
        answer="ABCD".index(answers[-1]),
    )


def questions() -> list[Question]:
    """Return all questions, subject by subject, in the package's order."""
    found = []
    for path in sorted(SOURCE.glob("mmlu_*.yaml")):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        subject = str(config["dataset_name"]).replace("_", " ")
        for sample in config["fewshot_config"]["samples"]:
            question = parse(subject, sample["question"], sample["target"])
            if question is not None:
                found.append(question)
    return found


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """Return the data set lm-eval evaluates, one split."""
    return {"test": datasets.Dataset.from_list(questions())}


class OtherQuestions(ContextSampler):  # type: ignore[misc]
    """Few-shot examples of the same subject, never the question itself.

    A subject has five questions, so at most four are left; a fifth example and more come from the
    following subjects and stand first, where all questions of the subject share them.
    """

    def sample(
        self, n: int, eval_doc: dict[str, Any] | None = None, df: Any = None, **_: Any
    ) -> Sequence[dict[str, Any]]:
        """Return `n` examples for a question.

        Raises:
            AssertionError: There are not so many questions; lm-eval's samplers raise the same.
        """
        pool = list(df or self.df)
        subject = eval_doc["subject"] if eval_doc else pool[0]["subject"]
        asked = eval_doc["question"] if eval_doc else None
        own = [doc for doc in pool if doc["subject"] == subject and doc["question"] != asked]
        last = max(i for i, doc in enumerate(pool) if doc["subject"] == subject)
        following = pool[last + 1 :] + pool[: last + 1]
        others = [d for d in following if d["subject"] != subject and d["question"] != asked]
        fill = max(0, n - len(own))
        assert fill <= len(others), f"{n} few-shot examples asked, {len(own) + len(others)} there"
        return [*others[:fill], *own[: n - fill]]
