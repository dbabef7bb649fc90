"""The persistent batch: deltas in, rows out; joining and leaving move bookkeeping only."""

from __future__ import annotations

import pytest

from shared.messages import Sampling, SlotStart, StepPlan, pack_tokens
from worker.batch import Batch, PlanError, Sampled, Settled


def start(slot: int, tokens: int = 5, pages: int = 2, max_tokens: int = 4, **sampling: object) -> SlotStart:
    return SlotStart(
        slot, f"r{slot}", 1, 0, "g", pack_tokens(range(tokens)), tokens,
        list(range(1 + slot * 4, 1 + slot * 4 + pages)),
        Sampling(1, max_tokens, **sampling),  # type: ignore[arg-type]
    )  # fmt: skip


def plan(**fields: object) -> StepPlan:
    return StepPlan(1, "w", 1, 1, **fields)  # type: ignore[arg-type]


def batch() -> Batch:
    return Batch(block_size=4, num_blocks=40, max_model_len=32, eos_token_ids=frozenset({9}))


def test_a_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    made = batch()
    first = plan(starts=[start(0)], chunks=[(0, 3)])
    step = made.stage(first)
    assert [(row.start, row.count, row.sample) for row in step.rows] == [(0, 3, False)]
    assert made.settle(step, Sampled([])) == Settled()
    step = made.stage(plan(chunks=[(0, 2)]))
    assert step.rows[0].sample
    settled = made.settle(step, Sampled([42]))
    entries = settled.entries
    assert settled.tokens == [42] and not settled.ended and entries[0][1].offset == 0 and entries[0][1].tokens == [42]


def test_rows_after_the_end_are_skipped_and_answered_with_minus_one() -> None:
    made = batch()
    first = plan(starts=[start(0)], chunks=[(0, 5)])
    settled = made.settle(made.stage(first), Sampled([9]))
    entries = settled.entries
    assert settled.ended == [(0, "stop")] and entries[0][1].end == "stop" and entries[0][1].count == 1
    ahead = plan(decodes=[0])
    step = made.stage(ahead)
    assert not step.rows
    assert made.settle(step, Sampled([])) == Settled(tokens=[-1])


@pytest.mark.parametrize(
    ("sampling", "samples", "want"),
    [
        ({"max_tokens": 1}, [9], "stop"),  # EOS as the last allowed token is a stop
        ({"max_tokens": 1}, [7], "length"),
        ({"ignore_eos": True, "max_tokens": 2}, [9, 9], "length"),
        ({"min_tokens": 2, "max_tokens": 4}, [9, 9, 9], "stop"),
        ({"min_tokens": 2, "max_tokens": 2}, [9, 9], "length"),
        ({"stop_token_ids": [6]}, [5, 6], "stop"),
        ({"stop_token_ids": [6], "ignore_eos": True}, [9, 6], "stop"),
    ],
)
def test_how_a_sequence_ends(sampling: dict[str, object], samples: list[int], want: str) -> None:
    made = batch()
    for index, token in enumerate(samples):
        current = plan(starts=[start(0, **sampling)], chunks=[(0, 5)]) if index == 0 else plan(decodes=[0])  # type: ignore[arg-type]
        settled = made.settle(made.stage(current), Sampled([token]))
        assert bool(settled.ended) == (index == len(samples) - 1)
    assert made.slots[0].ended == want


def test_a_resumed_sequence_counts_its_offsets_from_its_prompt() -> None:
    made = batch()
    resumed = SlotStart(0, "r", 1, 0, "g", pack_tokens([1, 2, 3, 4, 5]), 3, [1, 2], Sampling(1, 4))
    first = plan(starts=[resumed], chunks=[(0, 5)])
    entries = made.settle(made.stage(first), Sampled([8])).entries
    assert entries[0][1].offset == 2


def test_the_first_entry_of_a_choice_says_what_the_cache_held() -> None:
    made = batch()
    hit = SlotStart(0, "r", 1, 0, "g", pack_tokens(range(6)), 6, [1, 2], Sampling(1, 4), computed=4)
    fork = SlotStart(1, "r", 1, 1, "g", b"", 6, [], Sampling(1, 4), computed=6, parent=0)
    resumed = SlotStart(2, "s", 1, 0, "g", pack_tokens(range(6)), 5, [3, 4], Sampling(1, 4), computed=4)
    first = plan(starts=[hit, fork, resumed], chunks=[(0, 2), (2, 2)])
    entries = made.settle(made.stage(first), Sampled([7, 7, 7])).entries
    assert [(entry.choice, entry.cached) for _, entry in entries] == [(0, 4), (0, -1), (1, 4)]
    second = plan(decodes=[0])
    made.stage(plan(pages=[(0, [5])]))
    assert made.settle(made.stage(second), Sampled([7])).entries[0][1].cached == -1


def test_a_row_that_fails_ends_its_sequence_alone() -> None:
    made = batch()
    first = plan(starts=[start(0), start(1)], chunks=[(0, 5), (1, 5)])
    settled = made.settle(made.stage(first), Sampled([3, 4], failures={0: "no such grammar"}))
    assert settled.tokens == [0, 4] and settled.ended == [(0, "failed")]
    failed, fine = (entry for _, entry in settled.entries)
    assert (failed.end, failed.count, failed.tokens, failed.reason) == ("failed", 0, [], "no such grammar")
    assert fine.tokens == [4] and not fine.end
    ahead = plan(decodes=[0])
    step = made.stage(ahead)
    assert not step.rows and made.settle(step, Sampled([])).tokens == [-1]


@pytest.mark.parametrize(
    "bad",
    [
        plan(decodes=[3]),
        plan(starts=[start(0), start(0)]),
        plan(starts=[start(0, pages=1)], chunks=[(0, 5)]),
        plan(starts=[start(0)], chunks=[(0, 6)]),
        plan(starts=[start(0)], chunks=[(0, 0)]),
        plan(starts=[start(0, pages=9)]),
        plan(starts=[start(0)], pages=[(0, [41])]),
        plan(starts=[start(0)], pages=[(0, [0])]),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(bad: StepPlan) -> None:
    with pytest.raises(PlanError):
        batch().stage(bad)


def test_slots_grow_as_needed_and_keep_their_tables() -> None:
    made = batch()
    made.stage(plan(starts=[start(0)], chunks=[(0, 5)]))
    made.stage(
        plan(starts=[SlotStart(70, "x", 1, 0, "g", pack_tokens([1]), 1, [30], Sampling(1, 1))], chunks=[(70, 1)])
    )
    assert list(made.tables[0, :2]) == [1, 2] and made.tables[70, 0] == 30


def test_padding_rows_run_on_ended_slots_too() -> None:
    made = batch()
    first = plan(starts=[start(0)], chunks=[(0, 5)])
    made.settle(made.stage(first), Sampled([9]))
    rows = made.stage(plan(padding=[(0, 1)])).rows
    assert rows[0].padding and not rows[0].sample and rows[0].count == 1


def test_the_next_step_is_staged_before_the_tokens_of_the_last_one_are_there() -> None:
    made = batch()
    first = made.stage(plan(starts=[start(0), start(1)], chunks=[(0, 5), (1, 5)]))
    ahead = made.stage(plan(decodes=[0, 1]))
    assert [(row.start, row.count, row.sample) for row in ahead.rows] == [(5, 1, True), (5, 1, True)]
    assert made.slots[0].pending == 2 and made.slots[0].computed == 6
    assert made.settle(first, Sampled([9, 3])).tokens == [9, 3]
    settled = made.settle(ahead, Sampled([7, 4]))  # the row of slot 0 ran in vain
    assert settled.tokens == [-1, 4] and [entry.tokens for _, entry in settled.entries] == [[4]]
    assert made.slots[0].tokens == [*range(5), 9] and made.slots[1].tokens == [*range(5), 3, 4]
    assert not made.slots[0].pending and not made.slots[1].pending


def test_tokens_go_to_the_sequence_that_ran_and_not_to_the_next_one_in_its_slot() -> None:
    made = batch()
    first = made.stage(plan(starts=[start(0)], chunks=[(0, 5)]))
    other = SlotStart(0, "other", 1, 0, "g", pack_tokens([1, 2, 3]), 3, [9], Sampling(1, 4))
    second = made.stage(plan(drops=[0], starts=[other], chunks=[(0, 3)]))
    [(_, entry)] = made.settle(first, Sampled([8])).entries
    assert entry.request_id == "r0" and entry.tokens == [8]
    [(_, entry)] = made.settle(second, Sampled([7])).entries
    assert entry.request_id == "other" and made.slots[0].tokens == [1, 2, 3, 7]


def test_what_adds_to_tokens_that_are_not_there_waits_for_them() -> None:
    made = batch()
    step = made.stage(plan(starts=[start(0)], chunks=[(0, 5)]))
    fork = SlotStart(1, "r0", 1, 1, "g", b"", 5, [], Sampling(1, 4), computed=6, parent=0)
    assert made.must_settle(plan(feeds=[(0, 3)])) and made.must_settle(plan(starts=[fork]))
    assert not made.must_settle(plan(decodes=[0])) and not made.must_settle(plan(starts=[start(2)]))
    made.settle(step, Sampled([3]))
    assert not made.must_settle(plan(starts=[fork], decodes=[0]))


def test_the_tables_that_have_changed_are_known_until_somebody_took_them() -> None:
    made = batch()
    made.stage(plan(starts=[start(0)], chunks=[(0, 5)]))
    assert made.changed == {0: 0}
    made.changed.clear()
    made.stage(plan(pages=[(0, [7])], copies=[(2, 9)], replaces=[(0, 1, 9)]))
    assert made.changed == {0: 1} and list(made.tables[0, :3]) == [1, 9, 7]
