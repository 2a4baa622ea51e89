#!/usr/bin/env python3
"""Make evaluate/texts/fidelity.jsonl, the bundled text of the fidelity suite, and its NOTICE.

    .venv/bin/python scripts/make_fidelity_text.py --pypinyin ./pypinyin-0.55.0

The text is committed: what is measured on it stays comparable only while it does not change. Run
this script with CPython 3.11.7, lm-eval 0.4.13 and the unpacked source archive of pypinyin 0.55.0
(from PyPI) to get the same bytes again. All three licences allow copying with their notice.
"""

from __future__ import annotations

import argparse
import hashlib
import http
import inspect
import json
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import yaml

from qkit.evaluate.tasks.mmlu_dev import SOURCE

OUT = Path(__file__).resolve().parent.parent / "evaluate" / "texts"
#: Characters after which a document ends, at the next end of a paragraph.
MOST = 10_000
LEAST = 2_500
SECTIONS = """
specialnames compound types formatstrings string-methods typesseq debugger attribute-access
customization assignment comparisons execmodel import operator-summary calls function naming
numeric-types identifiers objects async raise
""".split()
MODULES = """
heapq bisect textwrap statistics fractions json.decoder shlex graphlib sched
difflib ipaddress
""".split()
CHINESE_PARTS = 4
QUESTION_PARTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pypinyin", type=Path, required=True, help="unpacked source archive")
    arguments = parser.parse_args()
    documents = list(_documents(arguments.pypinyin))
    OUT.mkdir(exist_ok=True)
    lines = "".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in documents)
    (OUT / "fidelity.jsonl").write_text(lines, encoding="utf-8")
    (OUT / "NOTICE.txt").write_text(_notice(arguments.pypinyin), encoding="utf-8")
    size, digest = len(lines.encode()), hashlib.sha256(lines.encode()).hexdigest()
    print(f"{len(documents)} documents, {size:,} bytes, SHA-256 {digest}")


def _documents(pypinyin: Path) -> Iterator[dict[str, str]]:
    """Yield the documents; domains take turns, so that the first few are of every kind."""
    domains = {
        "reference": list(_reference()),
        "questions": list(_questions()),
        "code": list(_code()),
        "chinese": list(_chinese(pypinyin)),
        "table": list(_tables()),
    }
    while any(domains.values()):
        for domain, waiting in domains.items():
            if waiting:
                name, text = waiting.pop(0)
                yield {"id": f"{domain}/{name}", "domain": domain, "text": text}


def _reference() -> Iterator[tuple[str, str]]:
    for name in SECTIONS:
        yield name, _cut(topics[name])


def _code() -> Iterator[tuple[str, str]]:
    for name in MODULES:
        yield name, _cut(inspect.getsource(import_module(name)))


def _questions() -> Iterator[tuple[str, str]]:
    subjects: list[str] = []
    for path in sorted(SOURCE.glob("mmlu_*.yaml")):
        config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        samples = config["fewshot_config"]["samples"]
        worked = (f"{s['question'].strip()}\n\n{s['target'].strip()}" for s in samples[:3])
        subjects.append(config["dataset_name"].replace("_", " ") + "\n\n" + "\n\n".join(worked))
    for part in range(QUESTION_PARTS):
        yield str(part), _cut("\n\n\n".join(subjects[part::QUESTION_PARTS]))


def _chinese(folder: Path) -> Iterator[tuple[str, str]]:
    yield "readme", _cut((folder / "README.rst").read_text(encoding="utf-8"), MOST // 2)
    rest = (folder / "CHANGELOG.rst").read_text(encoding="utf-8")
    for part in range(CHINESE_PARTS):
        text = _cut(rest, MOST // 2)
        rest = rest[len(text) :].lstrip()
        yield f"changelog-{part}", text


def _tables() -> Iterator[tuple[str, str]]:
    rows = [f"| {s.value} | {s.phrase} | {s.description or '-'} |" for s in http.HTTPStatus]
    yield "http", "\n".join(["| status | phrase | meaning |", "|---|---|---|", *rows]) + "\n"
    rows = [
        f"{n},{n**2},{n**3},{n**0.5:.4f},{hex(n)},{'yes' if _is_prime(n) else 'no'}"
        for n in range(1, 121)
    ]
    yield "numbers", "\n".join(["n,square,cube,root,hexadecimal,prime", *rows]) + "\n"
    calendar = import_module("calendar")
    yield "calendar", "\n".join(calendar.TextCalendar().formatmonth(2024, m) for m in range(1, 13))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _cut(text: str, most: int = MOST) -> str:
    """Return the beginning of a text, up to the last blank line within `most` characters."""
    if len(text) <= most:
        return text.rstrip() + "\n"
    end = text.rfind("\n\n", LEAST, most)
    return text[: end if end > 0 else most].rstrip() + "\n"


def _notice(pypinyin: Path) -> str:
    python_licence = Path(inspect.getsourcefile(inspect) or "").parent / "LICENSE.txt"
    lm_eval = metadata.distribution("lm_eval")
    (mit,) = (file for file in lm_eval.files or () if file.name == "LICENSE.md")
    version = ".".join(map(str, sys.version_info[:3]))
    parts = [
        "fidelity.jsonl is put together from parts of these works, shortened at ends of "
        "paragraphs and otherwise unchanged:",
        f"reference/*, code/*: the documentation and standard library of Python {version}, "
        "Copyright (c) 2001-2023 Python Software Foundation. Licence 1 below.",
        "questions/*: development questions of MMLU (Hendrycks et al., 2020) with worked answers, "
        f"as lm-eval {lm_eval.version} carries them. Licence 2 below.",
        "chinese/*: README and change log of pypinyin 0.55.0. Licence 3 below.",
        "table/*: made by scripts/make_fidelity_text.py; the phrases of the HTTP table are from "
        "Python's library. Licence 1 below.",
        "=" * 78 + "\n1. Python\n" + "=" * 78,
        python_licence.read_text(encoding="utf-8"),
        "=" * 78 + "\n2. lm-evaluation-harness\n" + "=" * 78,
        Path(str(lm_eval.locate_file(mit))).read_text(encoding="utf-8"),
        "=" * 78 + "\n3. pypinyin\n" + "=" * 78,
        (pypinyin / "LICENSE.txt").read_text(encoding="utf-8"),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    main()
