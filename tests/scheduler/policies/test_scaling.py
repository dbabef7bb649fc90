"""How many workers are asked for, on simulated load: steps, ramps, days, bursts, noise."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from scheduler.policies.scaling import Load, Scaling, ScalingPolicy, ScalingState, Why, advance

SLOTS, SERVICE_S, TOKENS, BLOCKS = 16, 8, 1000, 1000
CAPACITY = SLOTS / SERVICE_S  # sequences a second that one worker serves

POLICY = ScalingPolicy()


@dataclass
class Mesh:
    """Sequences of equal length in one queue, and workers that take ``boot_s`` to come and go at once.

    ``rate(t)``: arrivals a second, by chance (Poisson). A sequence takes a slot and its blocks for SERVICE_S.
    """

    rate: Callable[[int], float]
    policy: ScalingPolicy = POLICY
    workers: int = 1
    boot_s: int = 120
    seed: int = 1
    blocks: int = 20  # of a sequence
    waiting: int = 0
    left: int = 0
    ends: deque[int] = field(default_factory=deque)
    booting: list[int] = field(default_factory=list)
    state: ScalingState | None = None
    desired: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    whys: list[Why] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)

    def run(self, seconds: int) -> Mesh:
        chance = random.Random(self.seed)
        for now in range(len(self.desired), len(self.desired) + seconds):
            self.waiting += _poisson(chance, self.rate(now))
            while self.ends and self.ends[0] <= now:
                self.ends.popleft()
            self.workers += sum(at <= now for at in self.booting)
            self.booting = [at for at in self.booting if at > now]
            admitted = max(0, min(self.waiting, self.workers * SLOTS - len(self.ends)))
            self.waiting -= admitted
            self.left += admitted
            self.ends.extend([now + SERVICE_S] * admitted)
            scaling = self.look(now)
            missing = scaling.desired - self.workers - len(self.booting)
            if missing > 0:
                self.booting += [now + self.boot_s] * missing
            elif missing < 0:
                self.booting = self.booting[: max(0, len(self.booting) + missing)]
                self.workers = min(self.workers, max(scaling.desired, 0))
            self.desired.append(scaling.desired)
            self.ready.append(self.workers)
            self.whys.append(scaling.why)
            self.queued.append(self.waiting)
        return self

    def look(self, now: float) -> Scaling:
        load = Load(
            workers=self.workers,
            waiting=self.waiting,
            waiting_tokens=self.waiting * TOKENS,
            left_tokens=self.left * TOKENS,
            running=len(self.ends),
            slots=self.workers * SLOTS,
            used_blocks=min(len(self.ends) * self.blocks, self.workers * BLOCKS),
            total_blocks=self.workers * BLOCKS,
        )
        self.state, scaling = advance(self.policy, self.state, load, now)
        return scaling

    def turns(self, since: int = 0) -> int:
        """How often the number asked for went up after it had gone down, or down after up."""
        signs = [
            1 if after > before else -1 for before, after in itertools.pairwise(self.desired[since:]) if after != before
        ]
        return sum(one != other for one, other in itertools.pairwise(signs))


def _poisson(chance: random.Random, mean: float) -> int:
    if mean <= 0:
        return 0
    count, product = 0, chance.random()
    while product > math.exp(-mean):
        count, product = count + 1, product * chance.random()
    return count


def step(at: int, before: float, after: float) -> Callable[[int], float]:
    return lambda now: after if now >= at else before


@pytest.mark.parametrize("seed", range(2))
def test_a_step_is_followed_in_bounded_time_and_then_nothing_moves(seed: int) -> None:
    mesh = Mesh(step(600, 1.2, 6.0), seed=seed).run(3600)
    needed = math.ceil(6.0 / CAPACITY)
    assert mesh.desired[599] == 1
    first = next(now for now in range(600, 3600) if mesh.desired[now] > 1)
    assert first - 600 <= 45 and mesh.whys[first] is Why.QUEUE
    enough = next(now for now in range(600, 3600) if mesh.desired[now] >= needed)
    assert enough - 600 <= 120, "two raises"
    drained = next(now for now in range(900, 3600) if mesh.queued[now] == 0)
    assert drained - 600 <= 600
    assert max(mesh.desired) <= 2 * needed
    assert mesh.turns() <= 2 and len(set(mesh.desired[-900:])) == 1
    assert needed <= mesh.desired[-1] <= math.ceil(needed / (0.75 * 0.85)) + 1


@pytest.mark.parametrize("seed", range(2))
def test_a_ramp_is_met_ahead_of_it(seed: int) -> None:
    """From 1 to 12 a second within an hour, after a rush that let the rate be measured."""
    mesh = Mesh(lambda now: 3.0 if now < 300 else 1.0 + 11.0 * min(max(now - 1200, 0), 3600) / 3600, seed=seed)
    mesh.run(6000)
    assert mesh.desired[1200] <= 3
    late = [now for now in range(1500, 4800) if mesh.queued[now] > CAPACITY * mesh.ready[now] * POLICY.target_wait_s]
    assert len(late) < 60, "a new worker was there before its load, or soon after"
    rises = [now for now in range(1500, 4800) if mesh.desired[now] > mesh.desired[now - 1]]
    assert len(rises) >= 3
    assert sum(mesh.whys[now] in (Why.FORECAST, Why.MEMORY) for now in rises) > len(rises) / 2
    assert mesh.turns(1200) <= 2
    assert math.ceil(12 / CAPACITY) <= mesh.desired[-1] <= 12


def test_two_days_have_two_waves() -> None:
    day = 10_800  # a short one, for the test's sake
    mesh = Mesh(lambda now: 5.0 - 4.5 * math.cos(2 * math.pi * now / day)).run(2 * day)
    assert mesh.turns() <= 5, "up, down, up, down"
    for noon in (day // 2, day + day // 2):
        assert 5 <= max(mesh.desired[noon - 1800 : noon + 1800]) <= 9, "9.5 a second are 4.75 workers"
        assert min(mesh.desired[noon + day // 2 - 600 : noon + day // 2]) <= 2
    assert sum(queued > 40 for queued in mesh.queued[day:]) < 120
    needed = sum((5.0 - 4.5 * math.cos(2 * math.pi * now / day)) / CAPACITY for now in range(day, 2 * day))
    assert sum(mesh.ready[day:]) < 1.8 * needed, "worker-seconds"


@pytest.mark.parametrize("seed", range(2))
def test_a_burst_is_no_reason_to_buy_a_fleet(seed: int) -> None:
    """60 sequences at once, every ten minutes: a minute's work of one worker is half of it."""
    mesh = Mesh(lambda now: 60.0 if now % 600 == 300 else 0.5, seed=seed).run(7200)
    assert max(mesh.desired) <= 2 and mesh.turns() <= 4, "before the rate was measured, or by chance"
    assert mesh.desired.count(1) > 0.6 * len(mesh.desired)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rate", [0.4, 1.5, 7.0])
def test_noise_alone_moves_nothing(rate: float, seed: int) -> None:
    mesh = Mesh(lambda now: rate, workers=math.ceil(rate / CAPACITY / 0.7), seed=seed).run(5400)
    assert mesh.turns(1800) <= 1
    assert rate / CAPACITY <= mesh.desired[-1] <= math.ceil(rate / CAPACITY / (0.75 * 0.85)) + 1


def test_all_is_given_back_when_nothing_comes_and_one_is_there_at_once_when_something_does() -> None:
    policy = replace(POLICY, min_workers=0)
    mesh = Mesh(lambda now: 3.0 if now < 900 or 5000 <= now < 5600 else 0.0, policy=policy, workers=2).run(6000)
    assert mesh.desired[4999] == 0 and mesh.ready[4999] == 0 and mesh.whys[4999] is Why.STEADY
    gone = next(now for now in range(900, 5000) if mesh.desired[now] == 0)
    assert POLICY.down_after_s <= gone - 900 <= 4 * POLICY.down_after_s
    assert mesh.desired[5001] >= 1 and mesh.whys[5001] is Why.QUEUE
    for now, queued in enumerate(mesh.queued):
        assert not queued or mesh.desired[now] >= 1
    kept = Mesh(lambda now: 0.0, policy=replace(POLICY, min_workers=2), workers=5).run(2000)
    assert kept.desired[-1] == 2


def test_memory_asks_for_more_though_nobody_waits() -> None:
    mesh = Mesh(lambda now: 0.9, blocks=125).run(1800)  # on average 0.9 of a worker's blocks
    assert mesh.desired[-1] == 2 and {why for why in mesh.whys if why is not Why.STEADY} == {Why.MEMORY}
    assert not any(mesh.queued)


def test_bounds_hold_whatever_comes() -> None:
    mesh = Mesh(lambda now: 50.0, policy=replace(POLICY, max_workers=4)).run(1800)
    assert mesh.desired[-1] == max(mesh.desired) == 4
    assert all(after <= 2 * before for before, after in itertools.pairwise(mesh.desired))
    with pytest.raises(ValueError, match="scale_min_workers"):
        replace(POLICY, min_workers=3, max_workers=2)


def test_a_new_leader_keeps_what_is_there() -> None:
    mesh = Mesh(lambda now: 7.0, workers=5).run(1800)
    mesh.state = None
    before = len(mesh.desired)
    mesh.run(int(POLICY.down_after_s))
    assert min(mesh.desired[before:]) >= mesh.ready[before]


def test_one_word_says_why() -> None:
    idle = Load(4, 0, 0, 0, 0, 64, 0, 4000)
    state, told = advance(replace(POLICY, max_workers=3), None, idle, 0.0)
    assert told == Scaling(3, Why.IDLE), "more are there than the bound allows"
    _, told = advance(POLICY, None, replace(idle, workers=1), 0.0)
    assert told == Scaling(1, Why.STEADY)
    _, told = advance(POLICY, None, replace(idle, used_blocks=3900), 0.0)
    assert told == Scaling(5, Why.MEMORY)
    _, told = advance(replace(POLICY, min_workers=0), None, Load(0, 1, 10, 0, 0, 0, 0, 0), 0.0)
    assert told == Scaling(1, Why.QUEUE)
    assert state.rate == 0 and state.forecast(60) == 0


def test_the_same_looks_give_the_same_answers_and_a_look_at_the_same_time_changes_nothing() -> None:
    one, other = (Mesh(step(300, 1.0, 5.0)).run(900) for _ in range(2))
    assert one.state == other.state and one.desired == other.desired
    state = one.state
    assert state is not None
    one.look(899)
    assert one.state is not None and one.state.rate == state.rate and one.state.arriving == state.arriving


@pytest.mark.parametrize("slope", [0.0, 2.0, -1.0])
def test_two_averages_tell_where_a_line_goes(slope: float) -> None:
    state, left = None, 0
    for now in range(5000):
        left += int(20_000 + slope * now)
        state, _ = advance(POLICY, state, Load(1, 0, 0, left, 0, 16, 0, 1000), float(now))
    assert state is not None
    assert state.forecast(120) == pytest.approx(20_000 + slope * 5119, rel=0.01)
