"""Shared by every test: helper modules that lie beside the tests are importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE / "scheduler" / "core", HERE / "mesh", HERE / "observability"):
    sys.path.insert(0, str(folder))

from hypothesis import settings  # noqa: E402

# Fixed seeds: a red run on one machine is red on every machine. `make fuzz` chooses the other profile.
settings.register_profile("fixed", derandomize=True, print_blob=True)
settings.register_profile("fuzz", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("fixed")
