"""How many continuations of a beam the search must see: scheduler and worker must agree on it."""

from __future__ import annotations

from collections.abc import Collection

from shared.messages import Sampling


def candidates_wanted(sampling: Sampling, eos_token_ids: Collection[int]) -> int:
    """(1 + end tokens) * width: so many that ``width`` of them do not end, whatever the best ones are."""
    ends = 0 if sampling.ignore_eos else len(set(eos_token_ids))
    return max(2, 1 + ends + len(set(sampling.stop_token_ids))) * sampling.beam_width
