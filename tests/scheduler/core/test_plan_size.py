"""A plan's message stays short, however many sequences could join at once and whatever travels with each."""

from __future__ import annotations

import msgspec
from mesh_in_a_box import Box, request

from scheduler.core.limits import Limits
from shared.messages import StepPlan, Submit, encode

GRAMMAR_BYTES = 2000
MOST_BYTES = 5000


def box() -> Box:
    return Box(
        Limits(max_num_seqs=32, max_num_batched_tokens=64, prefill_chunk_limit=32, max_plan_start_bytes=MOST_BYTES),
        num_blocks=256,
    )


def constrained(submit: Submit) -> Submit:
    # Two bytes for each character on the wire.
    sampling = msgspec.structs.replace(submit.sampling, grammar="\u00e9" * (GRAMMAR_BYTES // 2))
    return msgspec.structs.replace(submit, sampling=sampling)


def longest(plans: list[StepPlan]) -> int:
    return max(len(encode(plan)) for plan in plans)


def test_grammars_of_many_requests_are_spread_over_plans() -> None:
    mesh = box()
    for index in range(20):
        mesh.submit(constrained(request(f"r{index}", 4, 6)))
    mesh.run()
    assert len(mesh.ends) == 20
    assert longest(mesh.plans) < MOST_BYTES + GRAMMAR_BYTES + 1000


def test_a_grammar_travels_with_every_fork() -> None:
    mesh = box()
    mesh.submit(constrained(request("r", 9, 6, n=16)))
    mesh.run()
    assert len(mesh.ends) == 16
    assert longest(mesh.plans) < MOST_BYTES + GRAMMAR_BYTES + 1000
    assert max(sum(start.parent >= 0 for start in plan.starts) for plan in mesh.plans) > 0


def test_without_a_grammar_all_choices_fork_at_once() -> None:
    mesh = box()
    mesh.submit(request("r", 9, 6, n=16))
    mesh.run()
    assert max(sum(start.parent >= 0 for start in plan.starts) for plan in mesh.plans) == 15
