"""A local copy of the hub's `cais/mmlu`, in its own layout, with a few made-up questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Sequence, Value

FEATURES = Features(
    {
        "question": Value("string"),
        "subject": Value("string"),
        "choices": Sequence(Value("string")),
        "answer": ClassLabel(names=["A", "B", "C", "D"]),
    }
)


def write_mmlu(data: Path, questions: Mapping[str, int]) -> Path:
    """Write DATA/cais/mmlu with so many test questions a subject, and five for few-shot.

    As `hf download --repo-type dataset cais/mmlu --local-dir DATA/cais/mmlu` leaves it: a README
    that lists the configurations, and Parquet files in a folder per subject.
    """
    folder = data / "cais" / "mmlu"
    lines = ["---", "configs:"]
    for subject, count in questions.items():
        (folder / subject).mkdir(parents=True)
        lines += [f"- config_name: {subject}", "  data_files:"]
        for split, size in (("test", count), ("dev", 5)):
            rows = [
                {
                    "question": f"Which {split} fact number {number} of {subject} is right?",
                    "subject": subject,
                    "choices": [f"{word} {number}" for word in ("one", "two", "three", "four")],
                    "answer": (number * 7 + len(subject)) % 4,
                }
                for number in range(size)
            ]
            file = f"{subject}/{split}-00000-of-00001.parquet"
            Dataset.from_list(rows, features=FEATURES).to_parquet(folder / file)
            lines += [f"  - split: {split}", f"    path: {subject}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
    return data
