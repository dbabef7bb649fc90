"""Random schedules of faults, a fixed part of what ``make fuzz`` runs for as long as asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from schedules import random_mesh
from simulated_mesh import Violation

SCHEDULES = 240
PARTS = 12


@pytest.mark.parametrize("part", range(PARTS))
def test_random_faults_break_no_promise(part: int) -> None:
    broken = []
    for seed in range(part, SCHEDULES, PARTS):
        try:
            random_mesh(seed).run()
        except Violation as violation:
            broken.append(f"{violation} (python tests/deterministic --seed {seed} -v)")
    assert not broken, "\n".join(broken)


def test_a_schedule_replays_to_the_same_log() -> None:
    """Whatever the hash seed of the interpreter: else a failure could not be looked at."""
    logs = [
        subprocess.run(
            [sys.executable, Path(__file__).parent, "--seed", "17", "-v"],
            env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    ]  # fmt: skip
    assert logs[0] == logs[1] and len(logs[0].splitlines()) > 100
