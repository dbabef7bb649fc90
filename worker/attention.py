"""Our seat in ``transformers``' ``AttentionInterface``: the models' attention layers call :func:`paged_attention`.

Nothing is registered for the mask of this name, so models build none. What a forward pass needs (which kernel, which
pages) is not handed through the models' own code, which may drop what it does not know, but stands in
:data:`_running` while the model runs. Layers are told apart by the order in which they call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from kernels.contract import AttentionKernel, LayerAttention, LayerCache

ATTENTION_NAME = "headrace_paged"


class AttentionCalls(Protocol):
    """What answers the attention calls of one forward pass."""

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor:
        """``[1, heads, T, dim]`` queries, keys and values to ``[1, T, heads, dim]``."""
        ...


_running = threading.local()


def register() -> None:
    """Make the implementation known to ``transformers`` under :data:`ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


@contextmanager
def answering(calls: AttentionCalls) -> Iterator[None]:
    """Answer the attention calls of the models that this thread runs."""
    before = getattr(_running, "calls", None)
    _running.calls = calls
    try:
        yield
    finally:
        _running.calls = before


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that ``transformers`` calls."""
    calls: AttentionCalls = _running.calls
    return calls(module, query, key, value, {"attention_mask": attention_mask, **given}), None


@dataclass(slots=True, eq=False)
class PagedPass:
    """One forward pass over paged KV caches."""

    kernel: AttentionKernel
    plan: Any
    layers: list[LayerAttention]
    caches: list[LayerCache]
    layer: int = field(default=0)

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor:
        layer = self.layer
        self.layer += 1
        out = self.kernel.attend(
            self.plan,
            self.caches[layer],
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.layers[layer],
        )
        return out.unsqueeze(0)
