"""The transports by which KV blocks travel, by name. Light: a worker's options are read before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.transfer.nixl_installed import has_rdma, is_installed

if TYPE_CHECKING:
    from worker.config import WorkerConfig

AUTO, OFF = "auto", "off"
SHM, NIXL, TCP = "shm", "nixl", "tcp"
TRANSPORTS = (SHM, NIXL, TCP)
"""The quickest first, where it can be used at all."""


def are_transports(text: str) -> str | None:
    """A check of an option: what is wrong with it."""
    if text == AUTO:
        return None
    names = text.split(",")
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown or len(set(names)) < len(names):
        return f"must be {AUTO}, or some of {', '.join(TRANSPORTS)}, each once"
    if NIXL in names and not is_installed():
        return "asks for NIXL, which is not installed (pip install nixl)"
    return None


def transports_of(config: WorkerConfig) -> tuple[str, ...]:
    """Those that a worker may use, the first that works first.

    NIXL by itself only where there is RDMA: between two namespaces without it each of its transfers took more than a
    second, and TCP's a tenth. A simulated model needs none: it brings torch.
    """
    if config.transfer_by != AUTO:
        return tuple(config.transfer_by.split(","))
    return tuple(one for one in TRANSPORTS if one != NIXL or (not config.simulate and is_installed() and has_rdma()))
