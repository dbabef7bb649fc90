"""Which of several meshes takes a request: by expected wait, then by content, in proportion to their workers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.mesh_choice import CONTENT_TOKENS, Candidate, candidate, choose, content_of
from shared.messages import ModelInfo, PoolInfo, Sampling, Submit, pack_tokens

CONTENTS = [number.to_bytes(16, "little") for number in range(2000)]


def chosen(candidates: list[Candidate], content: bytes) -> str:
    best = choose(candidates, content)
    assert best is not None
    return best.name


def submit(prompt: int = 8, pool: str = "", salt: str = "", **sampling: int) -> Submit:
    tokens = pack_tokens(range(1, prompt + 1))
    return Submit("r", 1, "g", "m", tokens, Sampling(1, 10, **sampling), 0, pool=pool, cache_salt=salt)


def test_the_shorter_wait_wins_if_the_difference_can_be_told() -> None:
    for content in CONTENTS[:50]:
        assert chosen([Candidate("a", 1, 0.5), Candidate("b", 1, 0.1)], content) == "b"
    near = {chosen([Candidate("a", 1, 0.3), Candidate("b", 1, 0.1)], content) for content in CONTENTS[:50]}
    assert near == {"a", "b"}, "then content decides"


def test_equal_content_meets_and_shares_are_those_of_the_workers() -> None:
    meshes = [Candidate("a", 3), Candidate("b", 1)]
    where = [chosen(meshes, content) for content in CONTENTS]
    assert where == [chosen(meshes[::-1], content) for content in CONTENTS]
    assert abs(Counter(where)["a"] / len(where) - 0.75) < 0.04


@given(
    workers=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    joins=st.integers(1, 9),
    content=st.binary(min_size=16, max_size=16),
)
def test_a_mesh_that_joins_moves_only_what_it_gets(workers: list[int], joins: int, content: bytes) -> None:
    before = [Candidate(f"m{index}", number) for index, number in enumerate(workers)]
    after = chosen([*before, Candidate("new", joins)], content)
    assert after in ("new", chosen(before, content))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 100)), max_size=6), st.binary(max_size=16))
def test_what_fits_and_has_room_comes_first(states: list[tuple[bool, bool, float]], content: bytes) -> None:
    meshes = [Candidate(f"m{index}", 1, wait_s, fits, full) for index, (fits, full, wait_s) in enumerate(states)]
    best = choose(meshes, content)
    if best is None:
        assert not meshes
        return
    assert (best.fits and not best.full) or not any(one.fits and not one.full for one in meshes)
    assert best.fits or not any(one.fits for one in meshes)


def test_content_is_what_the_prefix_cache_tells_apart() -> None:
    long, longer = submit(CONTENT_TOKENS + 1), submit(CONTENT_TOKENS + 900)
    assert content_of(long) == content_of(longer)
    assert len({content_of(one) for one in (submit(8), submit(9), submit(8, salt="x"), submit(8, pool="p"))}) == 3


def test_what_the_beat_tells_of_the_queue() -> None:
    info = ModelInfo(
        "m", 100, 50, 4, waiting=6, waiting_tokens=60, max_waiting=7, service_rate=3.0,
        pools=[PoolInfo("p", 1, waiting=4, max_waiting=4, service_rate=2.0)],
    )  # fmt: skip
    assert candidate("a", info, submit(8)) == Candidate("a", 4, 2.0)
    assert candidate("a", info, submit(8, pool="p")) == Candidate("a", 1, 2.0, full=True)
    assert not candidate("a", info, submit(8, pool="q")).fits, "it has no such pool"
    assert not candidate("a", info, submit(91)).fits
    assert candidate("a", info, submit(90)).fits
    assert candidate("a", ModelInfo("m", 100, 50, 1, waiting=2), submit(8)).wait_s == 20, "it has served none yet"
