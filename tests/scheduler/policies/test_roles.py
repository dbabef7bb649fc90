"""Who computes prompts and who decodes, on simulated load that shifts, swings and is noise."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.roles import Member, RolePolicy, RolesState, advance, best_split
from shared.capacity import Role

POLICY = RolePolicy()
SPLIT = (Role.PREFILL, Role.DECODE)


@dataclass
class Mesh:
    """Work as a fluid. ``load(t)``: (workers that arriving prompts would keep busy, workers that the decodes which
    come of them would). A decode lives for LIFE_S; decodes without room stay where prompts are computed."""

    load: Callable[[int], tuple[float, float]]
    roles: list[Role]
    policy: RolePolicy = POLICY
    noise: float = 0.0
    seed: int = 1
    backlog_s: float = 0.0
    decoding: float = 0.0
    done_s: float = 0.0
    state: RolesState | None = None
    history: list[int] = field(default_factory=list)

    LIFE_S = 10.0

    def run(self, seconds: int) -> Mesh:
        chance = random.Random(self.seed)
        for now in range(len(self.history), len(self.history) + seconds):
            prompts, decodes = self.load(now)
            factor = max(0.0, chance.gauss(1.0, self.noise))
            workers = len(self.roles)
            prefill = sum(role is Role.PREFILL for role in self.roles)
            self.backlog_s += prompts * factor
            stuck = max(0.0, self.decoding - (workers - prefill))
            did = max(0.0, min(self.backlog_s, prefill - stuck))
            self.backlog_s -= did
            self.done_s += did
            each_s = decodes / prompts if prompts else 0.0
            self.decoding += (did * each_s - self.decoding) / self.LIFE_S
            self.look(now)
            self.history.append(sum(role is Role.PREFILL for role in self.roles))
        return self

    def look(self, now: float) -> dict[str, Role]:
        workers = len(self.roles)
        prefill = max(1, sum(role is Role.PREFILL for role in self.roles))
        members = [
            Member(
                f"w{index:02}", role, self.done_s / workers,
                min(6.0, self.backlog_s / prefill) if role is Role.PREFILL else 0.0,
                min(1.2, self.decoding / max(1, workers - prefill)) if role is Role.DECODE
                else max(0.0, self.decoding - (workers - prefill)) / prefill,
                index,
            )
            for index, role in enumerate(self.roles)
        ]  # fmt: skip
        waiting_s = max(0.0, self.backlog_s - 6.0 * prefill)  # more than their workers have taken
        self.state, changes = advance(self.policy, self.state, members, now, waiting_s)
        for name, role in changes.items():
            self.roles[int(name[1:])] = role
        return changes

    @property
    def changes(self) -> int:
        return sum(one != other for one, other in itertools.pairwise(self.history))


def split(prefill: int, decode: int) -> list[Role]:
    return [Role.PREFILL] * prefill + [Role.DECODE] * decode


def member(name: str, role: Role, backlog_s: float = 0.0, sequences: int = 0, decodes: float = 0.0) -> Member:
    return Member(name, role, 0.0, backlog_s, decodes, sequences)


@pytest.mark.parametrize(
    ("prompts", "decodes", "workers", "prefill", "best"),
    [
        (2.0, 6.0, 16, 8, 4), (6.0, 2.0, 16, 4, 12), (0.0, 5.0, 4, 2, 1), (5.0, 0.0, 4, 2, 3), (1.0, 1.0, 2, 1, 1),
        (0.0, 0.0, 8, 3, 3), (100.0, 1.0, 3, 1, 2),
    ],
)  # fmt: skip
def test_the_busier_kind_is_least_busy(prompts: float, decodes: float, workers: int, prefill: int, best: int) -> None:
    assert best_split(prompts, decodes, workers, prefill) == best


@given(
    st.floats(0, 100), st.floats(0, 100), st.integers(2, 64), st.integers(0, 64)
)  # fmt: skip
def test_there_is_always_one_of_each(prompts: float, decodes: float, workers: int, prefill: int) -> None:
    assert 1 <= best_split(prompts, decodes, workers, prefill) <= workers - 1


def test_a_load_that_shifts_is_followed_within_a_minute_and_a_half_and_then_nothing_moves() -> None:
    """From mostly decoding to mostly reading, past what the first split can do."""
    mesh = Mesh(lambda now: (2.5, 9.0) if now < 300 else (8.0, 3.5), split(4, 12), decoding=9.0).run(900)
    assert set(mesh.history[:300]) <= {3, 4}
    first = next(now for now in range(300, 900) if mesh.history[now] != mesh.history[299])
    assert first - 300 <= 20
    enough = next(now for now in range(300, 900) if mesh.history[now] >= 9)
    assert enough - 300 <= 90
    assert 9 <= mesh.history[-1] <= 12
    assert len(set(mesh.history[600:])) == 1, "no change any more"
    assert mesh.backlog_s < 10


def test_a_shift_is_seen_however_few_workers_compute_prompts() -> None:
    """Two cannot do more than two workers' work: what they leave tells how many there should be, at once."""
    mesh = Mesh(lambda now: (1.5, 9.0) if now < 100 else (11.0, 3.0), split(2, 14), decoding=9.0).run(200)
    assert mesh.history[99] <= 3
    assert max(mesh.history[100:115]) >= 10


def test_the_way_back_is_found_too() -> None:
    mesh = Mesh(lambda now: (8.0, 3.5) if now < 300 else (2.5, 9.0), split(10, 6)).run(900)
    assert mesh.history[-1] <= 5 and mesh.decoding < 16 - mesh.history[-1]


@pytest.mark.parametrize("seed", range(3))
def test_noise_moves_nobody(seed: int) -> None:
    """Load that is well split already, and varies by a third from second to second."""
    mesh = Mesh(lambda _: (3.2, 9.6), split(4, 12), noise=0.33, seed=seed).run(3600)
    assert mesh.changes <= 2


def test_what_is_not_busy_is_left_alone() -> None:
    mesh = Mesh(lambda _: (0.3, 4.0), split(8, 8)).run(600)
    assert mesh.changes == 0, "prompts need one worker at most, but nobody would gain anything"


def test_both_kinds_past_their_limits_are_split_by_what_each_does() -> None:
    """Twice what sixteen workers can do, from two sides: it ends near where prompts and decodes balance."""
    for first in (2, 14):
        mesh = Mesh(lambda _: (8.0, 24.0), split(first, 16 - first)).run(1200)
        assert 3 <= mesh.history[-1] <= 7, first


def test_a_change_waits_until_it_has_been_better_for_a_while_and_for_the_effect_of_the_one_before() -> None:
    mesh = Mesh(lambda _: (9.0, 1.0), split(2, 14)).run(120)
    moments = [now for now in range(1, 120) if mesh.history[now] != mesh.history[now - 1]]
    assert len(moments) > 1 and moments[0] >= POLICY.hold_s
    assert all(later - earlier >= POLICY.every_s for earlier, later in itertools.pairwise(moments))


def test_one_worker_does_both_and_a_second_one_splits_them() -> None:
    state, changes = advance(POLICY, None, [member("a", Role.PREFILL)], 0)
    assert changes == {"a": Role.MIXED}
    assert advance(POLICY, state, [member("a", Role.MIXED)], 1)[1] == {}
    state, changes = advance(POLICY, state, [member("a", Role.MIXED, sequences=5), member("b", Role.DECODE)], 2)
    assert changes == {"a": Role.PREFILL}
    assert advance(POLICY, None, [], 3)[1] == {}


@pytest.mark.parametrize("left", SPLIT)
def test_a_kind_that_is_lost_is_replaced_at_once(left: Role) -> None:
    members = [member(name, left, sequences=place) for place, name in enumerate("cab")]
    _, changes = advance(POLICY, RolesState(0.0, changed_s=0.0), members, 1)
    other = Role.DECODE if left is Role.PREFILL else Role.PREFILL
    assert changes == {"c": other}, "the one that has least to hand over"


def test_those_with_the_least_to_hand_over_change() -> None:
    def after(loads: tuple[float, float], members: list[Member]) -> dict[str, Role]:
        prompts, decodes = loads
        left_s = sum(one.backlog_s for one in members)
        members[-1] = replace(members[-1], decodes=decodes)
        state = RolesState(9.0, {}, left_s, prompts, 1.0, better_since_s=0.0)
        return advance(POLICY, state, members, 10)[1]

    decoding = [member("p", Role.PREFILL)] + [member(f"d{left}", Role.DECODE, sequences=left) for left in (7, 3, 5)]
    assert after((2.0, 1.2), decoding) == {"d3": Role.PREFILL}
    reading = [member(f"p{left}", Role.PREFILL, backlog_s=left) for left in (7, 3, 5)] + [member("d", Role.DECODE)]
    assert after((1.5, 1.2), reading) == {"p3": Role.DECODE}


def test_a_worker_that_begins_again_does_not_count_twice() -> None:
    state: RolesState | None = None
    for now, done in enumerate((100.0, 100.5, 0.0, 0.5, 1.0)):
        members = [Member("a", Role.PREFILL, done, 0, 0, 0), member("b", Role.DECODE)]
        state, _ = advance(POLICY, state, members, now)
    assert state is not None
    assert 0 < state.loads[0] <= 0.5


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(Role), st.floats(0, 20), st.floats(0, 2), st.integers(0, 300)), max_size=12
    ),
    st.integers(1, 20),
)  # fmt: skip
def test_whatever_is_seen_the_roles_are_valid_and_settle(
    seen: list[tuple[Role, float, float, int]], looks: int
) -> None:
    """A load that stays as it is: after every look there are both kinds, and in the end nothing changes."""
    roles = [role for role, *_ in seen]
    state: RolesState | None = None
    calm = 0
    for now in range(looks + 150):
        members = [
            Member(str(index), roles[index], 0.2 * now, backlog_s, decodes, sequences)
            for index, (_, backlog_s, decodes, sequences) in enumerate(seen)
        ]
        state, changes = advance(POLICY, state, members, now)
        for name, role in changes.items():
            assert roles[int(name)] is not role
            roles[int(name)] = role
        if len(roles) == 1:
            assert roles == [Role.MIXED]
        elif roles:
            assert set(roles) == set(SPLIT)
        calm = 0 if changes else calm + 1
    assert calm > 60
    assert not state or math.isfinite(sum(state.loads))
