"""Random schedules of faults, a fixed part of what ``make fuzz`` runs for as long as asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from schedules import random_mesh, random_meshes, random_moves
from simulated_mesh import Violation
from simulated_nodes import gateway_metrics

SCHEDULES = 240
PARTS = 12
MOVES = 60
MOVE_PARTS = 4
MESHES = 40
MESHES_PARTS = 4

FOUND = (
    7011251,  # the store lost, a newcomer that heard nobody took a low epoch, let it go, and led beside the old leader
)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_faults_break_no_promise(part: int) -> None:
    broken = []
    for seed in range(part, SCHEDULES, PARTS):
        try:
            random_mesh(seed).run()
        except Violation as violation:
            broken.append(f"{violation} (python tests/deterministic --seed {seed} -v)")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("seed", FOUND)
def test_what_a_long_run_once_found_stays_mended(seed: int) -> None:
    random_mesh(seed).run()


@pytest.mark.parametrize("part", range(MOVE_PARTS))
def test_random_faults_break_no_promise_while_sequences_move(part: int) -> None:
    broken, moves = [], 0
    for seed in range(part, MOVES, MOVE_PARTS):
        mesh = random_moves(seed)
        moved = []
        mesh.server.taps.append(lambda sender, subject, payload, seen=moved: seen.append(b"fetched" in payload))
        try:
            mesh.run()
        except Violation as violation:
            broken.append(f"{violation} (python tests/deterministic --moves --seed {seed} -v)")
        moves += sum(moved)
    assert not broken, "\n".join(broken)
    assert moves, "no blocks were fetched"


@pytest.mark.parametrize("part", range(MESHES_PARTS))
def test_random_faults_break_no_promise_of_gateways_with_two_meshes(part: int) -> None:
    def moved() -> float:
        cause = {"cause": "mesh"}
        return gateway_metrics().registry.get_sample_value("headrace_gateway_resumes_total", cause) or 0.0

    broken, before = [], moved()
    for seed in range(part, MESHES, MESHES_PARTS):
        try:
            random_meshes(seed).run()
        except Violation as violation:
            broken.append(f"{violation} (python tests/deterministic --meshes --seed {seed} -v)")
    assert not broken, "\n".join(broken)
    assert moved() > before, "no request went on in another mesh"


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
