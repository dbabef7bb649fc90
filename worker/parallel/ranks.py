"""The rank that this process is, and the collectives of a forward pass."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOAD_TIMEOUT = timedelta(minutes=30)
"""While weights are read, ranks may be far apart."""

STEP_TIMEOUT = timedelta(seconds=60)
"""No rank waits longer for another in a step: then something hangs, and the worker ends."""

_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.12


class Ranks:
    """This process's place among the ranks of a worker.

    ``smallest(n)`` is the least of what the ranks call it with, each as often as the others. With ``invariant``, a
    row's sums have the same bits whatever rows stand beside it.
    """

    def __init__(self, rank: int, size: int, smallest: Callable[[int], int], invariant: bool) -> None:
        self.rank = rank
        self.size = size
        self.smallest = smallest
        # Two addends have one sum. Of more, libraries choose the order by an element's place in the message.
        self._in_order = invariant and size > 2
        self._group: Any = None  # None: torch's default one
        self._steps: Any = None  # the group of steps

    def __deepcopy__(self, memo: object) -> Ranks:
        """A copy of a model's part is of the same rank."""
        return self

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says so. Called by each, as often as by the others."""
        return self.smallest(int(yes)) == 1

    def connect(self, device_type: str) -> None:
        """Make the group of steps. Every rank calls it, before memory is measured: what a connection takes counts."""
        self._steps = dist.new_group(timeout=STEP_TIMEOUT)
        dist.all_reduce(torch.zeros(1, device=device_type), group=self._steps)  # a captured one could not connect

    def begin_steps(self) -> None:
        """From here on no collective waits longer than STEP_TIMEOUT. Every rank calls it before its first graph: a
        rank that has given its graphs up adds in this group, and those that replay theirs must too."""
        self._group = self._steps

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' ``x``, the same bits on each; may overwrite ``x``."""
        x = x.contiguous()
        if not self._in_order:
            dist.all_reduce(x, group=self._group)
            return x
        parts = x.new_empty((self.size, *x.shape))
        _all_gather(parts.view(-1), x.view(-1), group=self._group)
        out = parts[0]
        for part in parts[1:]:
            out += part
        return out

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' ``[..., width]`` side by side: ``[..., size * width]``."""
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape))
        _all_gather(parts.view(-1), x.view(-1), group=self._group)
        return parts.movedim(0, -2).reshape(*x.shape[:-1], self.size * x.shape[-1])


_mine: Ranks | None = None


def mine() -> Ranks | None:
    """What :func:`join` has made of this process; None where a model is not divided."""
    return _mine


def join(ranks: Ranks, store: Any, device_type: str) -> None:
    """Become one of the ranks; returns once all have. A process is one rank, of one worker."""
    global _mine
    # One machine: nothing of this need be heard outside of it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Else NCCL registers what a captured sum reads and writes. Segments of torch's allocator that can grow are not fit
    # for that, and ranks wait for one another in it, though one of them may have no graph of this step.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    os.environ["LOCAL_RANK"] = "0"  # each rank has its own GPU in front (see worker.parallel.leader)
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=LOAD_TIMEOUT)
    ranks.connect(device_type)
    _mine = ranks


def leave() -> None:
    """Be a process by itself again; the others may be gone."""
    global _mine
    _mine = None
    if dist.is_initialized():
        dist.destroy_process_group()


def serve_store(size: int) -> Any:
    """Rank 0's store, at a free port that only this machine reaches; it ends with the process."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return _TCPStore(
        "127.0.0.1", port, size, is_master=True, timeout=LOAD_TIMEOUT, wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip


def reach_store(port: int, size: int) -> Any:
    """A follower's view of it."""
    return _TCPStore("127.0.0.1", port, size, is_master=False, timeout=LOAD_TIMEOUT, wait_for_workers=False)
