"""Hub data sets that tasks read: are they at hand, and what to do where they are not.

They are looked for in the folder given with `--data` (in their own layout: DIR/cais/mmlu/...), then
in the local cache, then on the hub.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkit.errors import HubUnreachableError, InputError, QkitError

#: Tasks of qkit's own; none needs a download.
OFFLINE_TASKS = ("mmlu_dev", "demo_facts")
#: Seconds the hub has to answer whether it holds a data set.
HUB_TIMEOUT_S = 5.0
#: Builders of `datasets` that read local files instead of a hub data set.
FILE_BUILDERS = frozenset({"json", "csv", "parquet", "text", "arrow", "imagefolder", "webdataset"})
#: Where the hub keeps its own Parquet copy of every data set, also of those made by a script.
PARQUET_REVISION = "refs/convert/parquet"
_SCRIPT = re.compile(r"scripts? (?:is|are) no longer supported", re.IGNORECASE)
_NO_DATA = re.compile(r"corresponds to no data")
#: Missing data sets that are listed one by one.
SHOWN = 8


@dataclass(frozen=True, order=True)
class HubDataset:
    """A data set on the hub that a task reads; `config` is None for its only configuration."""

    path: str
    config: str | None


def hub_dataset(config: Mapping[str, Any]) -> HubDataset | None:
    """Return the hub data set a task's configuration names; None where it reads other files."""
    path = config.get("dataset_path")
    if (
        not isinstance(path, str)
        or config.get("custom_dataset")
        or path in FILE_BUILDERS
        or Path(path).exists()
    ):
        return None
    return HubDataset(path, config.get("dataset_name"))


def local_copy(path: str, data: Path | None) -> Path | None:
    """Return the folder of a data set's local copy, or None where there is none."""
    folder = data / path if data is not None else None
    return folder if folder is not None and folder.is_dir() and any(folder.iterdir()) else None


def parquet_copy(folder: Path, config: str | None) -> dict[str, str] | None:
    """Return the files by split of a local copy in the layout of the hub's own Parquet copies.

    CONFIG/SPLIT/0000.parquet, without a README that lists configurations, so that `datasets` does
    not find them by itself. None where the folder has another layout.
    """
    if (folder / "README.md").exists():
        return None
    splits = sorted(path for path in (folder / (config or "default")).glob("*") if path.is_dir())
    found = {
        split.name: str(split / "*.parquet") for split in splits if any(split.glob("*.parquet"))
    }
    return found or None


def is_at_hand(dataset: HubDataset, data: Path | None) -> bool:
    """Whether a data set is there without asking the hub."""
    return local_copy(dataset.path, data) is not None or _is_cached(dataset)


def require_data(task: str, needed: Mapping[HubDataset, set[str]], data: Path | None) -> None:
    """Check that a task's data sets can be had: local ones whole, the others cached or on the hub.

    Args:
        task: The task, for messages.
        needed: Data sets, and the splits that are asked of each.
        data: Folder of local copies.

    Raises:
        InputError: A local copy lacks a configuration or split, or is a loading script.
        HubUnreachableError: Data sets are neither local nor cached, and the hub does not have them
            or does not answer; all of them are named.
    """
    missing: dict[HubDataset, str] = {}
    looked_into: set[str] = set()
    for dataset in sorted(needed, key=str):
        if (folder := local_copy(dataset.path, data)) is not None:
            # Of 57 configurations of one data set, the first stands for the others' splits.
            if dataset.path not in looked_into or dataset.config not in _configurations(folder):
                _require_whole(task, dataset, needed[dataset], folder)
            looked_into.add(dataset.path)
        elif not _is_cached(dataset) and (reason := _why_not_on_hub(dataset.path)) is not None:
            missing[dataset] = reason
    if missing:
        raise _missing(task, missing, data)


@functools.cache
def _configurations(folder: Path) -> frozenset[str | None]:
    """Return the configurations of a local copy that `datasets` can read."""
    import datasets  # noqa: PLC0415  # takes seconds

    try:
        with no_hub():
            return frozenset(datasets.get_dataset_config_names(str(folder)))
    except Exception:  # looked into one by one, each problem is named
        return frozenset()


def _require_whole(task: str, dataset: HubDataset, splits: set[str], folder: Path) -> None:
    """Refuse a local copy that `datasets` cannot read this configuration and these splits from."""
    import datasets  # noqa: PLC0415  # takes seconds

    files: Iterable[Any] | None = parquet_copy(folder, dataset.config)
    if files is None:
        try:
            with no_hub():
                builder = datasets.load_dataset_builder(str(folder), dataset.config)
        except Exception as error:
            raise _unreadable(task, dataset, folder, error) from error
        files = builder.config.data_files
    if files is None:
        return
    lacking = sorted(
        {split.partition("[")[0] for split in splits} - {str(split) for split in files}
    )
    if lacking:
        raise InputError(
            f"the local copy of {_title(dataset)} lacks the split {lacking[0]!r}, which the task "
            f"{task!r} asks",
            where=folder,
            detail=f"it has: {', '.join(map(str, files)) or 'no split'}",
            fix=f"fetch it whole: `{_download(dataset.path, folder)}`",
        )


def why_not_loaded(
    task: str, needed: Mapping[HubDataset, set[str]], data: Path | None, error: Exception
) -> QkitError:
    """Return what to tell the person about a task that does not load."""
    from datasets.exceptions import DatasetNotFoundError  # noqa: PLC0415  # takes seconds

    if needed and _SCRIPT.search(str(error)):
        named = (d for d in needed if f"{d.path.rpartition('/')[2]}.py" in str(error))
        script = next(named, min(needed, key=str))
        return _unreadable(task, script, (data or Path("DIR")) / script.path, error)
    if _NO_DATA.search(str(error)):
        return InputError(
            f"the task {task!r} has no questions",
            where=data,
            detail=str(error),
            fix="check the data set's files, or leave the task out",
        )
    missing = [d for d in sorted(needed, key=str) if local_copy(d.path, data) is None]
    if (
        missing
        and not all(map(_is_cached, missing))
        and isinstance(error, (OSError, DatasetNotFoundError))
    ):
        return _missing(task, {missing[0]: str(error)}, data)
    return InputError(
        f"the task {task!r} does not load",
        where=data,
        detail=f"{type(error).__name__}: {error}",
        fix="check the data set's folder, or fetch it again in its own layout",
    )


def _unreadable(task: str, dataset: HubDataset, folder: Path, error: Exception) -> InputError:
    if _SCRIPT.search(str(error)):
        return InputError(
            f"{dataset.path}, which the task {task!r} reads, is a loading script, and `datasets` "
            "no longer runs those",
            where=folder,
            detail=str(error),
            fix="fetch the hub's Parquet copy into an empty folder instead: "
            f"`{_download(dataset.path, folder, PARQUET_REVISION)}`, and pass `--data`",
        )
    return InputError(
        f"the task {task!r} does not load: the local copy of {_title(dataset)} cannot be read",
        where=folder,
        detail=f"{type(error).__name__}: {error}",
        fix=f"fetch it again in its own layout: `{_download(dataset.path, folder)}`",
    )


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
        info = HfApi().dataset_info(path, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        return "the hub has no such data set, or not for you"
    except Exception as error:  # whatever it is, the data cannot be had
        return f"{constants.ENDPOINT} is not reachable ({type(error).__name__})"
    script = f"{path.rpartition('/')[2]}.py"
    if any(file.rfilename == script for file in info.siblings or ()):
        return f"dataset scripts are no longer supported, but it is made by {script}"
    return None


def _missing(
    task: str, missing: Mapping[HubDataset, str], data: Path | None
) -> HubUnreachableError:
    """Name every data set that is missing and the command that fetches it."""
    elsewhere = f", it is not in {data}" if data is not None else ""
    folder = data if data is not None else Path("DIR")
    paths = {dataset.path: reason for dataset, reason in missing.items()}
    first, *others = missing
    more = f" and {len(others)} more" if others else ""
    commands = " and ".join(
        f"`{_download(path, folder / path, PARQUET_REVISION if _SCRIPT.search(reason) else None)}`"
        for path, reason in list(paths.items())[:SHOWN]
    )
    return HubUnreachableError(
        f"the task {task!r} needs the data set {_title(first)}{more}: it is not in the "
        f"local cache{elsewhere}, and the hub cannot give it",
        detail=missing[first],
        fix=f"where there is a network, run {commands} and pass `--data {folder}`; the tasks "
        f"{' and '.join(OFFLINE_TASKS)} need no download",
    )


def _title(dataset: HubDataset) -> str:
    return dataset.path + (f" (configuration {dataset.config})" if dataset.config else "")


def _download(path: str, folder: Path, revision: str | None = None) -> str:
    chosen = f" --revision {revision}" if revision else ""
    return f"hf download --repo-type dataset {path}{chosen} --local-dir {folder}"


@contextlib.contextmanager
def no_hub() -> Iterator[None]:
    """Keep `datasets` from asking the hub about data that is already here."""
    from datasets import config  # noqa: PLC0415  # takes seconds

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
