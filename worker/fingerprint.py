"""What tells weights from other weights under the same name: a digest over a sample of every tensor.

Not meant against malice. It tells a fine-tune from its base and one revision from the next without reading gigabytes
again; workers whose digests differ do not take each other's KV blocks (scheduler.core.roles).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

SAMPLE = 64
"""Elements of a tensor, evenly apart."""

DIGEST_BYTES = 8


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]], *how: str) -> str:
    """Of named tensors in their order, and of anything else that decides what is computed with them."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for text in how:
        digest.update(text.encode() + b"\0")
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // SAMPLE)].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
