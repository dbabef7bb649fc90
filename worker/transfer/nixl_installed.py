"""Whether NIXL is there, and a network for which it is made, without loading it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
"""What it is installed as: by the name of CUDA's version or, with the package for all of them, without."""


def installed_as() -> str:
    """The package to import; empty if there is none."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), "")


def is_installed() -> bool:
    return bool(installed_as())


def has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether this machine has a network adapter for RDMA, InfiniBand or Ethernet (Linux)."""
    try:
        return any(devices.iterdir())
    except OSError:
        return False
