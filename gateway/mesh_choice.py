"""Which of several meshes takes a new request. Pure.

The one where it is expected to wait least. Waits that differ by less than what a beat can tell are equal, and then the
content decides, so that equal prefixes meet where they are cached: the highest random weight (Thaler and Ravishankar,
1998), by ready workers (Schindelhauer and Schomaker, 2005), so that a mesh that comes or goes moves only what it gets
or had, and gets its share of what there is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.context_length import context_of
from gateway.mesh_view import is_full
from shared.messages import ModelInfo, PoolInfo, Submit

EQUAL_WAITS_S = 0.25  # beats of a queue that changes come so often
LEAST_RATE = 0.1  # sequences per second that a queue is believed to serve, if it has served none yet
CONTENT_TOKENS = 256  # by which content is told apart: what is shorter costs little to compute in two places


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh whose scheduler is heard and that has a ready worker for the request."""

    name: str
    workers: int  # ready ones
    wait_s: float = 0.0  # expected
    fits: bool = True  # it takes requests of such a length, and has the pool that is asked for
    full: bool = False  # its queue has no room for the request


def candidate(name: str, info: ModelInfo, submit: Submit) -> Candidate:
    """``info``: of the request's model in the mesh ``name``."""
    queue: ModelInfo | PoolInfo = info
    if submit.pool:
        queue = next((pool for pool in info.pools if pool.name == submit.pool), info)
    sampling, prompt = submit.sampling, len(submit.prompt) // 4  # packed uint32
    sequences = 1 if sampling.beam_width else submit.n
    tokens = prompt + sampling.max_tokens * (sampling.beam_width or submit.n)
    has_pool = not submit.pool or queue is not info
    fits = has_pool and context_of(info, prompt, submit.pool, submit.adapter, sampling.max_tokens) > 0
    wait_s = queue.waiting / max(queue.service_rate, LEAST_RATE)
    return Candidate(name, queue.workers, wait_s, fits, is_full(queue, sequences, tokens))


def content_of(submit: Submit) -> bytes:
    """What the prefix cache tells prompts apart by, as far as the first ``CONTENT_TOKENS`` tokens go."""
    digest = hashlib.blake2b(submit.prompt[: 4 * CONTENT_TOKENS], digest_size=16)
    for text in (submit.model, submit.adapter, submit.cache_salt):
        digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def choose(candidates: Sequence[Candidate], content: bytes) -> Candidate | None:
    """The best of them; None if there are none. One that is full, or too small, is better than nothing."""
    for usable in (
        [one for one in candidates if one.fits and not one.full],
        [one for one in candidates if one.fits],
        candidates,
    ):
        if usable:
            least_s = min(one.wait_s for one in usable)
            equals = [one for one in usable if one.wait_s <= least_s + EQUAL_WAITS_S]
            return max(equals, key=lambda one: (_weight(one, content), one.name))
    return None


def _weight(one: Candidate, content: bytes) -> float:
    """-workers / ln u with u uniform in (0, 1): the greatest is one's with the probability of its share of workers."""
    digest = hashlib.blake2b(content + one.name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    u = (int.from_bytes(digest) + 0.5) / 2**64
    return -max(1, one.workers) / math.log(u) if u < 1.0 else math.inf
