"""Meshes that the acceptance cases share: a torch worker with ample memory, and a simulated one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_mesh import SIMULATED, Mesh, running_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))


@pytest.fixture(scope="session")
def mesh(torch_mesh: Mesh) -> Mesh:
    return torch_mesh


@pytest.fixture(scope="session")
def simulated(tiny: Path) -> Iterator[Mesh]:
    """A simulated worker, 2 ms a step, whose token 0 is EOS: its tokens are known in advance."""
    with running_mesh(tiny, worker=(*SIMULATED, "--simulate-base-us", "2000", "--simulate-eos", "0")) as running:
        yield running
