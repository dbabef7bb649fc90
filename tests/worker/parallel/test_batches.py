"""Every rank's batch stages the same rows and settles the same tokens, whoever is ahead, or says that it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shared.lifecycle import ServiceFault
from shared.messages import Capacity, Sampling, SlotStart, StepPlan, pack_tokens
from worker.batch import PlanError, Sampled
from worker.parallel.batches import FollowingBatch, LeadingBatch
from worker.parallel.channel import Clear, Message, Order

CAPACITY = Capacity("m", 64, 4, 16, 320, [0])


class Crew:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Message] = []
        self.lost = ""

    def check(self) -> None:
        if self.lost:
            raise ServiceFault(self.lost)

    def tell(self, message: Order | Clear) -> None:
        self.told.append(message)

    def order(self) -> Order:
        order = self.told.pop(0)
        assert isinstance(order, Order)
        return order


class Pair:
    """Rank 0's batch and a follower's, with the test in charge of what each has done."""

    def __init__(self) -> None:
        self.crew = Crew()
        self.differences: list[str] = []
        self.leading = LeadingBatch(CAPACITY, self.crew)
        self.following = FollowingBatch(CAPACITY, self.differences.append)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def plan(step: int, start: int = -1, **given: object) -> StepPlan:
    """Of slot 0, or where it starts: 3 prompt tokens and room for 8."""
    starts = []
    if start >= 0:
        starts = [SlotStart(start, "r", 1, 0, "g", pack_tokens([5, 6, 7]), 3, [1, 2], Sampling(1, 8))]
        given = {"chunks": [(start, 3)], **given}
    return StepPlan(1, "w", 1, step, starts=starts, **given)  # type: ignore[arg-type]


def follow(pair: Pair) -> Callable[[list[int]], Any]:
    """Stage on the follower what rank 0 has handed on; what is returned settles it."""
    order = pair.crew.order()
    pair.following.expect(order)
    step = pair.following.stage(order.plan)
    return lambda tokens: pair.following.settle(step, Sampled(tokens))


def test_tokens_travel_with_the_next_plan_and_are_compared(pair: Pair) -> None:
    step = pair.leading.stage(plan(1, start=0))
    settle = follow(pair)
    pair.leading.settle(step, Sampled([9]))
    settle([9])
    step = pair.leading.stage(plan(2, decodes=[0]))
    settle = follow(pair)
    assert not pair.differences
    pair.leading.settle(step, Sampled([10]))
    settle([11])
    assert not pair.differences, "nobody has told it yet"
    pair.leading.stage(plan(3, decodes=[0]))
    follow(pair)
    assert pair.differences == ["it chose other tokens than rank 0 in step 2 (1 of 1)"]


def test_a_follower_that_is_behind_compares_once_it_knows(pair: Pair) -> None:
    step = pair.leading.stage(plan(1, start=0))
    settle = follow(pair)
    pair.leading.settle(step, Sampled([9]))
    pair.leading.stage(plan(2, decodes=[0]))
    pair.following.expect(pair.crew.order())
    assert not pair.differences
    settle([8])
    assert pair.differences


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_that_ends_has_a_row_on_all_ranks_or_on_none(pair: Pair, ahead: bool) -> None:
    """Its end may be known here, and not there yet, when the step after it is staged."""
    first = pair.leading.stage(plan(1, start=0))
    settle_first = follow(pair)
    if ahead:  # rank 0 launches the next step before it knows that the first one's token is an end token
        second = pair.leading.stage(plan(2, decodes=[0]))
        pair.leading.settle(first, Sampled([0]))
        settle_first([0])
        settle_second = follow(pair)
    else:  # the follower is the one that does
        pair.leading.settle(first, Sampled([0]))
        second = pair.leading.stage(plan(2, decodes=[0]))
        settle_second = follow(pair)
        settle_first([0])
    tokens = [3] if ahead else []
    assert len(second.rows) == len(tokens)
    assert pair.leading.settle(second, Sampled(tokens)).tokens == [-1]
    settle_second(tokens)
    step = pair.leading.stage(plan(3, start=0))  # its slot is another's
    settle = follow(pair)
    pair.leading.settle(step, Sampled([4]))
    settle([4])
    pair.leading.stage(plan(4, decodes=[0]))
    follow(pair)
    assert not pair.differences
    assert pair.following.slots[0].tokens == pair.leading.slots[0].tokens == [5, 6, 7, 4]


def test_a_grammar_that_fails_on_rank_0_fails_everywhere(pair: Pair) -> None:
    """A follower may have been quicker to compile it; but not the other way round."""
    step = pair.leading.stage(plan(1, start=0))
    settle = follow(pair)
    pair.leading.settle(step, Sampled([7], failures={0: "too slow"}))
    settle([7])
    pair.leading.stage(plan(2, start=0))
    follow(pair)  # else the slot were taken
    assert not pair.differences


def test_a_plan_that_fits_no_batch_is_handed_to_nobody(pair: Pair) -> None:
    with pytest.raises(PlanError):
        pair.leading.stage(plan(1, decodes=[3]))
    assert not pair.crew.told and not pair.leading.handed_on
    pair.leading.clear()
    assert pair.crew.told == [Clear()]


def test_a_lost_follower_fails_the_next_step(pair: Pair) -> None:
    pair.crew.lost = "rank 1 was killed by SIGKILL"
    with pytest.raises(ServiceFault, match="rank 1 was killed by SIGKILL"):
        pair.leading.stage(plan(1, start=0))


def test_a_reset_forgets_what_was_to_be_compared(pair: Pair) -> None:
    step = pair.leading.stage(plan(1, start=0))
    settle = follow(pair)
    settle([8])
    pair.leading.settle(step, Sampled([9]))
    pair.leading.clear()
    pair.following.clear()
    pair.crew.told.clear()
    pair.leading.stage(plan(1, start=0))
    follow(pair)
    assert not pair.differences
