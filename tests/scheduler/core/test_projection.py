"""Projected use of blocks, against a simulation of the same sequences step by step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.projection import Growing, Projection

BLOCK = 4


def growing(tokens: int, left: int) -> Growing:
    blocks = -(-tokens // BLOCK)
    return Growing(tokens, left, blocks, blocks)


def used_at(running: list[Growing], step: int, leaving: bool) -> int:
    """Blocks in use after ``step`` steps, before (or after) those that end at it leave."""
    alive = [one for one in running if one.left > step or (one.left == step and not leaving)]
    return sum(-(-(one.tokens + step) // BLOCK) for one in alive)


sequences = st.lists(st.builds(growing, tokens=st.integers(1, 60), left=st.integers(1, 40)), max_size=12)


@given(sequences)
def test_use_at_every_step_is_exact(running: list[Growing]) -> None:
    projection = Projection(running, sum(one.blocks for one in running), BLOCK)
    for step in range(45):
        assert projection.used(step) == used_at(running, step, leaving=False)
    assert projection.peak == max((used_at(running, one.left, leaving=False) for one in running), default=0)


@given(sequences, st.integers(1, 40), st.integers(1, 40), st.integers(4, 80))
def test_a_candidate_fits_exactly_if_use_with_it_never_exceeds_the_limit(
    running: list[Growing], tokens: int, left: int, limit: int
) -> None:
    projection = Projection(running, sum(one.blocks for one in running), BLOCK)
    candidate = growing(tokens, left)
    steps = sorted({one.left for one in running if one.left <= left} | {left})
    peak = max(used_at([*running, candidate], step, leaving=False) for step in steps)
    assert projection.fits_with(candidate, candidate.blocks, limit) == (peak <= limit)


@given(sequences, st.integers(1, 30), st.integers(10, 80))
def test_the_shadow_time_is_the_first_at_which_the_need_can_be_had(
    running: list[Growing], need: int, limit: int
) -> None:
    projection = Projection(running, sum(one.blocks for one in running), BLOCK)
    step, spare = projection.shadow(need, limit)
    for one in sorted({one.left for one in running}):
        free = limit - used_at(running, one, leaving=True)
        if free >= need:
            assert (step, spare) == (one, free - need)
            return
    assert spare == 0


@given(sequences, sequences, st.integers(1, 30), st.integers(10, 80))
def test_adding_to_a_projection_is_projecting_all(
    running: list[Growing], joining: list[Growing], need: int, limit: int
) -> None:
    together = [*running, *joining]
    whole = Projection(together, sum(one.blocks for one in together), BLOCK)
    grown = Projection(running, sum(one.blocks for one in running), BLOCK)
    for one in joining:
        grown.add(one, one.blocks)
    assert grown.peak == whole.peak
    assert [grown.used(step) for step in range(45)] == [whole.used(step) for step in range(45)]
    assert grown.shadow(need, limit) == whole.shadow(need, limit)
    candidate = growing(need, 20)
    assert grown.fits_with(candidate, candidate.blocks, limit) == whole.fits_with(candidate, candidate.blocks, limit)


@given(sequences, st.integers(1, 60), st.integers(1, 40), st.integers(1, 4), st.integers(10, 120))
def test_forks_to_come_are_projected_as_what_they_will_be(
    running: list[Growing], tokens: int, left: int, forks: int, limit: int
) -> None:
    """Each shares the full blocks and has a copy of the rest: as that many more sequences without the full blocks."""
    parent = replace(growing(tokens, left), forks=forks)
    tails = [growing(tokens % BLOCK, left)] * forks
    used = sum(one.blocks for one in running)
    apart = Projection(
        [*running, growing(tokens, left), *tails], used + parent.blocks + sum(t.blocks for t in tails), BLOCK
    )
    together = Projection([*running, parent], used + parent.blocks, BLOCK)
    assert [together.used(step) for step in range(45)] == [apart.used(step) for step in range(45)]
    peak = max((apart.used(step) for step in range(left + 1)), default=0)
    assert Projection(running, used, BLOCK).fits_with(parent, parent.blocks, limit) == (peak <= limit)
