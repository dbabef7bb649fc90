"""``transformers`` for a worker without what it seldom uses: half of the import's time, and 75 MB.

``transformers``, and torch itself where it fills new tensors, import torch's compiler (with it distributed
tensors) for a decorator that keeps it off a function. Here a stand-in answers such decorators. Whoever wants more of
the compiler, as ``torch.compile`` does, finds the real one: it takes the stand-in's place at the first such question.
And ``transformers`` is told what a torch without ``torch.distributed`` tells it (a worker is one process), and that
there is no torchao, which it would import with all of the compiler for checkpoints that no worker serves.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from shared.transformers_models import import_models

COMPILER = "torch._dynamo"
INDEXING = f"{COMPILER}._trace_wrapped_higher_order_op"
DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")


def import_transformers() -> None:
    """Import what all models of ``transformers`` share, unless the compiler is there already."""
    if COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules:
        return
    _StandIn().install()
    with mock.patch.object(torch.distributed, "is_available", lambda: False):
        from transformers.utils.import_utils import is_torch_distributed_available

        is_torch_distributed_available()  # it keeps the answer
    from transformers.utils import import_utils

    is_available = import_utils._is_package_available

    def but_torchao(name: str, *rest: Any, **more: Any) -> Any:
        return (False, "N/A") if name == "torchao" else is_available(name, *rest, **more)

    with mock.patch.object(import_utils, "_is_package_available", but_torchao):
        import_utils.is_torchao_available()
    # Its one other import of the compiler; of a class that makes masks, which paged attention does without.
    indexing = ModuleType(INDEXING)
    indexing.TransformGetItemToIndex = _indexing  # type: ignore[attr-defined]
    sys.modules[INDEXING] = indexing
    try:
        import_models()
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401
    finally:
        del sys.modules[INDEXING]


class _StandIn(ModuleType):
    """In ``sys.modules`` and ``torch`` in place of the compiler, until somebody asks for more than its decorators."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.__path__ = [f"{torch.__path__[0]}/_dynamo"]
        for name in DECORATORS:
            setattr(self, name, _unchanged)

        self._watch = _Watch(self)

    def install(self) -> None:
        sys.modules[COMPILER] = torch._dynamo = self
        sys.meta_path.insert(0, self._watch)

    def give_way(self) -> ModuleType:
        """Import the real one."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
            sys.meta_path.remove(self._watch)
        real = importlib.import_module(COMPILER)
        torch._dynamo = real
        return real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.give_way(), name)


class _Watch(MetaPathFinder):
    """Finds nothing itself; sees that a part of the compiler is being imported."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.startswith(f"{COMPILER}."):
            self._stand_in.give_way()


def _unchanged(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    """A decorator that changes nothing, with arguments or without."""
    return function if function is not None else _unchanged


def _indexing() -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
