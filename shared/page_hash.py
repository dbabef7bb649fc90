"""Content hashes of full KV blocks. Two services must agree on them bit for bit, so they are spelled here only.

A block's hash chains over everything that its KV entries depend on: model, dtype, adapter and salt (the root), and
every token up to the block's end (the chain). Equal hashes mean equal content, with the collision odds of 128 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shared.messages import pack_tokens

DIGEST_BYTES = 16


def root_hash(model: str, dtype: str, salt: str = "", adapter: str = "") -> bytes:
    """The start of a chain. A salt keeps tenants from finding out, by timing, what others have asked."""
    parts = b"".join(len(part).to_bytes(4, "little") + part for part in map(_encode, (model, dtype, salt, adapter)))
    return hashlib.blake2b(parts, digest_size=DIGEST_BYTES, person=b"headrace-root").digest()


def next_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block of ``tokens`` that follows the block (or root) ``previous``."""
    return hashlib.blake2b(previous + pack_tokens(tokens), digest_size=DIGEST_BYTES).digest()


def extend_chain(chain: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, blocks: int) -> None:
    """Grow ``chain`` (the hashes of the leading full blocks of ``tokens``) to ``blocks`` entries, in place."""
    previous = chain[-1] if chain else root
    for index in range(len(chain), blocks):
        previous = next_hash(previous, tokens[index * block_size : (index + 1) * block_size])
        chain.append(previous)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
