"""Folders of processes that were killed go at the next start; those of the living, and of others, stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from headrace.stale_folders import YOUNG_S, PrivateFolder, delete_stale

PREFIX = "headrace-test-"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(path: Path) -> Path:
    then = time.time() - 2 * YOUNG_S
    os.utime(path, (then, then))
    return path


def killed(folder: Path) -> Path:
    """What a process that was killed has left."""
    program = (
        "import sys\nfrom headrace.stale_folders import PrivateFolder\n"
        f"made = PrivateFolder({PREFIX!r})\n(made.path / 'secret').write_text('x')\n"
        "print(made.path, flush=True)\nsys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    assert owner.stdout is not None
    made = Path(owner.stdout.readline().strip())
    assert delete_stale(PREFIX) == [] and delete_stale(PREFIX) == []
    aged(made)
    assert delete_stale(PREFIX) == [], "its owner lives"
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    return made


def test_the_folder_of_a_killed_process_goes(folder: Path) -> None:
    made = killed(folder)
    assert delete_stale(PREFIX) == [made]
    assert not made.exists()


def test_those_of_the_living_and_of_others_stay(folder: Path) -> None:
    mine = PrivateFolder(PREFIX)
    aged(mine.path)
    for name, mode in ((f"{PREFIX}open", 0o755), ("another-", 0o700)):
        (folder / name).mkdir(mode=mode)
        aged(folder / name)
    (folder / f"{PREFIX}file").write_text("")
    (folder / "target").mkdir(mode=0o700)
    (folder / f"{PREFIX}link").symlink_to(folder / "target")
    (folder / f"{PREFIX}young").mkdir(mode=0o700)
    before = sorted(folder.iterdir())
    assert delete_stale(PREFIX) == []
    assert sorted(folder.iterdir()) == before
    mine.close()
    mine.close()
    assert not mine.path.exists()
