"""Invariants 1-6 with sequences that move, under random traffic, roles, losses, and fetches that fail or take long."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict

from hypothesis import event, given, settings
from hypothesis import strategies as st
from mesh_in_a_box import MS, VOCAB, request
from moving_mesh import MovingBox
from test_core_properties import FIELDS, KINDS, Submitted, act, submits

from scheduler.core.events import Found
from scheduler.core.limits import Limits
from shared.messages import Role, encode

EXAMPLES = settings().max_examples
"""100 in `make test`, thousands in `make fuzz`."""

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
SETUPS: dict[str, tuple[object, ...]] = {
    "roles": ((P, D), (P, D), (M, M), (P, D, D), (P, P, D), (P, D, M), (M, M, M), (D, D), (P, P, D, D)),
    "pools": ("", "", "", "short:-12,long:13-"),
    "max_num_seqs": (6, 5, 4, 3, 2, 1),
    "budget": (16, 64, 64, *range(6, 41)),
    "chunk": (16, 8, 4, 1),
    "run_ahead": (2, 2, 3, 1),
    "pool_tokens": (64, 72, 96, 160, 320),
    "block_size": (4, 4, 1, 2, 16),
    "growth_aware": (False, False, True),
    "caching": (True, True, False),
    "host_blocks": (0, 0, 40),
    "max_bypasses": (32, 1, 0),
    "watermark": (0.0, 0.0, 0.02),
    "max_arrivals": (32, 2, 1),
    "us_per_block": (1, 50, 10_000),
}
MOVES = (
    *["fetch"] * 6, *["fail fetch"] * 2, "lose answer", "hand_over", *["set_role"] * 3, *["time out"] * 2, "scribble",
    *["steps"] * 6,
)  # fmt: skip
ALL_KINDS = (*KINDS, *MOVES)
MUST_HAPPEN = (
    "moves", "failed_moves", "fetches", "failed fetches", "role", "drain", "balance", "cancelled", "preemptions",
    "lost", "moved", "forks", "page_copies", "prefix_hits", "schedulers restarted", "pages taken over",
    "answers repeated or of a lost batch", "gave way", "timed out", "found", "resumed with tokens", "deadline_drops",
)  # fmt: skip

setups = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SETUPS.items()})
acts = st.tuples(st.sampled_from(ALL_KINDS), st.integers(0, 255))
operations = st.lists(
    st.tuples(st.lists(submits, min_size=1, max_size=6), st.lists(acts, min_size=3, max_size=16)),
    min_size=2,
    max_size=5,
).map(lambda phases: [op for submitted, acted in phases for op in (*submitted, *acted)])


def seeded(seed: int) -> tuple[dict[str, object], list[object]]:
    """A set-up and what happens: the same space as the strategies above, evenly."""
    rng = random.Random(seed)
    setup = {name: rng.choice(values) for name, values in SETUPS.items()}
    ops: list[object] = []
    for _ in range(rng.randint(2, 5)):
        ops += [
            Submitted(**{name: rng.choice(values) for name, values in FIELDS.items()})  # type: ignore[arg-type]
            for _ in range(rng.randint(1, 6))
        ]
        ops += [(rng.choice(ALL_KINDS), rng.randrange(256)) for _ in range(rng.randint(3, 14))]
    return setup, ops


def step_alone(box: MovingBox, worker: str) -> None:
    """An iteration of one worker in which no fetch comes to its end."""
    box.now += MS
    while box.knows(worker) and box.plan(worker) is not None:
        pass
    while box.wires[worker].plans:
        box.carry(worker)
    box.work(worker)
    while box.wires[worker].results:
        box.deliver(worker)


def happen(box: MovingBox, kind: str, argument: int) -> None:
    names = list(box.wires)
    worker, value = names[argument % len(names)], argument // 2
    if kind == "fetch":
        box.finish(worker, value)
    elif kind == "fail fetch":
        box.finish(worker, value, "the connection was reset")
    elif kind == "lose answer":
        box.finish(worker, value)
        box.lose_result(worker)
    elif kind == "scribble":
        box.scribble()
    elif kind == "set_role":
        if box.knows(worker):
            box.events += box.core.set_role(worker, (P, D, M)[value % 3], box.now)
    elif kind == "steps":
        for _ in range(1 + value % 6):
            for name in names:
                step_alone(box, name)
            box.scribble()
            if value % 2:
                box.finish(worker, value)
    elif kind == "time out":
        box.now += 5001 * MS
        box.events += box.core.tick(box.now)
    else:
        act(box, kind, argument)


def drive(setup: dict[str, object], ops: list[object]) -> MovingBox:
    limits = Limits(
        max_num_seqs=setup["max_num_seqs"],  # type: ignore[arg-type]
        max_num_batched_tokens=setup["budget"],  # type: ignore[arg-type]
        prefill_chunk_limit=setup["chunk"],  # type: ignore[arg-type]
        run_ahead=setup["run_ahead"],  # type: ignore[arg-type]
        max_num_queued_reqs=30,
        growth_aware_admission=setup["growth_aware"],  # type: ignore[arg-type]
        enable_prefix_caching=setup["caching"],  # type: ignore[arg-type]
        max_bypasses=setup["max_bypasses"],  # type: ignore[arg-type]
        admission_watermark=setup["watermark"],  # type: ignore[arg-type]
        max_arrivals=setup["max_arrivals"],  # type: ignore[arg-type]
        min_prefill_tokens=1,
        pools=setup["pools"],  # type: ignore[arg-type]
        pool_overflow="short>long,long>short" if setup["pools"] else "",
    )
    box = MovingBox(
        limits, "continuous", roles=setup["roles"],  # type: ignore[arg-type]
        us_per_block=setup["us_per_block"],  # type: ignore[arg-type]
        num_blocks=setup["pool_tokens"] // setup["block_size"], max_model_len=64,  # type: ignore[operator]
        block_size=setup["block_size"], host_blocks=setup["host_blocks"], adapters=["x", "y"],
    )  # fmt: skip
    count = 0
    for op in ops:
        box.now += MS // 10
        if isinstance(op, Submitted):
            box.submit(
                request(
                    f"r{count}", op.prompt_len, op.max_tokens, seed=count, n=op.n, arrival_ns=count,
                    ignore_eos=op.ignore_eos, priority=op.priority, salt="s" if op.salted else "",
                    prompt=[(op.family * 100 + i * 7) % VOCAB for i in range(op.prompt_len)], tenant=op.tenant,
                    beams=op.beams, adapter=("", "", "x", "y")[op.prompt_len % 4],
                ),
                box.now + op.deadline_ms * MS if op.deadline_ms else 0,
            )  # fmt: skip
            count += 1
        else:
            happen(box, *op)  # type: ignore[misc]
        box.core.check()
        box.observe()
    box.drain()
    return box


def hold(setup: dict[str, object], ops: list[object]) -> set[str]:
    """Drive, check everything, and return what happened."""
    box = drive(setup, ops)
    for _ in range(3):
        for worker in box.queues:
            box.round(worker)  # a last fetch may be going on
    box.heal()
    box.check_books()
    box.assert_idle()
    box.check_ends()
    for key in [key for key in box.delivered if key not in box.ends]:
        del box.delivered[key]
    box.assert_tokens_right()
    totals = (*asdict(box.core.counters).items(), *box.before.items(), *box.seen.items())
    found = {"found" for one in box.events if isinstance(one, Found)}
    return {name for name, total in totals if total} | box.told | found


def test_invariants_hold_over_many_seeds_and_every_feature_is_reached() -> None:
    hit: Counter[str] = Counter()
    for seed in range(EXAMPLES):
        try:
            hit.update(hold(*seeded(seed)))
        except Exception as error:
            error.add_note(f"with seed {seed}: hold(*seeded({seed}))")
            raise
    missed = [name for name in MUST_HAPPEN if not hit[name]]
    assert not missed, f"never happened: {missed} in {hit}"


@settings(max_examples=EXAMPLES // 5, deadline=None)
@given(setups, operations)
def test_invariants_hold_and_every_token_is_right(setup: dict[str, object], ops: list[object]) -> None:
    for name in sorted(hold(setup, ops)):
        event(name)


@settings(max_examples=EXAMPLES // 10, deadline=None)
@given(setups, operations)
def test_the_same_inputs_give_the_same_plans(setup: dict[str, object], ops: list[object]) -> None:
    first, second = drive(setup, ops), drive(setup, ops)
    assert [encode(plan) for plan in first.plans] == [encode(plan) for plan in second.plans]
    assert first.core.counters == second.core.counters
