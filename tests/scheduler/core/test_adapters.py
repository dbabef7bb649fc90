"""LoRA adapters: who may run a request that asks for one, and what of the prefix cache it shares."""

from __future__ import annotations

from dataclasses import replace

from mesh_in_a_box import Box, capacity, request

from scheduler.core.events import Failed
from scheduler.core.limits import Limits
from shared.messages import Outcome

PROMPT = list(range(40, 73))
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_limit=64)


def box_of(*adapters: list[str], limits: Limits = LIMITS) -> Box:
    """A worker w0, w1... for each list of the adapters that it has."""
    box = Box(limits, workers=0)
    for index, names in enumerate(adapters):
        box.add_worker(f"w{index}", capacity(60, adapters=names))
    return box


def started_at(box: Box, request_id: str) -> set[str]:
    return {plan.worker for plan in box.plans for start in plan.starts if start.request_id == request_id}


def test_a_request_runs_where_its_adapter_is() -> None:
    box = box_of([], ["sql"], ["sql", "chat"])
    for index in range(6):
        for adapter in ("sql", "chat", ""):
            box.submit(request(f"{adapter}{index}", max_tokens=8, adapter=adapter, arrival_ns=index))
    box.run()
    box.assert_tokens_right()
    box.assert_idle()
    assert set().union(*(started_at(box, f"chat{index}") for index in range(6))) == {"w2"}
    assert set().union(*(started_at(box, f"sql{index}") for index in range(6))) <= {"w1", "w2"}


def test_the_plan_names_the_adapter_of_each_start() -> None:
    box = box_of(["sql"])
    box.submit(request("plain", n=2))
    box.submit(request("forks", n=3, adapter="sql"))
    box.submit(request("beams", beams=2, n=1, adapter="sql"))
    box.run()
    box.assert_tokens_right()
    starts = [start for plan in box.plans for start in plan.starts]
    assert {start.adapter for start in starts if start.request_id == "plain"} == {""}
    assert {start.adapter for start in starts if start.request_id != "plain"} == {"sql"}
    assert any(start.parent >= 0 and start.adapter for start in starts)


def test_what_nobody_has_is_refused_with_its_name() -> None:
    box = box_of([], ["sql"])
    reply = box.submit(request("r", adapter="legal"))
    assert reply.outcome is Outcome.UNKNOWN_MODEL
    assert "'legal'" in reply.reason and "'m'" in reply.reason
    box.core.worker_draining("w1")
    assert box.submit(request("s", adapter="sql")).outcome is Outcome.UNKNOWN_MODEL
    assert box.submit(request("t")).outcome is Outcome.ACCEPTED


def test_it_is_judged_by_the_workers_that_have_the_adapter() -> None:
    box = Box(LIMITS, workers=0)
    box.add_worker("large", capacity(200, max_model_len=400))
    box.add_worker("small", capacity(20, max_model_len=64, adapters=["sql"]))
    assert box.submit(request("r", 40, 100)).outcome is Outcome.ACCEPTED
    assert box.submit(request("s", 40, 100, adapter="sql")).outcome is Outcome.TOO_LONG


def test_pages_are_shared_within_one_adapter_only() -> None:
    box = box_of(["sql", "chat"])
    for name, adapter, salt in (
        ("a", "", ""), ("b", "sql", ""), ("c", "chat", ""), ("d", "sql", ""), ("e", "", ""), ("f", "sql", "sql"),
        ("g", "", "sql"),
    ):  # fmt: skip
        box.submit(request(name, prompt=PROMPT, max_tokens=2, adapter=adapter, salt=salt))
        box.run()
    assert [s.computed for plan in box.plans for s in plan.starts] == [0, 0, 0, 32, 32, 0, 0]
    box.assert_tokens_right()


def test_equal_prompts_of_several_adapters_in_one_batch_do_not_meet() -> None:
    box = box_of(["sql", "chat"])
    for index in range(2):
        for adapter in ("sql", "chat", ""):
            box.submit(request(f"{adapter}{index}", prompt=PROMPT, max_tokens=6, adapter=adapter))
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


def test_a_preempted_sequence_comes_back_with_its_adapter() -> None:
    box = Box(workers=0)  # without foresight: see Box
    box.add_worker("w0", capacity(12, adapters=["sql"]))
    for index in range(4):
        box.submit(request(f"r{index}", 6, 20, adapter="sql" if index % 2 else "", arrival_ns=index))
    box.run()
    assert box.core.counters.preemptions > 0
    box.assert_tokens_right()
    box.assert_idle()


def test_a_stopping_worker_hands_over_to_one_with_the_adapter_only() -> None:
    box = box_of(["sql"])
    box.submit(request("a", max_tokens=30, adapter="sql"))
    box.submit(request("b", max_tokens=30))
    for _ in range(4):
        box.step()
    box.add_worker("plain", capacity(60))
    box.core.worker_draining("w0")
    moved = [event.sequence.request_id for event in box.core.hand_over("w0", box.now) if isinstance(event, Failed)]
    assert moved == ["b"]
    box.run()
    assert box.ends["a", 0] == "length"


def test_what_waits_for_an_adapter_that_stays_away_ends() -> None:
    limits = replace(LIMITS, no_worker_grace_ns=1000)
    box = box_of(["sql"], [], limits=limits)
    box.submit(request("r", adapter="sql"))
    box.core.worker_lost("w0", "gone", box.now)
    box.now += 10**6
    failed = [event for event in box.core.tick(box.now) if isinstance(event, Failed)]
    assert [(event.sequence.request_id, event.kind) for event in failed] == [("r", "lost")]
    box.core.check()
