"""Prompts and decodes on simulated workers of their own, and roles that follow the load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.simulate.report import SERVED
from headrace.simulate.roles import parsed_roles, roles_of, workers_of
from headrace.simulate.scenario import Run, Scenario, run
from headrace.simulate.workload import LENGTHS, merged, stream, uniform
from scheduler.policies.roles import RolePolicy
from shared.config import ConfigError
from shared.messages import Role, StepPlan

SPLIT = Scenario(workers=3, roles="prefill=1,decode=2", max_model_len=2048)


def decoded_by(scenario: Scenario, count: int = 40, rate: float = 20.0) -> tuple[dict[str, int], Run]:
    """Decodes that each worker was asked for, and the run."""
    asked: dict[str, int] = {}

    def see(plan: StepPlan) -> None:
        asked[plan.worker] = asked.get(plan.worker, 0) + len(plan.decodes)

    return asked, run(scenario, stream(uniform(300, 60), count, 1, rate), on_plan=see)


def test_prompts_are_computed_at_one_kind_and_go_on_at_the_other() -> None:
    asked, done = decoded_by(SPLIT)
    assert done.figures.served == 40 and done.measured.tokens == 40 * 60
    assert done.figures.moves == 40
    assert done.core.counters.prefill_tokens == 40 * 300, "nothing was computed twice"
    assert asked["w0"] < 0.2 * sum(asked.values()), "those until the blocks are there"
    blocks = 300 // 16  # at least
    assert done.figures.moved_gb >= 40 * blocks * 16 * 131_072 / 1e9
    done.core.check()
    assert all(worker.pool.num_free == worker.pool.num_blocks for worker in done.core.workers.values())


def test_a_narrow_link_makes_pauses_and_the_same_tokens() -> None:
    wide, narrow = (decoded_by(replace(SPLIT, link_gbit=gbit))[1] for gbit in (400.0, 4.0))
    assert narrow.measured.tokens == wide.measured.tokens
    assert narrow.figures.pause_p50 > 2 * wide.figures.pause_p50 > 0


def test_mixed_workers_move_nothing() -> None:
    _, done = decoded_by(replace(SPLIT, roles=""))
    assert (done.figures.moves, done.figures.moved_gb) == (0, 0.0)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_ends_once_and_gives_its_blocks_back(seed: int) -> None:
    """Little memory, cancels, choices, roles that change: with the core's own checks at the end."""
    policy = RolePolicy(busy=0.0, gain=0.01, average_s=1.0, hold_s=0.0, every_s=1.0)
    scenario = replace(
        SPLIT, workers=4, roles="prefill=2,decode=2", kv_tokens=6000, plan_roles=True, role_policy=policy
    )
    plain = stream(LENGTHS["mixed"], 60, seed, 40.0, longest=2048)
    left = [replace(one, cancel_ns=1 + at * 40_000_000) if at % 5 == 0 else one for at, one in enumerate(plain)]
    done = run(scenario, merged(left, stream(LENGTHS["instruct"], 20, seed, 10.0, n=3, longest=2048)))
    assert all(done.measured.reason)
    assert set(done.measured.reason) <= {*SERVED, "cancelled"}
    assert done.figures.moves > 0 and done.measured.roles
    done.core.check()
    assert all(worker.pool.num_free == worker.pool.num_blocks for worker in done.core.workers.values())


def test_the_same_seed_gives_the_same_moves() -> None:
    scenario = replace(SPLIT, plan_roles=True)
    (_, one), (_, two) = decoded_by(scenario), decoded_by(scenario)
    assert one.figures == two.figures and one.measured.roles == two.measured.roles


def test_roles_follow_the_load() -> None:
    """One worker of four reads long prompts for three that have next to nothing to decode."""
    policy = RolePolicy(average_s=2.0, hold_s=1.0, every_s=2.0)
    scenario = replace(SPLIT, workers=4, roles="prefill=1,decode=3", role_policy=policy)
    requests = stream(uniform(1500, 10), 160, 1, 14.0)
    fixed, planned = (run(replace(scenario, plan_roles=plan), requests) for plan in (False, True))
    assert {role for _, _, role in planned.measured.roles} == {Role.PREFILL}
    assert sum(worker.role is Role.PREFILL for worker in planned.core.workers.values()) in (2, 3)
    assert not fixed.measured.roles
    assert planned.figures.ttft_p99 < fixed.figures.ttft_p99 / 2


def test_roles_in_words() -> None:
    assert parsed_roles("prefill=1,decode=2") == parsed_roles("prefill=1/decode=2") == {Role.PREFILL: 1, Role.DECODE: 2}
    assert roles_of(4, "decode=1,prefill=1") == [Role.DECODE, Role.PREFILL, Role.MIXED, Role.MIXED]
    assert (workers_of(None, "prefill=1,decode=2"), workers_of(None, ""), workers_of(5, "decode=2")) == (3, 1, 5)
    assert (workers_of(None, "prefill=1,decode=2", 2), workers_of(None, "", 4), workers_of(5, "", 6)) == (3, 4, 5)


@pytest.mark.parametrize("text", ["prefill", "prefill=0", "prefill=x", "writer=1", "decode=1,decode=1", ",", "=2"])
def test_roles_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="is no ROLE=COUNT, each of mixed, prefill, decode once"):
        parsed_roles(text)


def test_more_roles_than_workers() -> None:
    with pytest.raises(ConfigError, match="names 3 workers, of 2"):
        workers_of(2, "prefill=1,decode=2")
