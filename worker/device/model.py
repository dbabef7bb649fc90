"""What runs a forward pass on a device, and the way that any served ``transformers`` model does it, module by module.

Nothing here waits for the device. Steps of up to ``graph_tokens`` tokens may be captured in a graph; whether a model's
own code keeps to that is looked at in a pass of it (:func:`waits`), not taken from a list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from kernels.contract import DeviceBatch, DeviceKernel, LayerAttention, LayerCache
from worker.attention import PagedPass, answering
from worker.device.lora import running
from worker.experts import STATIC_TOKENS, is_experts, runs_grouped
from worker.linear import with_hooks_of

log = logging.getLogger("headrace.worker.device")

ANY_NUMBER = 1 << 30
"""``graph_tokens`` of a model that may be captured at every size."""


class DeviceModel(Protocol):
    """A model's weights and its way through them. Keys and values go to ``caches``, one for each layer, which are set
    once it is known how many pages fit."""

    caches: list[LayerCache]
    vocab_size: int
    graph_tokens: int  # a step of more tokens may not be captured in a graph; 0: none may

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: DeviceBatch,
        keep: torch.Tensor,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T]`` ids and positions, ``[K]`` rows whose logits are wanted (all int64) to logits ``[K, vocab_size]``.
        ``adapters`` ``[T]``: the number of each row's LoRA adapter, below 0 for none; None where no row has one.

        Never waits for the device; may be captured if ``batch.host`` is None.
        """
        ...


class ModuleModel:
    """A ``transformers`` model as it stands, with its attention over pages."""

    def __init__(
        self, module: Any, kernel: DeviceKernel, layers: list[LayerAttention], vocab_size: int, graph_tokens: int
    ) -> None:
        self.module = module
        self.kernel = kernel
        self.layers = layers
        self.caches: list[LayerCache] = []
        self.vocab_size = vocab_size
        self.graph_tokens = graph_tokens

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: DeviceBatch,
        keep: torch.Tensor,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`DeviceModel.forward`."""
        calls = PagedPass(self.kernel, self.kernel.plan_device(batch), self.layers, self.caches)
        given = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
        with answering(calls), running(adapters):
            if not len(keep):  # it only fills the KV cache
                self.module.base_model(**given)
                return token_ids.new_empty((0, self.vocab_size), dtype=self.module.dtype)
            logits: torch.Tensor = self.module(**given, logits_to_keep=keep).logits
        return logits[0, :, : self.vocab_size]


def freeze_rotations(module: nn.Module) -> None:
    """Keep rotary embeddings from looking at the positions of a step, which would wait for the device.

    The types that do so compute other frequencies once a sequence is longer than what the model is served up to (see
    :func:`worker.admissible.rope_limit`), so those from the start are right for every step.
    """
    for part in module.modules():
        kind: Any = getattr(part, "rope_type", None)
        if isinstance(kind, dict):
            part.__dict__["rope_type"] = {name: "fixed" if _looks(one) else one for name, one in kind.items()}
        elif isinstance(kind, str) and _looks(kind):
            part.__dict__["rope_type"] = "fixed"


def _looks(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def graph_tokens(module: nn.Module, waiting: set[str]) -> int:
    """:attr:`DeviceModel.graph_tokens`, from what :func:`waits` has found."""
    if waiting:
        log.info("its own code waits for the device (%s): its steps run without graphs", ", ".join(sorted(waiting)))
        return 0
    experts = [part for part in module.modules() if is_experts(part)]
    return ANY_NUMBER if all(runs_grouped(part) for part in experts) else STATIC_TOKENS


def waits(run: Callable[[], object]) -> set[str]:
    """The operations of ``run`` for which a host waits for its device, or that can't be captured."""
    seen = _Waits()
    with seen, _Makes(seen.found):
        run()
    return seen.found


_SIZED_BY_CONTENTS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "_unique", "_unique2",
    "unique_dim", "unique_consecutive",
}  # fmt: skip


_INDEXING = {"index", "index_put", "index_put_"}


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, takes down what reads the device, and results whose size depends on what is in a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        sized = name in _SIZED_BY_CONTENTS or (name in _INDEXING and _has_mask(args[1]))
        if sized or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.found.add(name)
        elif name in ("_to_copy", "copy_") and _apart(args[name == "copy_"], out):
            self.found.add("a copy between host and device")
        return out


_MAKES_TENSORS = {torch.tensor, torch.as_tensor, torch.asarray}


class _Makes(TorchFunctionMode):
    """While active, adds to ``found`` what makes tensors of a device out of a host's numbers: their way there is no
    operation that is dispatched."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.new_tensor:
            args = args[1:]
        elif func not in _MAKES_TENSORS:
            return out
        if out.device.type != "cpu" and not (args and isinstance(args[0], torch.Tensor)):
            self._found.add("a tensor of the host's numbers")
        return out


def _apart(source: Any, target: torch.Tensor) -> bool:
    """Whether two tensors are on devices of different kinds, a single number not counted."""
    return isinstance(source, torch.Tensor) and source.dim() > 0 and source.device.type != target.device.type


def _has_mask(indices: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def replace_linears(module: nn.Module, make: Callable[[torch.Tensor, torch.Tensor | None], nn.Module]) -> None:
    """Put ``make(weight [out, in], bias)`` in the place of every linear layer in ``module``."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear:
                setattr(part, name, with_hooks_of(child, make(child.weight, child.bias)))
            elif isinstance(child, Conv1D):
                setattr(part, name, with_hooks_of(child, make(child.weight.t().contiguous(), child.bias)))
