"""Shared by every test: helper modules that lie beside the tests are importable by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from whole_mesh import Mesh

# Before anything imports triton: its interpreter runs the GPU kernels on the CPU.
os.environ["TRITON_INTERPRET"] = "1"
# Before anything imports torch, as in a worker: beside other processes its threads would spin for the time in which one
# of them waits for a core, and that takes four times the CPU.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

HERE = Path(__file__).parent
for folder in (HERE, HERE / "scheduler" / "core", HERE / "mesh", HERE / "observability"):
    sys.path.insert(0, str(folder))

from hypothesis import settings  # noqa: E402

# Fixed seeds: a red run on one machine is red on every machine. `make fuzz` chooses the other profile.
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("fuzz", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight llama whose embedding (320 rows) is larger than its tokenizer (296 tokens)."""
    from tiny_models import make_tiny_model  # torch, which most tests do without

    return make_tiny_model(tmp_path_factory.mktemp("shared") / "model", seed=9)


@pytest.fixture(scope="session")
def torch_mesh(tiny: Path) -> Iterator[Mesh]:
    """A whole mesh with that model in float32, ample memory, context 2048: for tests that leave it as it is."""
    from whole_mesh import FLOAT32, running_mesh

    with running_mesh(tiny, worker=(*FLOAT32, "--kv-cache-memory", "32MiB")) as mesh:
        yield mesh
