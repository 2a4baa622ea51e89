"""lm-eval's tasks by name: do they exist, is their data there, and loading them.

`check_task` answers before any server starts. Hub data sets are looked for in the folder given
with `--data` (in their own layout: DIR/cais/mmlu/...), then in the local cache, then on the hub.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind

from qkit.errors import HubUnreachableError, InputError, nearest
from qkit.evaluate.quiet import quiet_lm_eval
from qkit.suites import AccuracySuite

#: Tasks of qkit's own; none needs a download.
TASKS_DIR = Path(__file__).resolve().parent / "tasks"
OFFLINE_TASKS = ("mmlu_dev", "demo_facts")
LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
#: Few-shot counts by convention, where the task itself does not say.
CONVENTIONAL_FEWSHOT = {
    "mmlu": 5,
    "mmlu_stem": 5,
    "mmlu_humanities": 5,
    "mmlu_social_sciences": 5,
    "mmlu_other": 5,
}
#: Seconds the hub has to answer whether it holds a data set.
HUB_TIMEOUT_S = 5.0
#: Builders of `datasets` that read local files instead of a hub data set.
FILE_BUILDERS = frozenset({"json", "csv", "parquet", "text", "arrow", "imagefolder", "webdataset"})


@dataclass(frozen=True, order=True)
class HubDataset:
    """A data set on the hub that a task reads; `config` is None for its only configuration."""

    path: str
    config: str | None


def num_fewshot(suite: AccuracySuite) -> int | None:
    """Return the few-shot count a suite runs with; None is the task's own."""
    if suite.num_fewshot is not None:
        return suite.num_fewshot
    return CONVENTIONAL_FEWSHOT.get(suite.task)


def check_task(suite: AccuracySuite, *, data: Path | None) -> None:
    """Check that a task exists and that its data can be had.

    Args:
        suite: What is to be run.
        data: Folder that holds hub data sets in their own layout.

    Raises:
        InputError: There is no such task, it has no score of its own, or `data` is not a folder.
        HubUnreachableError: A data set is neither local nor cached, and the hub does not answer or
            does not have it.
    """
    if data is not None and not data.is_dir():
        raise InputError(
            "the data folder does not exist", where=data, fix="give an existing folder"
        )
    manager = _manager_of(suite.task)
    _require_score(manager, suite.task)
    for dataset in sorted(hub_datasets(manager, suite.task), key=str):
        if _is_local(dataset, data) or _is_cached(dataset):
            continue
        if (reason := _why_not_on_hub(dataset.path)) is not None:
            raise _missing(suite.task, dataset, data, reason)


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
        InputError: There is no such task, or a local data set cannot be read.
        HubUnreachableError: A data set could not be loaded from the hub.
    """
    manager = _manager_of(suite.task)
    _require_score(manager, suite.task)
    needed = hub_datasets(manager, suite.task)
    offline = all(_is_local(dataset, data) or _is_cached(dataset) for dataset in needed)
    manager._factory = LocalDataFactory(data)
    try:
        with quiet_lm_eval(), _no_hub() if offline else contextlib.nullcontext():
            loaded = manager.load([suite.task])
    except Exception as error:
        missing = [d for d in sorted(needed, key=str) if not _is_local(d, data)]
        if missing and not offline and _is_hub_trouble(error):
            raise _missing(suite.task, missing[0], data, str(error)) from error
        raise InputError(
            f"the task {suite.task!r} does not load",
            where=data,
            detail=f"{type(error).__name__}: {error}",
            fix="check the data set's folder, or fetch it again in its own layout",
        ) from error
    group = loaded["groups"].get(suite.task)
    roots = [group] if group is not None else list(loaded["tasks"].values())
    return LoadedTask(roots, dict(loaded["tasks"]), manager)


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
        if self._data is not None and isinstance(path, str):
            local = self._data / path
            if local.is_dir():
                config["dataset_path"] = str(local.resolve())
        return config


def hub_datasets(manager: TaskManager, name: str) -> set[HubDataset]:
    """Return the hub data sets that a task, or any task of a group, reads."""
    found = set()
    for config in _leaf_configs(manager, name):
        path = config.get("dataset_path")
        if (
            isinstance(path, str)
            and not config.get("custom_dataset")
            and path not in FILE_BUILDERS
            and not Path(path).exists()
        ):
            found.add(HubDataset(path, config.get("dataset_name")))
    return found


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


def _manager_of(name: str) -> TaskManager:
    """Return a task index that knows a task.

    Raises:
        InputError: No task, group or tag has this name.
    """
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


# ----------------------------------------------------------------------------------- finding data


def _is_local(dataset: HubDataset, data: Path | None) -> bool:
    folder = data / dataset.path if data is not None else None
    return folder is not None and folder.is_dir() and any(folder.iterdir())


def _is_cached(dataset: HubDataset) -> bool:
    """Whether `datasets` has this configuration in its cache, where it finds it without the hub."""
    from datasets import config  # noqa: PLC0415  # takes seconds
    from datasets.naming import camelcase_to_snakecase  # noqa: PLC0415

    *namespace, name = dataset.path.split("/")
    root = Path(config.HF_DATASETS_CACHE) / "___".join([*namespace, camelcase_to_snakecase(name)])
    return any(root.glob(f"{dataset.config or '*'}/*/*/dataset_info.json"))


@functools.cache
def _why_not_on_hub(path: str) -> str | None:
    """Return why a data set cannot be fetched from the hub, or None if it can."""
    from huggingface_hub import HfApi, constants  # noqa: PLC0415  # takes seconds
    from huggingface_hub.errors import RepositoryNotFoundError  # noqa: PLC0415

    if constants.is_offline_mode():
        return "offline mode is on (HF_HUB_OFFLINE)"
    try:
        HfApi().dataset_info(path, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        return "the hub has no such data set, or not for you"
    except Exception as error:  # whatever it is, the data cannot be had
        return f"{constants.ENDPOINT} is not reachable ({type(error).__name__})"
    return None


def _is_hub_trouble(error: Exception) -> bool:
    from datasets.exceptions import DatasetNotFoundError  # noqa: PLC0415

    return isinstance(error, (OSError, DatasetNotFoundError))


def _missing(task: str, dataset: HubDataset, data: Path | None, reason: str) -> HubUnreachableError:
    configuration = f" (configuration {dataset.config})" if dataset.config else ""
    elsewhere = f", it is not in {data}" if data is not None else ""
    folder = data if data is not None else "DIR"
    return HubUnreachableError(
        f"the task {task!r} needs the data set {dataset.path}{configuration}: it is not in the "
        f"local cache{elsewhere}, and the hub cannot give it",
        detail=reason,
        fix=f"where there is a network, run `hf download --repo-type dataset {dataset.path} "
        f"--local-dir {folder}/{dataset.path}` and pass `--data {folder}`; the tasks "
        f"{' and '.join(OFFLINE_TASKS)} need no download",
    )


@contextlib.contextmanager
def _no_hub() -> Iterator[None]:
    """Keep `datasets` from asking the hub about data that is already here."""
    from datasets import config  # noqa: PLC0415  # takes seconds

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
