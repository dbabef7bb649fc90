"""How the prompt tokens of one iteration are shared among unfinished prompts."""

from __future__ import annotations

from collections.abc import Sequence


def share_prefill(
    remaining: Sequence[int], budget: int, chunk_limit: int, oldest_share: float, capped: Sequence[bool] = (),
    cap_share: float = 1.0,
) -> list[int]:  # fmt: skip
    """Tokens for each prompt in this iteration.

    ``remaining[i]`` is what prompt ``i`` still needs, the oldest first. The shortest remaining goes first, so that a
    short question does not wait out a long document (SRPT), but the oldest is sure of ``oldest_share`` of the budget,
    so that a stream of short ones cannot stop it. No prompt gets more than ``chunk_limit``. Those ``capped`` (long
    contexts) share no more than ``cap_share`` of the budget as long as there are others.
    """
    grants = [0] * len(remaining)
    if not remaining or budget <= 0:
        return grants
    sure = max(1, int(budget * oldest_share))
    grants[0] = min(remaining[0], chunk_limit, sure)
    left = budget - grants[0]
    cap_left = int(budget * cap_share) if any(capped) and not all(capped) else budget
    if capped and capped[0]:
        cap_left -= grants[0]
    for index in sorted(range(len(remaining)), key=lambda i: (remaining[i], i)):
        if left <= 0:
            break
        extra = min(remaining[index] - grants[index], chunk_limit - grants[index], left)
        if capped and capped[index]:
            extra = max(0, min(extra, cap_left))
            cap_left -= extra
        grants[index] += extra
        left -= extra
    return grants


def finish_short(grants: list[int], remaining: Sequence[int], extra: int, chunk_limit: int) -> None:
    """Raise the grants of prompts that ``extra`` tokens beyond the budget would finish, the shortest rest first.

    A prompt that is read to its end in this iteration has its first token one iteration sooner; one that is not gains
    nothing that is worth a longer iteration.
    """
    for index in sorted(range(len(remaining)), key=lambda i: (remaining[i] - grants[i], i)):
        need = remaining[index] - grants[index]
        if need > extra or remaining[index] > chunk_limit:
            continue
        grants[index] += need
        extra -= need


def share_whole_prompts(remaining: Sequence[int], budget: int) -> list[int]:
    """Without chunking: whole prompts in order of age, as many as fit; one that does not fit stops those behind it."""
    grants = [0] * len(remaining)
    for index, need in enumerate(remaining):
        if need > budget:
            break
        grants[index] = need
        budget -= need
    return grants
