"""Priority classes that age, fairness between tenants, deadlines, isolation of long contexts, and the ITL target."""

from __future__ import annotations

import pytest
from mesh_in_a_box import MS, Box, capacity, request

from scheduler.core.events import Failed
from scheduler.core.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT
from scheduler.core.limits import Limits
from scheduler.core.step_time import PlannedWork, StepTimePredictor
from scheduler.policies.prefill import share_prefill
from shared.messages import Outcome, pack_tokens


def limits(**more: object) -> Limits:
    base: dict[str, object] = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "run_ahead": 1}
    return Limits(**base | more)  # type: ignore[arg-type]


def starts(box: Box) -> list[str]:
    return [start.request_id for plan in box.plans for start in plan.starts]


def test_a_better_class_goes_first() -> None:
    box = Box(limits(max_num_seqs=1), num_blocks=200)
    box.submit(request("batch", priority=5, arrival_ns=0))
    box.submit(request("chat", priority=0, arrival_ns=1))
    box.run()
    assert starts(box) == ["chat", "batch"]


def test_waiting_raises_a_class() -> None:
    box = Box(limits(max_num_seqs=1, priority_aging_ns=20 * MS), num_blocks=400)
    box.submit(request("batch", priority=2, arrival_ns=0))
    for index in range(40):
        box.submit(request(f"chat{index:02}", priority=0, arrival_ns=1 + index, max_tokens=6))
        for _ in range(5):
            box.step()
    box.run()
    assert 5 < starts(box).index("batch") < 30


@pytest.mark.parametrize("parked", [("b1", "b2"), ("b2", "b3")])
def test_who_is_left_to_another_worker_counts_as_admitted_in_its_turn(parked: tuple[str, ...]) -> None:
    """The others come in the order in which they would come with it: nobody stands behind who came later."""
    box = Box(limits(), num_blocks=200)
    for index, (tenant, number) in enumerate((tenant, number) for tenant in "ba" for number in range(1, 5)):
        box.submit(request(f"{tenant}{number}", tenant=tenant, arrival_ns=index))
    (queue,) = box.core.queues.values()
    assert [one.request_id for one in queue.order(0)] == ["a1", "b1", "a2", "b2", "a3", "b3", "a4", "b4"]
    for one in list(queue):
        if one.request_id in parked:
            queue.park(one, MS)
    queue.check()
    order = [one.request_id for one in queue.order(0)]
    assert order == [one for one in ("a1", "b1", "a2", "b2", "a3", "b3", "a4", "b4") if one not in parked]
    assert len(list(queue.order(MS))) == len(queue) == 8 and not queue.num_parked


def test_a_tenant_that_floods_gets_its_share_and_no_more() -> None:
    box = Box(limits(max_num_seqs=4), num_blocks=400)
    for index in range(60):
        box.submit(request(f"flood{index:02}", tenant="flood", arrival_ns=index, max_tokens=8))
    for index in range(20):
        box.submit(request(f"calm{index:02}", tenant="calm", arrival_ns=100 + index, max_tokens=8))
    service = {"flood": 0, "calm": 0}
    most = max(INPUT_WEIGHT * 5, OUTPUT_WEIGHT * 8 * box.limits.max_num_seqs)
    while any(name.startswith("calm") for name in waiting(box)):
        box.step()
        service = {
            tenant: sum(
                INPUT_WEIGHT * 5 + OUTPUT_WEIGHT * len(tokens)
                for (name, _), tokens in box.delivered.items()
                if name.startswith(tenant)
            )
            for tenant in service
        }
        assert abs(service["flood"] - service["calm"]) <= 2 * most
    box.run()
    box.assert_tokens_right()


def waiting(box: Box) -> list[str]:
    return [sequence.request_id for queue in box.core.queues.values() for sequence in queue]


def test_weights_divide_the_service() -> None:
    box = Box(limits(max_num_seqs=2), num_blocks=400)
    for index in range(40):
        for tenant, weight in (("gold", 300), ("iron", 100)):
            submit = request(f"{tenant}{index:02}", tenant=tenant, arrival_ns=index, max_tokens=8)
            fields = {name: getattr(submit, name) for name in submit.__struct_fields__}
            box.submit(type(submit)(**fields | {"tenant_weight": weight}))
    for _ in range(100):
        box.step()
    done = [sum(name.startswith(tenant) for name, _ in box.ends) for tenant in ("gold", "iron")]
    assert 2 <= done[0] / max(1, done[1]) <= 4.5


def test_idleness_saves_up_no_claim() -> None:
    box = Box(limits(max_num_seqs=1), num_blocks=400)
    for index in range(30):
        box.submit(request(f"a{index:02}", tenant="a", arrival_ns=index, max_tokens=8))
    box.submit(request("b-first", tenant="b", arrival_ns=50, max_tokens=8))
    for _ in range(120):
        box.step()
    for index in range(10):
        box.submit(request(f"b{index:02}", tenant="b", arrival_ns=100 + index, max_tokens=8))
    before = len(starts(box))
    for _ in range(80):
        box.step()
    later = starts(box)[before:]
    assert later.count("a") == 0 and any(name.startswith("a") for name in later[:4])


def test_a_trickle_that_never_waits_for_long_saves_up_no_claim() -> None:
    """Something of it lives at any time, but nothing waits when the next one comes."""
    box = Box(limits(max_num_seqs=4), num_blocks=400)
    for index in range(200):
        box.submit(request(f"flood{index:03}", tenant="flood", arrival_ns=index, max_tokens=8))
    drops = 0
    for _ in range(150):
        if not any(name.startswith("drop") for name in waiting(box)):
            box.submit(request(f"drop{drops}", tenant="calm", arrival_ns=1000 + drops, prompt_len=1, max_tokens=12))
            drops += 1
            while any(name.startswith("drop") for name in waiting(box)):
                box.step()
        for _ in range(8):
            box.step()
        if drops == 8:
            break
    for index in range(30):
        box.submit(request(f"burst{index:02}", tenant="calm", arrival_ns=2000 + index, max_tokens=8))
    before = len(starts(box))
    while len(starts(box)) < before + 16:
        box.step()
    burst = sum(name.startswith("burst") for name in starts(box)[before : before + 16])
    assert 6 <= burst <= 11


def test_one_that_comes_while_nobody_waits_starts_level_with_the_last_that_waited() -> None:
    """Not with the least of those that run: it would have all that the others had before them."""
    box = Box(limits(max_num_seqs=3), num_blocks=400)
    box.submit(request("long", tenant="quiet", prompt_len=1, max_tokens=120))
    for index in range(8):
        box.submit(request(f"busy{index}", tenant="busy", prompt_len=60, max_tokens=2, arrival_ns=index))
        for _ in range(4):
            box.step()
    before = len(starts(box))
    for tenant in ("new", "busy"):
        for index in range(8):
            order = 100 + index
            box.submit(request(f"{tenant}-{order}", tenant=tenant, prompt_len=60, max_tokens=2, arrival_ns=order))
    while len(starts(box)) < before + 8:
        box.step()
    assert 3 <= sum(name.startswith("new") for name in starts(box)[before : before + 8]) <= 5


def test_a_resume_after_a_loss_is_charged_what_is_new() -> None:
    box = Box(limits(max_num_seqs=1), num_blocks=400)
    box.submit(request("r", tenant="t", prompt_len=20, max_tokens=40))
    for _ in range(12):
        box.step()
    box.submit(request("other", tenant="o", prompt_len=2, max_tokens=1, arrival_ns=1))
    got = list(box.delivered["r", 0])
    assert len(got) > 5
    box.queues["w0"].clear()
    box.events += box.core.worker_lost("w0", "lost", box.now)
    box.add_worker("w0", capacity(num_blocks=400), incarnation=2)
    resumed = request("r", tenant="t", prompt_len=20, max_tokens=40, attempt=2, resumed=[pack_tokens(got)])
    assert box.submit(resumed).outcome is Outcome.ACCEPTED
    while len(box.delivered["r", 0]) < 30:
        box.step()
    assert service(box, "t") == INPUT_WEIGHT * 20 + OUTPUT_WEIGHT * 30
    box.run()
    box.assert_idle()


def test_resumes_that_are_not_charged_take_no_turn_in_the_order() -> None:
    box = Box(limits(max_num_seqs=6), num_blocks=400)
    for index in range(4):
        for tenant, attempt in (("a", 1), ("b", 2)):
            box.submit(request(f"{tenant}{index}", tenant=tenant, arrival_ns=index, prompt_len=40, attempt=attempt))
    box.step()
    assert starts(box) == ["a0", "b0", "b1", "b2", "b3", "a1"]
    box.run()
    box.assert_idle()


def test_beams_that_fork_are_not_charged_what_they_inherit() -> None:
    box = Box(limits(max_num_seqs=4), num_blocks=400)
    box.submit(request("search", tenant="t", prompt_len=20, max_tokens=30, beams=3))
    box.submit(request("other", tenant="o", prompt_len=2, max_tokens=100, arrival_ns=1))
    while box.core.counters.forks < 12:
        box.step()
    steps = max(sequence.generated for sequence in box.core.workers["w0"].running if sequence.group is not None)
    assert steps > 5
    assert service(box, "t") <= INPUT_WEIGHT * 20 + OUTPUT_WEIGHT * 3 * steps
    box.run()
    box.assert_tokens_right()


def service(box: Box, tenant: str) -> float:
    """What the tenant was charged, up to date."""
    box.core._settle_service()
    return box.core.fairness.counter(tenant) / 1e6


def test_a_deadline_that_cannot_be_made_is_refused_at_submit_and_dropped_in_the_queue() -> None:
    box = Box(limits(max_num_seqs=1), num_blocks=400)
    box.submit(request("first", max_tokens=30))
    for _ in range(40):
        box.step()
    reply = box.submit(request("late", max_tokens=100), deadline=box.now + 1)
    assert reply.outcome is Outcome.DEADLINE and "deadline" in reply.reason
    box.submit(request("runner", max_tokens=60, arrival_ns=1))
    assert (
        box.submit(request("waits", max_tokens=4, arrival_ns=2), deadline=box.now + 20 * MS).outcome is Outcome.ACCEPTED
    )
    for _ in range(30):
        box.step()
        box.events += box.core.tick(box.now)
    dropped = [event for event in box.events if isinstance(event, Failed)]
    assert [(event.sequence.request_id, event.kind) for event in dropped] == [("waits", "dropped")]
    box.run()
    box.assert_idle()


def test_a_deadline_is_looked_at_without_asking_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(Limits(max_num_seqs=1), workers=20)
    for worker in box.core.workers.values():
        for rows in (1, 2, 4):
            worker.predictor.observe(PlannedWork(rows), 1000.0)
    for number in range(8):
        box.submit(request(f"r{number}", arrival_ns=number), deadline=box.now + 10**9)
    asked: list[int] = []
    decode_us = StepTimePredictor.decode_us

    def watched(self: StepTimePredictor, rows: int) -> float:
        asked.append(rows)
        return decode_us(self, rows)

    monkeypatch.setattr(StepTimePredictor, "decode_us", watched)
    assert not box.core.tick(box.now + MS)
    assert 0 < len(asked) <= 8, "once for each that waits"
    late = box.core.tick(box.now + 10**9)
    assert len(late) == 8 and all(isinstance(one, Failed) and one.kind == "dropped" for one in late)


def test_a_running_sequence_past_its_deadline_is_dropped_at_once() -> None:
    box = Box(limits(), num_blocks=400)
    box.submit(request("r", max_tokens=60), deadline=box.now + 10 * MS)
    for _ in range(30):
        box.step()
        box.events += box.core.tick(box.now)
    assert box.core.counters.deadline_drops == 1 and not box.core.live_requests()
    box.step()
    box.assert_idle()


@pytest.mark.parametrize("bypasses", [32, 0])
def test_long_contexts_hold_no_more_than_their_share_while_shorter_ones_wait(bypasses: int) -> None:
    made = limits(
        max_num_seqs=8, long_context_tokens=40, long_context_share=0.5, growth_aware_admission=False,
        max_bypasses=bypasses,
    )  # fmt: skip
    box = Box(made, num_blocks=40)
    for index in range(4):
        box.submit(request(f"long{index}", prompt_len=44, max_tokens=20, arrival_ns=index))
    for index in range(4):
        box.submit(request(f"short{index}", prompt_len=4, max_tokens=4, arrival_ns=10 + index))
    box.step()
    running = {sequence.request_id for sequence in box.core.workers["w0"].running}
    assert running == {"long0", "short0", "short1", "short2", "short3"}
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


def test_the_only_long_one_is_never_capped() -> None:
    box = Box(limits(long_context_tokens=40, long_context_share=0.1), num_blocks=40)
    box.submit(request("long", prompt_len=100, max_tokens=4))
    box.run()
    assert ("long", 0) in box.ends


def test_long_prompts_share_the_prefill_budget_with_shorter_ones() -> None:
    assert share_prefill([900, 300], 256, 512, 0.25, [True, False], 0.5) == [64, 192]
    assert share_prefill([900, 100], 256, 512, 0.25, [True, False], 0.5) == [128, 100]
    assert share_prefill([900], 256, 512, 0.25, [True], 0.5) == [256]


def test_the_chunk_shrinks_to_keep_the_target_itl() -> None:
    # A step takes 100 + 10 * rows microseconds in these tests: 300 us leave room for 20 rows.
    box = Box(limits(target_itl_ns=300_000, min_prefill_tokens=4), num_blocks=400)
    box.submit(request("decoding", prompt_len=4, max_tokens=100, arrival_ns=0))
    box.submit(request("one", prompt_len=30, max_tokens=1, arrival_ns=1))
    for _ in range(6):
        box.step()
    box.submit(request("long", prompt_len=90, max_tokens=1, arrival_ns=2))
    seen = len(box.plans)
    while ("long", 0) not in box.ends:
        box.step()
    chunks = [count for plan in box.plans[seen:] for _, count in plan.chunks]
    assert chunks and max(chunks) <= 20 and min(chunks[:-1]) >= 4
    box.run()
    box.assert_tokens_right()
