"""What the worker asks of an attention kernel, whatever device it runs on. Knows sequences and pages, not requests.

One forward pass runs a *ragged batch*: the query tokens of all sequences concatenated, with no padding. A sequence's
keys and values lie in pages of a pool that all sequences share; its block table says in which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that all attention layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per page

    @property
    def group(self) -> int:
        """Query heads that share one key/value head. Head ``h`` reads key/value head ``h // group``."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """``T`` query tokens of ``S`` sequences, on the host.

    Query ``t`` attends to keys ``[0, visible[t])`` of its sequence (with a window ``W``: to the last ``W`` of those),
    its own key among them. Within a sequence ``visible`` does not fall.
    """

    query_start: npt.NDArray[np.int64]  # [S + 1]: sequence s has queries query_start[s] .. query_start[s + 1] - 1
    visible: npt.NDArray[np.int64]  # [T], at least 1
    block_tables: npt.NDArray[np.int32]  # [S, P]: page of tokens i * block_size ..; junk past the last key
    write_slots: npt.NDArray[np.int64]  # [T]: page * block_size + offset, where the token's own key and value go

    @property
    def num_tokens(self) -> int:
        return len(self.visible)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """A :class:`RaggedBatch` on a device. What the host must know of it are bounds, so that nobody waits for the
    device, and a captured graph may be replayed with other contents in the same tensors.

    ``T`` and ``S`` may be more than there is to do: a sequence without queries does nothing, and the rows behind the
    last query (``query_start[S]``) are not read.
    """

    query_start: torch.Tensor  # int32 [S + 1]
    visible: torch.Tensor  # int32 [T]
    block_tables: torch.Tensor  # int32 [S, P], rows side by side or further apart
    write_slots: torch.Tensor  # int64 [T]
    max_query: int  # no sequence has more query tokens
    max_keys: int  # no query sees more keys
    host: RaggedBatch | None = None  # the same on the host, where it is known; None in a captured graph

    @property
    def num_tokens(self) -> int:
        return len(self.visible)

    @property
    def num_sequences(self) -> int:
        return len(self.query_start) - 1


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's pages: ``[num_pages, block_size, num_kv_heads, head_dim]``. How they lie in memory is the kernel's
    choice, so kernels get their caches from :meth:`AttentionKernel.allocate`.

    Pages in fp8 or int8 have a scale for each token and head: a number is what is stored times its scale.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None  # float32 [num_pages, block_size, num_kv_heads]
    value_scale: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All that a page consists of: whoever copies a page copies these. fp8 as bytes, which torch can index."""
        pages = [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (self.key, self.value)]
        return [*pages, *(scale for scale in (self.key_scale, self.value_scale) if scale is not None)]


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """What differs from layer to layer: ``softmax(cap(scaling * q @ k))`` over a window, with a sink."""

    scaling: float
    window: int | None = None  # a query sees its own key and the window - 1 before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # [num_heads]: a score that takes part in the softmax but has no value


class AttentionKernel(Protocol):
    """Paged attention with grouped heads. Bits: a query's output does not depend on the other queries of the batch,
    nor on whether its sequence came in one piece or in chunks (``batch_invariant`` says if the device kept to it when
    probed)."""

    name: str
    batch_invariant: bool

    def allocate(self, num_pages: int) -> LayerCache:
        """Pages of zeros for one layer."""
        ...

    def plan(self, batch: RaggedBatch) -> Any:
        """Everything about a forward pass that its layers share; made once, given to :meth:`attend` for each layer."""
        ...

    def attend(
        self,
        plan: Any,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Write key and value (``[T, num_kv_heads, head_dim]``) to the pages, then attend.

        ``query`` is ``[T, num_heads, head_dim]``; returns the same shape. Numbers that are not finite are written as
        finite ones, so that a sequence gone wrong can't reach another through a reused page.
        """
        ...


class DeviceKernel(AttentionKernel, Protocol):
    """A kernel of a device that runs asynchronously: nothing here waits for the device or reads anything back.

    Pages are plain ``[num_pages, block_size, num_kv_heads, head_dim]`` in memory, so that kernels can share them.
    """

    def plan_device(self, batch: DeviceBatch) -> Any:
        """As :meth:`plan`, of a batch that is there already. May be captured in a graph, if ``batch.host`` is None."""
        ...

    def attend(
        self,
        plan: Any,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        self.write(plan, cache, key, value)
        return self.read(plan, cache, query, layer)

    def write(self, plan: Any, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """The first half of :meth:`attend`."""
        ...

    def read(self, plan: Any, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        """The second half, of keys and values that are written (by :meth:`write`, or by a kernel that rotates them
        first)."""
        ...

    def warm_ups(self, cache: LayerCache, layers: Sequence[LayerAttention]) -> Iterator[Callable[[], None]]:
        """Launches that read and write nothing: once they have all been made, no batch has to wait for a compiler.

        ``cache`` is one of those that the kernel will serve ``layers`` with.
        """
        return iter(())
