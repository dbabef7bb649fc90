"""The private folder of this user's sockets, where a running ``headrace up`` is found by its gateway's port."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

CONTROL = ".control"
NOTIFY = ".notify"
_LONGEST_PATH = 107  # bytes (unix(7))
_LONGEST_NAME = len(f"/65535{CONTROL}")


def candidates(environ: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Where it may be, best first: a shell may know other variables than the one that ``up`` was started from."""
    environ = os.environ if environ is None else environ
    user = os.geteuid()
    seen: set[Path] = set()
    for folder in (
        Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}") / "headrace",
        Path(f"/run/user/{user}") / "headrace",
        Path(tempfile.gettempdir()) / f"headrace-{user}",
        Path("/tmp") / f"headrace-{user}",
    ):
        if folder not in seen and len(os.fsencode(folder)) + _LONGEST_NAME <= _LONGEST_PATH:
            seen.add(folder)
            yield folder


def runtime_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The first that can be had, made if need be. Raises OSError."""
    for folder in candidates(environ):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
        if _is_private(folder):
            return folder
    raise OSError("no private folder for its sockets can be made")


def control_socket(folder: Path, port: int) -> Path:
    return folder / f"{port}{CONTROL}"


def running(environ: Mapping[str, str] | None = None) -> dict[int, Path]:
    """The control sockets of meshes that run, by gateway port; those of dead ones are deleted."""
    found: dict[int, Path] = {}
    for folder in candidates(environ):
        if not _is_private(folder):
            continue
        for path in folder.glob(f"*{CONTROL}"):
            if path.name.removesuffix(CONTROL).isdecimal() and not removed_if_stale(path):
                found.setdefault(int(path.name.removesuffix(CONTROL)), path)
    return found


def removed_if_stale(path: Path) -> bool:
    """True if nobody listens at ``path``, which is free then; its owner was killed."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return True
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            path.with_suffix(NOTIFY).unlink(missing_ok=True)
            return True
        except OSError:
            pass
    return False


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
