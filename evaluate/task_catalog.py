"""lm-eval's tasks by name: do they exist, is all they need there, and loading them.

`check_task` answers before any server starts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind

from qkit.errors import InputError, nearest
from qkit.evaluate.conventions import EXTRAS, FEWSHOT
from qkit.evaluate.quiet import quiet_lm_eval
from qkit.evaluate.task_data import (
    OFFLINE_TASKS,
    HubDataset,
    hub_dataset,
    is_at_hand,
    local_copy,
    no_hub,
    parquet_copy,
    require_data,
    why_not_loaded,
)
from qkit.suites import AccuracySuite

#: Tasks of qkit's own; none needs a download.
TASKS_DIR = Path(__file__).resolve().parent / "tasks"
LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent


def num_fewshot(suite: AccuracySuite) -> int | None:
    """Return the few-shot count a suite runs with; None is the task's own."""
    if suite.num_fewshot is not None:
        return suite.num_fewshot
    convention = FEWSHOT.get(suite.task)
    return None if convention is None else convention.count


def check_task(suite: AccuracySuite, *, data: Path | None) -> None:
    """Check that a task exists, and that its code and its data can be had.

    Args:
        suite: What is to be run.
        data: Folder that holds hub data sets in their own layout.

    Raises:
        InputError: There is no such task, it has no score of its own, it needs packages that are
            not installed, it takes no few-shot examples, `data` is not a folder, or the copy in
            it is not whole.
        HubUnreachableError: A data set is neither local nor cached, and the hub does not answer or
            does not have it.
    """
    if data is not None and not data.is_dir():
        raise InputError(
            "the data folder does not exist", where=data, fix="give an existing folder"
        )
    manager = _manager_of(suite.task, suite.task_dir)
    _require_score(manager, suite.task)
    _require_code(manager, suite.task)
    _require_fewshot(manager, suite)
    require_data(suite.task, hub_datasets(manager, suite.task), data)


@dataclass(frozen=True)
class LoadedTask:
    """A suite's task with its documents.

    Attributes:
        roots: lm-eval's `tasks` argument: the task, or the group that holds the tasks.
        leaves: Every task by name.
        manager: lm-eval's `task_manager` argument; without one it reads all of its tasks again.
    """

    roots: list[Any]
    leaves: dict[str, Any]
    manager: TaskManager


def load_task(suite: AccuracySuite, *, data: Path | None) -> LoadedTask:
    """Load a suite's task or group with its documents.

    Data sets found under `data` are read from there; nothing is fetched that is local or cached.

    Raises:
        InputError: There is no such task, a local data set cannot be read, or the task has no
            questions.
        HubUnreachableError: A data set could not be loaded from the hub.
    """
    manager = _manager_of(suite.task, suite.task_dir)
    _require_score(manager, suite.task)
    _require_code(manager, suite.task)
    needed = hub_datasets(manager, suite.task)
    offline = all(is_at_hand(dataset, data) for dataset in needed)
    manager._factory = LocalDataFactory(data)
    try:
        with quiet_lm_eval(), no_hub() if offline else contextlib.nullcontext():
            loaded = manager.load([suite.task])
    except Exception as error:
        raise why_not_loaded(suite.task, needed, data, error) from error
    group = loaded["groups"].get(suite.task)
    roots = [group] if group is not None else list(loaded["tasks"].values())
    leaves = dict(loaded["tasks"])
    _require_questions(leaves, data)
    return LoadedTask(roots, leaves, manager)


class LocalDataFactory(TaskFactory):  # type: ignore[misc]
    """Builds lm-eval's tasks with hub data sets replaced by local copies where there are any."""

    def __init__(self, data: Path | None) -> None:
        super().__init__()
        self._data = data

    def _load_full_config(
        self, entry: Entry, overrides: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        config: dict[str, Any] = super()._load_full_config(entry, overrides)
        path = config.get("dataset_path")
        local = local_copy(path, self._data) if isinstance(path, str) else None
        if local is not None:
            config["dataset_path"] = str(local.resolve())
            if (files := parquet_copy(local, config.get("dataset_name"))) is not None:
                config |= {
                    "dataset_path": "parquet",
                    "dataset_name": None,
                    "dataset_kwargs": {"data_files": files},
                }
        return config


def hub_datasets(manager: TaskManager, name: str) -> dict[HubDataset, set[str]]:
    """Return the hub data sets a task, or any task of a group, reads, and the splits it asks."""
    found: dict[HubDataset, set[str]] = {}
    for config in _leaf_configs(manager, name):
        dataset = hub_dataset(config)
        if dataset is not None:
            split = config.get("test_split") or config.get("validation_split")
            found.setdefault(dataset, set()).update([split] if isinstance(split, str) else [])
    return found


def _leaves(manager: TaskManager, name: str) -> Iterator[Entry]:
    """Yield the index entries of a task or of all tasks below a group or tag."""
    entry = manager.task_index.get(name)
    if entry is None:
        return
    if entry.kind is Kind.TAG:
        members = sorted(entry.tags)
    elif entry.kind is Kind.GROUP:
        listed = entry.cfg.get("task") or ()
        members = [m if isinstance(m, str) else m.get("group") or m.get("task") for m in listed]
    else:
        yield entry
        return
    for member in members:
        yield from _leaves(manager, member)


def _leaf_configs(manager: TaskManager, name: str) -> Iterator[dict[str, Any]]:
    """Yield the configurations of a task or of all tasks below a group or tag."""
    entry = manager.task_index.get(name)
    if entry is None:
        return
    if entry.kind is Kind.TAG:
        for member in sorted(entry.tags):
            yield from _leaf_configs(manager, member)
    elif entry.kind is Kind.GROUP:
        for member in entry.cfg.get("task") or ():
            if isinstance(member, str):
                yield from _leaf_configs(manager, member)
            elif (child := member.get("group") or member.get("task")) in manager.task_index:
                yield from ({**config, **member} for config in _leaf_configs(manager, child))
            else:
                yield member
    else:
        yield entry.cfg or {}


# ---------------------------------------------------------------------------------- finding tasks


def _manager_of(name: str, task_dir: str | None = None) -> TaskManager:
    """Return a task index that knows a task.

    Args:
        name: Task, group or tag.
        task_dir: Folder of task files that goes before qkit's and lm-eval's own.

    Raises:
        InputError: No task, group or tag has this name, or the folder does not exist.
    """
    if task_dir is not None:
        return _manager_in(Path(task_dir), name)
    own = _manager((TASKS_DIR,))
    if name in own.task_index:
        return own
    # Reading all of lm-eval's 14,000 tasks takes ten seconds; the folder that is named like the
    # task nearly always has everything it needs.
    words = name.split("_")
    for count in range(len(words), 0, -1):
        folder = LM_EVAL_TASKS / "_".join(words[:count])
        if folder.is_dir():
            manager = _manager((folder,))
            if name in manager.task_index and _is_whole(manager, name):
                return manager
    everything = _manager((LM_EVAL_TASKS, TASKS_DIR))
    if name not in everything.task_index:
        raise InputError(
            f"there is no task {name!r}{nearest(name, everything.all_tasks)}",
            fix="`lm-eval ls tasks` lists lm-eval's tasks; these need no download: "
            + ", ".join(OFFLINE_TASKS),
        )
    return everything


def _manager_in(folder: Path, name: str) -> TaskManager:
    """Return the task index of a person's own folder, which may lean on lm-eval's tasks."""
    if not folder.is_dir():
        raise InputError("the folder of tasks does not exist", where=folder, fix="check `task_dir`")
    manager = _manager((folder.resolve(),))
    if name in manager.task_index and _is_whole(manager, name):
        return manager
    everything = _manager((LM_EVAL_TASKS, TASKS_DIR, folder.resolve()))
    if name not in manager.task_index:
        known = list(manager.task_index)
        raise InputError(
            f"there is no task {name!r} in this folder{nearest(name, known)}",
            where=folder,
            fix=f"its tasks are: {', '.join(known) or 'none, it has no task files'}",
        )
    return everything


@functools.cache
def _manager(folders: tuple[Path, ...]) -> TaskManager:
    with quiet_lm_eval():
        return TaskManager(include_path=list(folders), include_defaults=False)


def _is_whole(manager: TaskManager, name: str) -> bool:
    """Whether every member of a group is in the index too."""
    entry = manager.task_index.get(name)
    if entry is None:
        return False
    if entry.kind is not Kind.GROUP:
        return True
    members = entry.cfg.get("task") or ()
    return all(isinstance(member, str) and _is_whole(manager, member) for member in members)


def _require_score(manager: TaskManager, name: str) -> None:
    """Refuse names that stand for several tasks without a common score."""
    entry = manager.task_index[name]
    if entry.kind is Kind.TAG:
        members = sorted(entry.tags)
    elif entry.kind is Kind.GROUP and not entry.cfg.get("aggregate_metric_list"):
        members = [str(m if isinstance(m, str) else m.get("task")) for m in entry.cfg["task"]]
    else:
        return
    shown = ", ".join(members[:8]) + (" ..." if len(members) > 8 else "")
    raise InputError(
        f"{name!r} stands for several tasks and has no score of its own",
        fix=f"name the tasks instead: {shown}",
    )


# ------------------------------------------------------------------------------ what a task needs


def _require_code(manager: TaskManager, name: str) -> None:
    """Refuse a task whose code does not import, or would fetch something while it is imported."""
    for entry in _leaves(manager, name):
        folders = entry.yaml_path.parts if entry.yaml_path else ()
        for extra in (EXTRAS[folder] for folder in folders if folder in EXTRAS):
            missing = [m for m in extra.modules if importlib.util.find_spec(m) is None]
            if missing:
                raise _not_installed(name, missing, extra.name)
            if extra.nltk_data and not _has_nltk_data(extra.nltk_data):
                resource = extra.nltk_data.rpartition("/")[2]
                raise InputError(
                    f"the task {name!r} needs NLTK's data {resource!r}, which is not installed",
                    fix=f"run `{sys.executable} -m nltk.downloader {resource}` (on a machine with "
                    "a network; then copy ~/nltk_data, or set NLTK_DATA to the folder)",
                )
        try:
            with quiet_lm_eval():
                manager._factory._load_full_config(entry)
        except ModuleNotFoundError as error:
            raise _not_installed(name, [error.name or str(error)], None) from error
        except Exception as error:
            raise InputError(
                f"the task {name!r} cannot be read",
                where=entry.yaml_path,
                detail=f"{type(error).__name__}: {error}",
                fix="correct the task's file or the code it names",
            ) from error


def _not_installed(name: str, modules: list[str], extra: str | None) -> InputError:
    version = importlib.metadata.version("lm_eval")
    what = f"'lm_eval[{extra}]=={version}'" if extra else " ".join(modules)
    return InputError(
        f"the task {name!r} needs packages that are not installed: {', '.join(modules)}",
        fix=f"run `{sys.executable} -m uv pip install --python {sys.executable} {what}`",
    )


def _has_nltk_data(resource: str) -> bool:
    import nltk  # noqa: PLC0415  # takes a second

    try:
        nltk.data.find(resource)
    except LookupError:
        return False
    return True


def _require_fewshot(manager: TaskManager, suite: AccuracySuite) -> None:
    """Refuse examples where lm-eval would leave them out without a word."""
    if not suite.num_fewshot:
        return
    fixed = [
        str(config.get("task"))
        for config in _leaf_configs(manager, suite.task)
        if config.get("num_fewshot") == 0
    ]
    if fixed:
        raise InputError(
            f"the task {suite.task!r} takes no few-shot examples, and {suite.num_fewshot} are "
            "asked for",
            fix=f"leave `num_fewshot` out: {', '.join(fixed[:3])} is 0-shot by definition",
        )


def _require_questions(leaves: dict[str, Any], data: Path | None) -> None:
    """Refuse a task without questions, which lm-eval would trip over at the end."""
    empty = [name for name, task in leaves.items() if not len(task.eval_docs)]
    if empty:
        raise InputError(
            f"the task {empty[0]!r} has no questions",
            where=data,
            fix="check the data set's files, or leave the task out",
        )
