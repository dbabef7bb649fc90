"""The paged KV cache: how many pages there are, and the tensors that they lie in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import AttentionKernel, Geometry, LayerCache
from shared.lifecycle import StartupError
from worker.parallel.ranks import mine

log = logging.getLogger("headrace.worker.kv_cache")

HIGH_UTILIZATION = 0.95
"""Above this share of a GPU's memory, activations and the allocator's own overhead may not fit."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How the memory for keys and values divides. Page 0, the scratch page, is not among ``num_blocks``."""

    num_blocks: int
    block_size: int  # tokens
    bytes_per_token: int  # keys and values of all layers
    max_model_len: int  # tokens: no longer than the model allows, nor than the pool

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return (self.num_blocks + 1) * self.block_size * self.bytes_per_token

    def describe(self) -> str:
        """The line printed at start."""
        fit = self.num_blocks // -(-self.max_model_len // self.block_size)
        return (
            f"KV cache: {self.num_blocks:,} pages of {self.block_size} tokens = {self.num_tokens:,} tokens, "
            f"{self.num_bytes / (1 << 20):,.0f} MiB; {fit:,} sequence{'' if fit == 1 else 's'} of the full "
            f"{self.max_model_len:,} tokens fit"
        )


def storage_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """What pages hold, for ``--kv-cache-dtype`` and a model in ``dtype``. Raises StartupError."""
    stored = {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[kv_cache_dtype]
    if stored != dtype and dtype == torch.float64:
        raise StartupError(f"kv-cache-dtype {kv_cache_dtype} is not for a model in float64")
    return stored


def bytes_per_token(num_layers: int, geometry: Geometry, dtype: torch.dtype) -> int:
    """Of keys and values in all layers, ``dtype`` being what they are stored in."""
    head_bytes = geometry.head_dim * dtype.itemsize
    if dtype.itemsize == 1:
        head_bytes += torch.float32.itemsize  # the scale of each token and head
    return 2 * num_layers * geometry.num_kv_heads * head_bytes


def pool_size(
    budget_bytes: int,
    token_bytes: int,
    block_size: int,
    model_limit: int | None,
    max_model_len: int | None,
    num_blocks: int | None = None,
) -> PoolSize:
    """Divide ``budget_bytes`` into pages; ``num_blocks`` overrides it.

    ``max_model_len`` is what was asked for (None: the model's limit). It is clamped to the pool, because a longer
    sequence could never run to its end. Raises StartupError if nothing sensible fits.
    """
    if max_model_len is not None and model_limit is not None and max_model_len > model_limit:
        raise StartupError(f"max-model-len {max_model_len} is more than the model's {model_limit} positions")
    page_bytes = block_size * token_bytes
    if num_blocks is None:
        num_blocks = budget_bytes // page_bytes - 1
    if num_blocks < 1:
        raise StartupError(
            f"{budget_bytes:,} bytes for the KV cache hold no page (one of {block_size} tokens takes {page_bytes:,}, "
            "and one more is kept as scratch); raise kv-cache-memory"
        )
    wanted = max_model_len or model_limit
    if wanted is None:
        raise StartupError("the model's config gives no longest length; set max-model-len")
    length = min(wanted, num_blocks * block_size)
    if length < wanted:
        level = logging.INFO if max_model_len is None else logging.WARNING
        log.log(level, "max-model-len is %d, not %d: the KV cache holds no more", length, wanted)
    return PoolSize(num_blocks, block_size, token_bytes, length)


def pool_size_of_all(
    budget_bytes: int,
    token_bytes: int,
    block_size: int,
    model_limit: int | None,
    max_model_len: int | None,
    num_blocks: int | None = None,
) -> PoolSize:
    """As :func:`pool_size`; where a model is divided over ranks, as many pages as all of them have."""
    size = pool_size(budget_bytes, token_bytes, block_size, model_limit, max_model_len, num_blocks)
    ranks = mine()
    if ranks is None or (least := ranks.smallest(size.num_blocks)) == size.num_blocks:
        return size
    return pool_size(budget_bytes, token_bytes, block_size, model_limit, max_model_len, least)


def budget_bytes(device: torch.device, kv_cache_memory: int, gpu_memory_utilization: float) -> int:
    """Bytes for keys and values: on a CPU as told, on a GPU what the share leaves beside what is in use already."""
    if device.type != "cuda":
        _check_available(kv_cache_memory)
        return kv_cache_memory
    if gpu_memory_utilization > HIGH_UTILIZATION:
        log.warning("gpu-memory-utilization %.2f leaves little room for activations", gpu_memory_utilization)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * gpu_memory_utilization) - (total - free))


def _check_available(wanted: int) -> None:
    """Pages take memory only as they are written: what is not there must be said now. Raises StartupError."""
    available = _available_bytes()
    if available is not None and wanted > available:
        gib = 1 << 30
        raise StartupError(f"kv-cache-memory is {wanted / gib:,.1f} GiB; {available / gib:,.1f} GiB are available")


def _available_bytes() -> int | None:
    """What the machine can still give, or this process's control group if that is less; None where nobody says."""
    known = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        known.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        known.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # ValueError: "max"
        pass
    return min(known, default=None)


class KVCache:
    """The pages of all layers."""

    def __init__(self, kernel: AttentionKernel, num_layers: int, num_blocks: int, host_blocks: int = 0) -> None:
        self.layers: list[LayerCache] = [kernel.allocate(num_blocks + 1) for _ in range(num_layers)]
        self._host: list[list[torch.Tensor]] = []
        if host_blocks:
            # Pinned where the pages are on a GPU: only then does a copy run at the link's full rate.
            pin = self.layers[0].key.is_cuda
            self._host = [[_host_pool(pool, host_blocks, pin) for pool in layer.tensors()] for layer in self.layers]

    def rounded_to(self, dtype: torch.dtype) -> str:
        """What pages hold of a model in ``dtype``, by name; empty if the same."""
        stored = self.layers[0].key.dtype
        return "" if stored == dtype else str(stored).removeprefix("torch.")

    def swap_out(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy (page, place in host memory) pairs, in every layer. Returns once the pages may be overwritten."""
        self._swap([page for page, _ in moves], [place for _, place in moves], to_host=True)

    def swap_in(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy (place in host memory, page) pairs back, in every layer."""
        self._swap([page for _, page in moves], [place for place, _ in moves], to_host=False)

    def _swap(self, pages: list[int], places: list[int], to_host: bool) -> None:
        if not pages:
            return
        device = self.layers[0].key.device
        at = torch.tensor(pages, device=device)
        there = torch.tensor(places)
        for layer, host in zip(self.layers, self._host, strict=True):
            for pool, kept in zip(layer.tensors(), host, strict=True):
                if to_host:
                    kept[there] = pool[at].to(kept.device)
                else:
                    pool[at] = kept[there].to(device)

    def copy(self, pages: Sequence[tuple[int, int]]) -> int:
        """Copy (source, target) pages in the order given, in every layer: the copy-on-write of forked sequences.

        Returns the bytes copied.
        """
        copied = 0
        for source, target in pages:
            for layer in self.layers:
                for pool in layer.tensors():
                    pool[target].copy_(pool[source])
                    copied += pool[source].numel() * pool.element_size()
        return copied


def page_layout(layers: Sequence[LayerCache]) -> str:
    """How keys and values lie within the pages of all layers: equal where a page's bytes mean the same."""
    found: list[tuple[str, int]] = []
    for layer in layers:
        text = ", ".join(map(_laid_out, layer.tensors()))
        if found and found[-1][0] == text:
            found[-1] = text, found[-1][1] + 1
        else:
            found.append((text, 1))
    return "; ".join(f"{count} x {text}" for text, count in found)


def _laid_out(pool: torch.Tensor) -> str:
    dtype = str(pool.dtype).removeprefix("torch.")
    return f"{dtype} {list(pool.shape[1:])} by {list(pool.stride()[1:])} from {pool.storage_offset()}"


def page_bytes_of(layers: Sequence[LayerCache]) -> list[npt.NDArray[np.uint8]]:
    """Page memory on the host as bytes: uint8 ``[num_pages, n]`` for each piece of memory, which tensors may share."""
    found: dict[int, npt.NDArray[np.uint8]] = {}
    for pool in (pool for layer in layers for pool in layer.tensors()):
        memory = pool.untyped_storage()
        if memory.data_ptr() not in found:
            whole = torch.empty(0, dtype=torch.uint8).set_(memory).numpy()
            found[memory.data_ptr()] = whole.reshape(len(pool), pool.stride(0) * pool.element_size())
    return list(found.values())


def _host_pool(pool: torch.Tensor, blocks: int, pin: bool) -> torch.Tensor:
    return torch.zeros((blocks, *pool.shape[1:]), dtype=pool.dtype, pin_memory=pin)
