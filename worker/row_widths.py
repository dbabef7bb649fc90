"""How wide a model's rows are where it computes functions like silu or cos: their bits depend on how torch cuts the
tensor into vectors (see :mod:`kernels.elementwise`), so the runner fills a pass up with rows until the cuts are clean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Elementwise functions whose vector and scalar code may differ in the last bit. Sums, products and squares don't.
_FUNCTIONS = {
    "cos", "elu", "erf", "exp", "expm1", "gelu", "log", "log1p", "log_sigmoid_forward", "mish", "sigmoid", "silu",
    "sin", "softplus", "tanh",
}  # fmt: skip


class RowWidths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, takes down the elements per row of every such call of a pass over ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.widths: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") in _FUNCTIONS:
            first = out[0] if isinstance(out, tuple) else out
            self.widths.add(max(1, first.numel() // self.rows))
        return out
