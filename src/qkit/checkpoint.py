"""Where a model's checkpoint folder is: a local one, or the hub's, downloaded once."""

from __future__ import annotations

import os
from pathlib import Path

from qkit.errors import HubUnreachableError, InputError

#: What a checkpoint needs; `.bin` weights are left out, qkit reads safetensors only.
PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.py")


def resolve_model(model: str, *, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, downloading it from the hub if it is not local.

    Args:
        model: Folder, or the hub's name "owner/name".
        revision: Branch, tag or commit on the hub.

    Raises:
        InputError: It is neither a folder nor a hub name, or the hub does not have it.
        HubUnreachableError: It is not in the local cache and the hub does not answer.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise InputError(
            f"there is no checkpoint folder {model!r}",
            fix="give a folder with config.json and *.safetensors, or a hub name "
            "such as Qwen/Qwen2.5-7B-Instruct",
        )
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (slow to import)
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=list(PATTERNS))
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise InputError(
            f"the hub has no model {model!r}" + (f" at {revision!r}" if revision else ""),
            detail=str(error).splitlines()[0],
            fix="check the name; for a private or gated model set HF_TOKEN",
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        raise HubUnreachableError(
            f"model {model!r} is not on this machine and the hub "
            + ("is switched off (HF_HUB_OFFLINE)" if offline else "cannot be reached"),
            detail=str(error).splitlines()[0] if str(error) else None,
            fix=f"on a connected machine run `hf download {model} --local-dir DIR`, copy DIR here "
            "and give it as the model; `qkit run demo` needs no hub",
        ) from None
    return Path(folder)
