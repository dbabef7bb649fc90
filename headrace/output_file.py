"""Files that a command will write at its end: whether they can be made is found out before the work."""

from __future__ import annotations

import os
from pathlib import Path

from shared.config import ConfigError


def check_writable(path: Path, flag: str) -> None:
    """Raise ConfigError, naming ``flag`` and the reason, unless a file can be written at ``path``.

    A file that is there keeps its content, and none is left where there was none. Pipes and devices are not touched.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        return
    existed = path.exists()
    try:
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None


def check_folder(path: Path, flag: str) -> None:
    """Make the folder ``path``, or raise ConfigError, naming ``flag``, unless files can be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: no right to write there")
