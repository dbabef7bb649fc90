"""Model folders that are made once and kept: each appears under its final name only when it is whole.

Made in a temporary folder beside it and renamed. A marker inside says what it was made from and how: a folder whose
marker is another one is made anew. A file lock lets parallel runs wait for one making.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from headrace.models.error import ModelError

CACHE_ENV = "HEADRACE_CACHE"
MARKER = "headrace.json"

CONVERSION = 1
"""Raised whenever what :mod:`headrace.models.convert` writes changes: a folder of another number is made anew."""

Progress = Callable[[str], None]
Marker = Mapping[str, object]


def cache_root() -> Path:
    """``$HEADRACE_CACHE``, else ``headrace`` in the user's cache folder."""
    given = os.environ.get(CACHE_ENV)
    if given:
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def is_made(path: Path, marker: Marker) -> bool:
    """True if ``path`` is there, whole, and was made as ``marker`` says."""
    try:
        found = json.loads((path / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == marker)


def made_once(path: Path, marker: Marker, make: Callable[[Path], Path], progress: Progress) -> Path:
    """``path``, which ``make(work)`` fills unless that has been done: it returns the folder that it made in ``work``.

    Raises :class:`ModelError` if the cache cannot be written; whatever ``make`` raises leaves nothing behind.
    """
    if is_made(path, marker):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock"), progress):
            if not is_made(path, marker):
                _make(path, marker, make)
    except OSError as error:
        raise ModelError(f"cannot write the model cache {path.parent}: {error.strerror or error}") from None
    return path


def megabytes(folder: Path) -> int:
    return round(sum(file.stat().st_size for file in folder.iterdir()) / 1e6)


def _make(path: Path, marker: Marker, make: Callable[[Path], Path]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as work:
        folder = make(Path(work))
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", "utf-8")
        if path.exists():  # made otherwise, or somebody's leftover without a marker
            path.rename(Path(work) / "replaced")
        folder.chmod(0o755)
        folder.rename(path)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is fetching the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
