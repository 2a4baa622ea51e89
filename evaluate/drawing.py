"""Which documents of a task a limited suite asks: drawn evenly over subjects, with a seed.

The first N of a test set are often its easiest, or all of one subject. Every variant is asked the
same documents: the draw depends on the seed, the task's name and its size alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

#: Columns that divide the documents of one task into subjects.
SUBJECT_COLUMNS = ("subject", "category")


#: Numbers of the documents to ask, in order, by task; lm-eval's `samples`.
Documents = dict[str, list[int]]


def draw(subjects: Sequence[Any], limit: int, *, seed: str) -> list[int]:
    """Return indices of documents, in order: as many of each subject as there are of the others.

    Args:
        subjects: Each document's subject.
        limit: Documents to draw; all of them where there are no more.
        seed: Equal seeds draw equal documents.
    """
    if limit >= len(subjects):
        return list(range(len(subjects)))
    rng = random.Random(seed)
    by_subject: dict[Any, list[int]] = {}
    for index, subject in enumerate(subjects):
        by_subject.setdefault(subject, []).append(index)
    heaps = list(by_subject.values())
    for heap in heaps:
        rng.shuffle(heap)
    rng.shuffle(heaps)
    drawn: list[int] = []
    while len(drawn) < limit:
        for heap in heaps:
            if heap and len(drawn) < limit:
                drawn.append(heap.pop())
    return sorted(drawn)


def draw_documents(tasks: Mapping[str, Any], limit: int | None, seed: int) -> Documents | None:
    """Return the documents of each task to ask; None asks all.

    Args:
        tasks: lm-eval's tasks by name, loaded.
        limit: Documents per task; a group's subjects are tasks of their own.
        seed: Of the draw.
    """
    if limit is None:
        return None
    return {
        name: draw(_subjects(task.eval_docs), limit, seed=f"{seed}:{name}")
        for name, task in tasks.items()
    }


def _subjects(docs: Any) -> Sequence[Any]:
    columns = getattr(docs, "column_names", None)
    if columns is None:
        columns = list(docs[0]) if len(docs) and isinstance(docs[0], dict) else []
    for column in SUBJECT_COLUMNS:
        if column in columns:
            return [str(doc[column]) for doc in docs]
    return [None] * len(docs)
