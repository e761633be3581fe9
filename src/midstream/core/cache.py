"""The folder for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache of midstream (XDG_CACHE_HOME, else ~/.cache); it may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midstream"
