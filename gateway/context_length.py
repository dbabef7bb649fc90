"""How long a request may be where the scheduler will run it, as its last beat tells. Pure.

Workers of one model may differ in what they take, and a request goes to one pool of them: whoever names no limit for
its answer must not be given one that this pool refuses. This follows ``scheduler.core.routing`` as far as beats tell:
the scheduler's own check at submit is the one that binds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shared.messages import ModelInfo, PoolInfo
from shared.pool_name import DEFAULT_POOL


def context_of(info: ModelInfo, prompt: int, pool: str = "", adapter: str = "", answer: int = 1) -> int:
    """Prompt and answer together, in tokens, of a request for ``pool`` (empty: for whichever the scheduler chooses).

    Where several pools may take it, what all take that have room for a prompt of so many tokens and ``answer`` more;
    0 if none has.
    """
    lengths = {one.name: _length(one, adapter) for one in info.pools}
    if not any(lengths.values()):  # a scheduler that does not tell yet
        return info.max_model_len if prompt + answer <= info.max_model_len else 0
    fitting = {name: length for name, length in lengths.items() if length >= prompt + answer}
    asked = _asked(info.pools, prompt, pool, adapter)
    able = [fitting[name] for name in asked.pools if name in fitting]
    if asked.alike and not (asked.default_first and DEFAULT_POOL in fitting):
        return min(able, default=0)
    return fitting[DEFAULT_POOL] if asked.alike else next(iter(able), 0)


def default_answer(
    infos: Collection[ModelInfo], prompts: Iterable[int], pool: str, adapter: str, most: int
) -> int:  # fmt: skip
    """The limit of answers for which the client names none: ``most`` tokens, or what every prompt leaves room for.

    ``infos``: of the meshes of which any may get the request; ``prompts``: their lengths.
    """
    having = [info for info in infos if any(one.name == pool for one in info.pools)] or infos
    for prompt in set(prompts):
        contexts = [context_of(info, prompt, pool, adapter) for info in having]
        if contexts:  # what no mesh takes is refused for its prompt's length, not for an answer's that nobody asked for
            most = min(most, min(filter(None, contexts), default=prompt + 1) - prompt)
    return most


def max_model_len(info: ModelInfo, adapter: str = "") -> int:
    """Of the model, or of one of its adapters, wherever that is longest."""
    longest = max((_length(one, adapter) for one in info.pools), default=0) if adapter else 0
    return longest or info.max_model_len


@dataclass(frozen=True, slots=True)
class _Asked:
    """``pools`` in the order in which the scheduler asks them; ``alike``: in one that is not known here."""

    pools: Collection[str]
    alike: bool = False
    default_first: bool = False  # of those alike the pool without a name


def _asked(pools: Collection[PoolInfo], prompt: int, pool: str, adapter: str) -> _Asked:
    by_name = {one.name: one for one in pools}
    if pool and pool not in by_name:  # it may be declared, and give away what it gets
        return _Asked(by_name, alike=True)
    if pool:
        return _Asked([pool, *by_name[pool].overflow])
    having = {name: one for name, one in by_name.items() if not adapter or _length(one, adapter)}
    any_of = [name for name, one in having.items() if not 0 <= one.longest_prompt < prompt]
    fit = next((one for one in pools if one.shortest_prompt <= prompt <= one.longest_prompt), None)
    if fit is not None and (fit.name in having or not any_of):
        return _Asked([fit.name, *fit.overflow])
    if fit is None and any(one.longest_prompt >= 0 for one in pools):
        # Its length is in no range, or in that of a pool which no worker has been in yet, and which may give away.
        return _Asked(by_name, alike=True)
    return _Asked(any_of, alike=True, default_first=DEFAULT_POOL in any_of)


def _length(pool: PoolInfo, adapter: str) -> int:
    """0 if no ready worker of the pool has the adapter."""
    return dict(pool.adapters).get(adapter, 0) if adapter else pool.max_model_len
