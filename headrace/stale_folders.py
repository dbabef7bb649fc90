"""Private temporary folders that outlive nobody: each is locked by the process that made it for as long as it lives.

A process that is killed leaves its folder behind. Whoever starts next deletes it: it is ours, private and unlocked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

YOUNG_S = 5.0
"""Between making a folder and locking it is a moment: one that is so young is left alone."""


class PrivateFolder:
    """A folder that only its owner can enter, deleted by :meth:`close`, or by another process once this one is dead."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))  # mode 0700
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def delete_stale(prefix: str) -> list[Path]:
    """Delete the folders of this prefix whose owners are dead; returns them."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{prefix}*") if _delete(path)]


def _delete(path: Path) -> bool:
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # somebody else's, or gone meanwhile
        return False
    try:
        found = os.fstat(held)
        private = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
        if not private or time.time() - found.st_mtime < YOUNG_S:
            return False
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
            return True
    except OSError:  # locked: its owner lives
        pass
    finally:
        os.close(held)
    return False
