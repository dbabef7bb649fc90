"""Sequences that go on at another worker: by role, from a worker that stops, and for want of blocks."""

from __future__ import annotations

import msgspec
import pytest
from mesh_in_a_box import MS, Box, capacity, prompt_of, request
from moving_mesh import MovingBox

from scheduler.core.events import Failed, Moved, NotMoved
from scheduler.core.limits import Limits
from scheduler.core.move import Why
from scheduler.core.moving import MOST_GONE
from scheduler.core.sequence import Sequence
from scheduler.core.step_time import PlannedWork
from scheduler.core.transfers import LOOKED_AT, MOST_PACES, Transfers
from scheduler.core.worker_state import WorkerState
from shared.messages import Capacity, Role

PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED
ROOMY = Limits(max_num_seqs=8, max_num_batched_tokens=32, prefill_chunk_limit=16)


def box_of(*roles: Role, limits: Limits = ROOMY, **cap: int) -> MovingBox:
    return MovingBox(limits, roles=roles, **{"num_blocks": 64, **cap})  # type: ignore[arg-type]


def rounds(box: MovingBox, count: int) -> None:
    for _ in range(count):
        for worker in box.wires:
            box.round(worker)


def finished(box: MovingBox) -> MovingBox:
    """Until all has ended, and all is right."""
    box.drain()
    rounds(box, 3)
    box.assert_idle()
    box.assert_tokens_right()
    return box


def moved(box: MovingBox) -> list[Moved]:
    return [one for one in box.events if isinstance(one, Moved)]


def test_a_prompt_is_computed_at_one_worker_and_goes_on_at_another() -> None:
    box = box_of(PREFILL, DECODE)
    box.submit(request("r", 40, 20))
    box.drain()
    (move,) = moved(box)
    assert (move.source, move.sequence.worker, move.why) == ("w0", "w1", "role")
    assert move.bytes == 32 * move.blocks and move.fetch_us == 50 * move.blocks and move.transport == "box"
    starts = [(plan.worker, start) for plan in box.plans for start in plan.starts]
    assert [worker for worker, _ in starts] == ["w0", "w1"]
    first, second = (start for _, start in starts)
    assert second.attempt == first.attempt and second.computed == len(second.tokens) // 4 - 1
    finished(box)
    assert box.core.counters.recomputed_tokens == 0 and box.core.counters.prefill_tokens == 40


def test_blocks_are_fetched_while_the_prompt_is_computed() -> None:
    box = box_of(PREFILL, DECODE)
    box.submit(request("r", 100, 12))
    box.drain()
    asked = [plan for plan in box.plans if plan.fetches]
    last_chunk = max(place for place, plan in enumerate(box.plans) if plan.chunks)
    early = [plan for plan in asked if box.plans.index(plan) < last_chunk]
    assert early and len(early[0].fetches[0].pages) >= 8, "blocks wait for the end of the prompt"
    assert len(asked[-1].fetches[0].pages) <= 5, "the sequence waits for more than its last blocks"
    finished(box)


def test_a_prefix_that_is_still_being_computed_is_not_fetched() -> None:
    """What a newcomer hits counts as computed at once; it is there when the plan that computes it has run."""
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=48, enable_chunked_prefill=False, run_ahead=3)
    box = box_of(PREFILL, DECODE, limits=limits)
    box.now = MS
    prefix = prompt_of("a", 40)
    box.submit(request("d", 8, 30))
    box.plan("w0")
    box.submit(request("a", 40, 8, prompt=prefix, arrival_ns=1))
    box.plan("w0")
    box.submit(request("c", 44, 4, arrival_ns=2))  # leaves nothing of the budget
    box.submit(request("b", 32, 12, prompt=[*prefix[:28], 1, 2, 3, 4], arrival_ns=3))
    box.plan("w0")
    (hit,) = box.core.sequences_of("b")
    assert hit.move is not None and (hit.scheduled, hit.in_flight) == (28, 0)
    while box.wires["w0"].plans:
        box.carry("w0")
    box.work("w0")
    box.deliver("w0")
    while box.plan("w1") is not None:
        pass
    while box.wires["w1"].plans:
        box.carry("w1")
    box.work("w1")
    while box.fetching["w1"]:
        box.finish("w1")
    finished(box)
    assert moved(box)


def test_new_prompts_go_to_prefill_and_mixed_workers_only() -> None:
    box = box_of(PREFILL, DECODE, MIXED)
    for number in range(6):
        box.submit(request(f"r{number}", 20, 10, arrival_ns=number))
    finished(box)
    first = {}
    for plan in box.plans:
        for start in plan.starts:
            first.setdefault(start.request_id, plan.worker)
    assert set(first.values()) == {"w0", "w2"}
    assert {one.sequence.worker for one in moved(box)} == {"w1"}, "a mixed worker keeps its own"


def test_mixed_workers_take_what_decode_workers_have_no_room_for() -> None:
    box = box_of(PREFILL, DECODE, MIXED, limits=Limits(max_num_seqs=2, max_num_batched_tokens=64))
    box.core.worker_draining("w2")
    for number in range(2):
        box.submit(request(f"r{number}", 8, 60, arrival_ns=number))
    rounds(box, 12)
    assert {one.sequence.worker for one in moved(box)} == {"w1"} and len(box.core.workers["w1"].running) == 2
    box.core.workers["w2"].draining = False
    box.submit(request("last", 8, 30, arrival_ns=9))
    finished(box)
    assert moved(box)[-1].sequence.request_id == "last" and moved(box)[-1].sequence.worker == "w2"


def test_without_room_elsewhere_a_sequence_decodes_where_it_is() -> None:
    box = box_of(PREFILL, DECODE, limits=Limits(max_num_seqs=1, max_num_batched_tokens=64))
    box.submit(request("a", 8, 60))
    rounds(box, 12)
    box.submit(request("b", 8, 10, arrival_ns=1))
    box.drain()
    assert [one.sequence.request_id for one in moved(box)] == ["a"]
    ran = {plan.worker for plan in box.plans for start in plan.starts if start.request_id == "b"}
    assert ran == {"w0"}
    finished(box)


def test_a_decode_worker_alone_does_everything() -> None:
    box = box_of(DECODE)
    box.submit(request("r", 20, 10))
    finished(box)
    assert ("r", 0) in box.ends


def test_a_decode_worker_takes_what_no_prefill_worker_can_hold() -> None:
    box = box_of(PREFILL, DECODE)
    box.crash("w0")
    box.capacities["w0"] = msgspec.structs.replace(box.capacities["w0"], num_blocks=8)
    box.beat("w0")
    rounds(box, 2)
    box.submit(request("long", 60, 20))
    finished(box)
    assert ("long", 0) in box.ends and not moved(box)


def test_a_role_can_be_given_at_run_time() -> None:
    box = box_of(MIXED, MIXED)
    box.submit(request("a", 12, 40))
    rounds(box, 4)
    ran = next(plan.worker for plan in box.plans if plan.starts)
    other = "w1" if ran == "w0" else "w0"
    box.core.set_role(ran, PREFILL, box.now)
    box.core.set_role(other, DECODE, box.now)
    assert box.core.workers[ran].takes_new and not box.core.workers[other].takes_new
    box.drain()
    assert [one.sequence.worker for one in moved(box)] == [other]
    box.restart_batch(ran)
    rounds(box, 2)
    assert box.core.workers[ran].role is PREFILL, "a new batch of the same process keeps it"
    box.crash(ran)
    box.beat(ran)
    rounds(box, 2)
    assert box.core.workers[ran].role is MIXED, "a new process has the role it was started for"
    finished(box)


def test_a_fetch_that_fails_leaves_the_sequence_where_it_is() -> None:
    box = box_of(PREFILL, DECODE)
    box.submit(request("r", 40, 20))
    for _ in range(200):
        box.now += MS
        for worker in box.wires:
            while box.plan(worker):
                pass
            while box.wires[worker].plans:
                box.carry(worker)
            box.work(worker)
            box.finish(worker, reason="the connection was reset")
            while box.wires[worker].results:
                box.deliver(worker)
        if ("r", 0) in box.ends:
            break
    assert not moved(box)
    failed = [one for one in box.events if isinstance(one, NotMoved)]
    assert len(failed) == box.core.counters.failed_moves == 3, "it is not tried for ever"
    assert box.core.counters.recomputed_tokens == box.core.counters.preemptions == 0
    finished(box)


def test_a_fetch_that_takes_too_long_is_not_waited_for() -> None:
    box = box_of(PREFILL, DECODE)
    box.submit(request("r", 10, 30))
    while not box.fetching["w1"]:
        box.now += MS
        for worker in box.wires:
            while box.plan(worker):
                pass
            while box.wires[worker].plans:
                box.carry(worker)
            box.work(worker)
            while box.wires[worker].results:
                box.deliver(worker)
    held = box.core.workers["w1"].pool.num_used
    box.now += 6 * 10**9
    box.events += box.core.tick(box.now)
    assert [one.reason for one in box.events if isinstance(one, NotMoved)] == ["it took more than 5 s"]
    assert 0 < box.core.workers["w1"].pool.num_used <= held, "what may still be written is held"
    box.core.check()
    finished(box)


@pytest.mark.parametrize("who", ["w0", "w1"])
def test_a_worker_that_is_lost_in_the_middle_of_a_move(who: str) -> None:
    box = box_of(PREFILL, DECODE)
    box.submit(request("r", 60, 20))
    while not box.fetching["w1"]:
        rounds(box, 1)
    box.crash(who)
    box.lose(who)
    lost = [one for one in box.events if isinstance(one, Failed)]
    assert bool(lost) == (who == "w0"), "without the target it goes on at the source, in the same attempt"
    box.core.check()
    finished(box)


def test_what_is_cancelled_on_its_way_frees_both_sides() -> None:
    box = box_of(PREFILL, DECODE)
    box.submit(request("r", 60, 20))
    while not box.core.workers["w1"].fetching:
        rounds(box, 1)
    box.cancel("r")
    box.core.check()
    assert box.core.workers["w1"].pool.num_used > 0, "the fetch writes on"
    rounds(box, 3)
    box.assert_idle()


def test_a_worker_that_stops_hands_over_by_blocks() -> None:
    box = box_of(MIXED, MIXED)
    for number in range(3):
        box.submit(request(f"r{number}", 20, 40, arrival_ns=number))
    rounds(box, 6)
    before = {number: len(box.delivered[f"r{number}", 0]) for number in range(3)}
    assert all(before.values())
    box.hand_over("w0")
    for _ in range(30):
        rounds(box, 1)
        box.hand_over("w0")
    assert not list(box.core.workers["w0"].sequences()) and not box.batches["w0"].slots
    assert moved(box) and {one.why for one in moved(box)} == {"drain"}
    assert not [one for one in box.events if isinstance(one, Failed)], "no gateway has to resume anything"
    finished(box)


@pytest.mark.parametrize(("roles", "target"), [((DECODE, PREFILL), "w1"), ((DECODE, PREFILL, DECODE), "w2")])
def test_the_last_decode_worker_that_stops_hands_over_to_one_for_prompts(roles: tuple[Role, ...], target: str) -> None:
    box = box_of(*roles)
    box.core.worker_draining("w2")
    box.submit(request("r", 40, 40))
    while not moved(box):
        box.round("w0")
        box.round("w1")
    if "w2" in box.wires:
        box.core.workers["w2"].draining = False
    box.hand_over("w0")
    while len(moved(box)) < 2:
        rounds(box, 1)
        box.hand_over("w0")
    move = moved(box)[1]
    assert (move.source, move.sequence.worker, move.why) == ("w0", target, "drain")
    finished(box)
    assert box.core.counters.recomputed_tokens == 0


def test_a_worker_that_stops_hands_over_what_is_computed_sooner_than_fetched() -> None:
    box = MovingBox(ROOMY, roles=(MIXED, MIXED), us_per_block=1_000_000, num_blocks=64)
    for turn in range(2):  # the first tells how long it takes
        for number in range(2):
            box.submit(request(f"t{turn}r{number}", 20, 60, arrival_ns=number))
        rounds(box, 8)
        box.hand_over("w0")
        rounds(box, 12)
        box.hand_over("w0")
        if turn == 0:
            assert moved(box)
            box.crash("w0")
            box.beat("w0")
            rounds(box, 2)
    assert [one for one in box.events if isinstance(one, Failed) and one.kind == "moved"]
    finished(box)


def test_a_worker_that_runs_out_of_blocks_hands_over_instead_of_preempting() -> None:
    tight = Limits(max_num_seqs=6, max_num_batched_tokens=32, growth_aware_admission=False, admission_watermark=0.0)
    box = box_of(MIXED, MIXED, limits=tight, num_blocks=22, max_model_len=64)
    box.core.worker_draining("w1")
    for number in range(4):
        box.submit(request(f"r{number}", 8, 24, arrival_ns=number))
    rounds(box, 2)
    box.core.workers["w1"].draining = False
    box.drain()
    assert {one.why for one in moved(box)} == {"balance"}
    assert len({one.sequence.request_id for one in moved(box)}) == len(moved(box)), "each once"
    assert not box.core.counters.preemptions
    finished(box)


def test_what_runs_at_the_target_comes_before_what_is_on_its_way() -> None:
    tight = Limits(max_num_seqs=4, max_num_batched_tokens=64, growth_aware_admission=False, admission_watermark=0.0)
    box = box_of(PREFILL, DECODE, limits=tight, num_blocks=24, max_model_len=96)
    for number in range(4):
        box.submit(request(f"r{number}", 20, 40, arrival_ns=number))
    finished(box)
    assert moved(box)


def test_beams_and_prompts_before_their_forks_stay() -> None:
    box = box_of(PREFILL, DECODE)
    box.submit(request("b", 12, 8, beams=2))
    box.submit(request("n", 12, 12, n=2, arrival_ns=1))
    finished(box)
    assert {one.sequence.request_id for one in moved(box)} <= {"n"}


def test_nothing_moves_without_a_way() -> None:
    box = box_of(PREFILL, DECODE)
    for name in ("w0", "w1"):
        box.crash(name)
        box.capacities[name] = msgspec.structs.replace(box.capacities[name], transfer=[])
        box.beat(name)
    rounds(box, 2)
    for number in range(3):
        box.submit(request(f"r{number}", 8, 10, arrival_ns=number))
    finished(box)
    assert not moved(box)
    assert {plan.worker for plan in box.plans if plan.starts} == {"w0", "w1"}, "both do both"


def test_sequences_that_fit_nowhere_else_hold_nobody_up() -> None:
    box = box_of(PREFILL, DECODE)
    box.crash("w1")
    box.capacities["w1"] = msgspec.structs.replace(box.capacities["w1"], num_blocks=10)
    box.beat("w1")
    rounds(box, 2)
    for number in range(6):
        box.submit(request(f"long{number}", 20, 26, arrival_ns=number))
    rounds(box, 3)
    box.submit(request("short", 8, 12, arrival_ns=9))
    finished(box)
    assert {one.sequence.request_id for one in moved(box)} == {"short"}


def test_a_target_that_was_not_measured_yet_is_not_taken_for_free() -> None:
    """Then rows alone count: a worker that has just come up would get everything that moves."""
    box = box_of(PREFILL, DECODE, DECODE)
    measured = box.core.workers["w2"].predictor
    for rows in (1, 2, 4, 8):
        measured.observe(PlannedWork(rows), 1000.0 + rows)
    for number in range(4):
        box.submit(request(f"r{number}", 20, 40, arrival_ns=number))
    for _ in range(6):
        box.round("w0")
    taken = [len(box.core.workers[name].arriving) for name in ("w1", "w2")]
    assert taken == [2, 2]
    finished(box)


def test_of_many_workers_some_are_asked_in_each_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    takes = Transfers._takes

    def watched(self: Transfers, source: WorkerState, target: WorkerState, sequence: Sequence, why: Why) -> bool:
        asked.append(target.name)
        return takes(self, source, target, sequence, why)

    monkeypatch.setattr(Transfers, "_takes", watched)
    box = box_of(PREFILL, *[PREFILL] * (3 * LOOKED_AT), DECODE)
    box.core.submit(request("r", 8, 100), box.now)
    most = 0
    while not list(box.core.workers["w193"].arriving):
        asked.clear()
        box.round("w0")
        most = max(most, len(asked))
    assert 0 < most <= 2 * LOOKED_AT, "once for each plan of the round"


def test_held_batches_stay_so_that_decode_workers_take_prompts() -> None:
    box = Box(Limits(max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_limit=8), "static", workers=0)
    for name, role in (("w0", PREFILL), ("w1", DECODE)):
        box.add_worker(name, capacity(role=role, transfer=["box://x/key"]))
    for number in range(8):
        box.submit(request(f"r{number}", arrival_ns=number))
    box.run()
    assert {plan.worker for plan in box.plans if plan.starts} == {"w0", "w1"}


def test_what_is_remembered_of_workers_that_are_gone_is_bounded() -> None:
    box = box_of(PREFILL, DECODE)
    core = box.core
    for number in range(3 * MOST_GONE):
        name = f"gone{number}"
        core.worker_up(name, 1, box.capacities["w0"], box.now)
        core.set_role(name, DECODE, box.now)
        core.set_role(name, PREFILL, box.now)
        core.worker_lost(name, "gone", box.now)
    assert len(core._given_roles) <= MOST_GONE + 1
    core.worker_up("gone191", 1, box.capacities["w1"], box.now)
    assert core.workers["gone191"].role is PREFILL, "the last of them is still known"
    for name in [name for name in core.workers if name.startswith("gone")]:
        core.worker_lost(name, "gone", box.now)
    paces = core.workers["w1"].fetch_pace
    paces.update((f"gone{number}", (1.0, 1.0)) for number in range(MOST_PACES))
    box.submit(request("r", 20, 20))
    finished(box)
    assert moved(box) and len(paces) == MOST_PACES and "w0" in paces and "gone0" not in paces


def test_a_worker_without_room_is_not_asked_again_with_every_plan_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    box = box_of(PREFILL, DECODE, limits=Limits(max_num_seqs=16, max_num_batched_tokens=64), num_blocks=32)
    looks: list[bool] = []
    fits = box.core._transfers._fits

    def watched(*args: object) -> bool:
        looks.append(fits(*args))  # type: ignore[arg-type]
        return looks[-1]

    monkeypatch.setattr(box.core._transfers, "_fits", watched)
    for number in range(12):
        box.submit(request(f"r{number:02}", 8, 60, arrival_ns=number))
    rounds(box, 20)
    planned = len([plan for plan in box.plans if plan.worker == "w1"])
    assert any(looks) and 0 < looks.count(False) <= planned
    assert sum(one.remaining <= 1 for one in box.core.workers["w0"].running) > 2, "they decode where they are"
    finished(box)


@pytest.mark.parametrize(
    ("first", "second", "adapter", "moves"),
    [
        ({"weights": "x"}, {"weights": "x"}, "", True),
        ({"weights": "x"}, {}, "", True),
        ({"weights": "x"}, {"weights": "y"}, "", False),
        ({"adapter_weights": ["p"]}, {"adapter_weights": ["p"]}, "a", True),
        ({"adapter_weights": ["p"]}, {"adapter_weights": ["q"]}, "a", False),
        ({"adapter_weights": ["p"]}, {"adapter_weights": ["q"]}, "", True),
    ],
)
def test_blocks_of_other_weights_under_the_same_name_are_not_taken(
    first: dict[str, object], second: dict[str, object], adapter: str, moves: bool
) -> None:
    """As in the middle of a roll-out: both serve, and nobody goes on from what other weights have computed."""

    class Box(MovingBox):
        def add_worker(self, name: str, cap: Capacity, incarnation: int = 1) -> None:
            told = {"adapters": ["a"], **{"w0": first, "w1": second}[name]}
            super().add_worker(name, msgspec.structs.replace(cap, **told), incarnation)

    box = Box(ROOMY, roles=(MIXED, MIXED), num_blocks=64)
    box.submit(request("r", 20, 40, adapter=adapter))
    while not box.delivered.get(("r", 0)):
        rounds(box, 1)
    (at,) = [worker.name for worker in box.core.workers.values() if worker.running]
    box.hand_over(at)
    for _ in range(30):
        rounds(box, 1)
        box.hand_over(at)
    assert bool(moved(box)) is moves
    assert any(isinstance(one, Failed) and one.kind == "moved" for one in box.events) is not moves
    finished(box)
