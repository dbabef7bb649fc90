"""Invariants 1-6 under random traffic, cancels and timing (hypothesis)."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_in_a_box import MS, VOCAB, Box, request

from scheduler.core.limits import Limits
from shared.messages import StepResult, encode


@dataclass(frozen=True)
class Submitted:
    prompt_len: int
    max_tokens: int
    n: int
    priority: int
    ignore_eos: bool
    family: int
    beams: int
    tenant: str
    deadline_ms: int
    salted: bool


submits = st.builds(
    Submitted,
    prompt_len=st.integers(1, 40),
    max_tokens=st.integers(1, 24),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.sampled_from([0, 0, 0, 1]),
    ignore_eos=st.booleans(),
    tenant=st.sampled_from(["", "", "a", "b"]),
    deadline_ms=st.sampled_from([0, 0, 0, 2, 30]),
    beams=st.sampled_from([0, 0, 0, 2, 4]),
    family=st.integers(0, 2),  # prompts of a family share their beginnings
    salted=st.sampled_from([False, False, True]),
)
operations = st.lists(
    st.one_of(
        submits,
        st.tuples(st.just("cancel"), st.integers(0, 30), st.sampled_from([-1, -1, 0, 1])),
        st.tuples(st.just("plan"), st.integers(0, 1)),
        st.tuples(st.just("execute"), st.integers(0, 1)),
        st.tuples(st.just("apply"), st.integers(0, 1)),
        st.tuples(st.just("tick"), st.integers(1, 200)),
    ),
    max_size=60,
)
setups = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "budget": st.integers(6, 40),
        "chunk": st.integers(1, 16),
        "chunked": st.booleans(),
        "run_ahead": st.integers(1, 3),
        "num_blocks": st.integers(6, 40),
        "block_size": st.sampled_from([1, 2, 4, 16]),
        "policy": st.sampled_from(["continuous", "continuous", "continuous", "static", "dynamic"]),
        "workers": st.integers(1, 2),
        "growth_aware": st.booleans(),
        "caching": st.booleans(),
        "host_blocks": st.sampled_from([0, 0, 4, 40]),
        "max_bypasses": st.sampled_from([0, 1, 3, 32]),
        "window": st.sampled_from([0, 2, 64]),
        "long_tokens": st.sampled_from([0, 0, 12]),
        "target_itl_ns": st.sampled_from([0, 1000]),
        "watermark": st.sampled_from([0.0, 0.02, 0.3]),
    }
)


def drive(setup: dict[str, object], ops: list[object]) -> Box:
    limits = Limits(
        max_num_seqs=setup["max_num_seqs"],  # type: ignore[arg-type]
        max_num_batched_tokens=setup["budget"],  # type: ignore[arg-type]
        prefill_chunk_limit=setup["chunk"],  # type: ignore[arg-type]
        enable_chunked_prefill=setup["chunked"],  # type: ignore[arg-type]
        run_ahead=setup["run_ahead"],  # type: ignore[arg-type]
        max_num_queued_reqs=30,
        growth_aware_admission=setup["growth_aware"],  # type: ignore[arg-type]
        enable_prefix_caching=setup["caching"],  # type: ignore[arg-type]
        max_bypasses=setup["max_bypasses"],  # type: ignore[arg-type]
        backfill_window=setup["window"],  # type: ignore[arg-type]
        long_context_tokens=setup["long_tokens"],  # type: ignore[arg-type]
        target_itl_ns=setup["target_itl_ns"],  # type: ignore[arg-type]
        admission_watermark=setup["watermark"],  # type: ignore[arg-type]
        min_prefill_tokens=1,
    )
    box = Box(
        limits, setup["policy"], setup["workers"],  # type: ignore[arg-type]
        num_blocks=setup["num_blocks"], block_size=setup["block_size"], max_model_len=64,  # type: ignore[arg-type]
        host_blocks=setup["host_blocks"],  # type: ignore[arg-type]
    )  # fmt: skip
    results: dict[str, list[StepResult]] = {name: [] for name in box.queues}
    names = list(box.queues)
    count = 0
    for op in ops:
        box.now += MS // 10
        if isinstance(op, Submitted):
            box.submit(
                request(
                    f"r{count}", op.prompt_len, op.max_tokens, seed=count, n=op.n, arrival_ns=count,
                    ignore_eos=op.ignore_eos, priority=op.priority, salt="s" if op.salted else "",
                    prompt=[(op.family * 100 + i * 7) % VOCAB for i in range(op.prompt_len)], tenant=op.tenant,
                    beams=op.beams,
                ),
                box.now + op.deadline_ms * MS if op.deadline_ms else 0,
            )  # fmt: skip
            count += 1
            box.core.check()
            continue
        kind, *args = op  # type: ignore[misc]
        worker = names[args[0] % len(names)]
        if kind == "cancel":
            box.cancel(f"r{args[0]}", args[1])
        elif kind == "plan":
            box.plan(worker)
        elif kind == "execute" and box.queues[worker]:
            results[worker].append(box.execute(worker))
        elif kind == "apply" and results[worker]:
            box.apply(results[worker].pop(0))
        elif kind == "tick":
            box.now += args[0] * MS
            box.events += box.core.tick(box.now)
        box.core.check()
    for worker in names:
        for result in results[worker]:
            box.apply(result)
    box.run()
    return box


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(setups, operations)
def test_invariants_hold_and_every_token_is_right(setup: dict[str, object], ops: list[object]) -> None:
    box = drive(setup, ops)
    for worker in box.queues:
        box.step(worker)  # a last plan may carry drops alone
    box.assert_idle()
    cancelled = {key for key in box.delivered if key not in box.ends}
    for key in cancelled:
        del box.delivered[key]
    box.assert_tokens_right()


@settings(max_examples=settings().max_examples // 2, deadline=None)
@given(setups, operations)
def test_the_same_inputs_give_the_same_plans(setup: dict[str, object], ops: list[object]) -> None:
    first, second = drive(setup, ops), drive(setup, ops)
    assert [encode(plan) for plan in first.plans] == [encode(plan) for plan in second.plans]
    assert first.core.counters == second.core.counters
