"""Local copies of hub data sets, in their own layouts, with a few made-up rows."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

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


def write_copy(
    data: Path, path: str, config: str | None, splits: Mapping[str, Rows[Mapping[str, Any]]]
) -> Path:
    """Write DATA/PATH as `hf download` leaves it: a README that lists the files of each split."""
    folder = data / path
    inside = config or "data"
    (folder / inside).mkdir(parents=True, exist_ok=True)
    lines = ["---", "configs:", f"- config_name: {config or 'default'}", "  data_files:"]
    for split, rows in splits.items():
        file = f"{inside}/{split}-00000-of-00001.parquet"
        Dataset.from_list([dict(row) for row in rows]).to_parquet(folder / file)
        lines += [f"  - split: {split}", f"    path: {inside}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
    return data
