"""Where qkit keeps what can be made again: environments and file digests."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: `$QKIT_CACHE`, else `$XDG_CACHE_HOME/qkit`, else `~/.cache/qkit`."""
    if own := os.environ.get("QKIT_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qkit"
