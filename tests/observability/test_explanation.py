"""A planted case for each cause: the explanation names it, and its intervals add up to the request's time."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from mesh_in_a_box import capacity, request
from recorded_box import MS, OFFSET_NS, RecordedBox

from observability.explanation import Interval, by_cause, explain, joined, pieces
from observability.explanation_page import as_json, as_page, summary
from observability.explanation_text import lines
from observability.phases import contents, phases, slow_gaps
from scheduler.core.limits import Limits
from shared.flight_record import AnswerTrace
from shared.messages import Submit


def box(num_blocks: int = 200, **limits: object) -> RecordedBox:
    base: dict[str, object] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "prefill_chunk_limit": 16, "admission_watermark": 0.0,
        "growth_aware_admission": False, "run_ahead": 1,
    }  # fmt: skip
    return RecordedBox(Limits(**base | limits), num_blocks=num_blocks, max_model_len=400)  # type: ignore[arg-type]


def explained(one: RecordedBox, request_id: str) -> list[Interval]:
    """The explanation, which must cover the life of the request without gap or overlap."""
    found = one.explain(request_id)
    record = one.report(request_id).request
    assert record is not None
    assert found[0].begin_ns == record.submitted_ns + OFFSET_NS
    assert found[-1].end_ns == record.ended_ns + OFFSET_NS
    for before, after in pairwise(found):
        assert before.end_ns == after.begin_ns
    assert all(interval.end_ns > interval.begin_ns for interval in found)
    return found


def main_cause(found: list[Interval], stage: str) -> tuple[str, str]:
    """What took most of a stage."""
    longest = max((one for one in found if one.stage == stage), key=lambda one: one.ms)
    return longest.cause, longest.by


def test_every_place_is_taken() -> None:
    one = box(max_num_seqs=2)
    for index in range(2):
        one.submit(request(f"r{index}", max_tokens=20, arrival_ns=index))
    one.step()
    one.submit(request("late", max_tokens=4, arrival_ns=9))
    one.run()
    assert main_cause(explained(one, "late"), "queue") == ("every place in the batch is taken", "")


def test_no_blocks_for_the_head_and_behind_it() -> None:
    one = box(num_blocks=20, max_bypasses=0)
    one.submit(request("runner", prompt_len=40, max_tokens=30, arrival_ns=0))
    one.step()
    one.submit(request("big", prompt_len=60, max_tokens=4, arrival_ns=1))
    one.submit(request("small", prompt_len=4, max_tokens=4, arrival_ns=2))
    one.run()
    assert main_cause(explained(one, "big"), "queue") == ("no KV blocks for it", "")
    assert main_cause(explained(one, "small"), "queue") == (
        "behind others: the first of them waits, no KV blocks for it", "big",
    )  # fmt: skip


def test_it_would_hold_up_the_blocked_head() -> None:
    one = box(num_blocks=22)
    one.submit(request("runner", prompt_len=40, max_tokens=40, arrival_ns=0))
    one.step()
    one.submit(request("big", prompt_len=60, max_tokens=4, arrival_ns=1))
    one.submit(request("greedy", prompt_len=4, max_tokens=80, arrival_ns=2))
    one.run()
    assert main_cause(explained(one, "greedy"), "queue") == ("it would hold up the blocked head of the queue", "big")


def test_another_one_computes_its_prompt() -> None:
    one = box(max_num_batched_tokens=64, prefill_chunk_limit=32)
    prompt = [7 * index % 300 + 10 for index in range(203)]
    for name in ("first", "second"):
        one.submit(request(name, prompt=prompt, max_tokens=4, arrival_ns=len(name)))
    one.run()
    found = explained(one, "second")
    assert main_cause(found, "queue") == ("most of its prompt is being computed already", "first")
    assert any("tokens were cached" in interval.note for interval in found if interval.stage == "prefill")


def test_the_token_budget_goes_to_other_prompts() -> None:
    one = box(max_num_batched_tokens=16, oldest_prefill_share=0.9)
    one.submit(request("document", prompt_len=150, max_tokens=2, arrival_ns=0))
    one.submit(request("short", prompt_len=40, max_tokens=2, arrival_ns=1))
    one.run()
    found = explained(one, "short")
    assert any(interval.by == "document" for interval in found if interval.stage == "prefill")
    assert main_cause(found, "prefill")[0] == "most of the token budget went to other prompts"


def test_a_long_prefill_beside_a_decode() -> None:
    one = box(max_num_batched_tokens=128, prefill_chunk_limit=128)
    one.submit(request("chat", max_tokens=40, arrival_ns=0))
    for _ in range(10):
        one.step()
    one.submit(request("document", prompt_len=250, max_tokens=2, arrival_ns=1))
    one.run()
    slow = [interval for interval in explained(one, "chat") if interval.stage == "decode" and interval.cause]
    assert slow and all("prompt tokens of others" in interval.cause and interval.others for interval in slow)
    assert {interval.by for interval in slow} == {"document"}


def test_a_preemption_names_whose_growth_it_was() -> None:
    one = box(num_blocks=14)
    for index, name in enumerate("abcd"):
        one.submit(request(name, prompt_len=6, max_tokens=24, arrival_ns=index))
    one.run()
    victims = {name for step in one.recorder.steps for name, _, _ in step.preempted}
    assert victims
    for name in victims:
        found = explained(one, name)
        out = [interval for interval in found if interval.stage == "preempted"]
        assert out and out[0].cause == "preempted: no free block" and out[0].by in "abcd"
        assert any("recompute" in interval.cause for interval in found if interval.stage == "prefill")


def test_a_lost_worker_ends_the_explanation() -> None:
    one = box()
    one.submit(request("r", max_tokens=40))
    for _ in range(5):
        one.step()
    one.events += one.core.worker_lost("w0", "gone", one.now)
    one._tell()
    one.recorder.worker_lost("w0")
    record = one.report("r").request
    assert record is not None and record.choices[0].end == "lost: gone"
    explained(one, "r")


def test_the_gateway_and_a_slow_client_are_part_of_it() -> None:
    one = box()
    one.submit(request("r", max_tokens=10))
    one.run()
    record = one.report("r").request
    assert record is not None
    begin, end = record.submitted_ns + OFFSET_NS, record.ended_ns + OFFSET_NS
    answer = AnswerTrace(
        "r", "chatcmpl-1", "x", "chat", begin - 50, begin - 40, begin - 30, begin + 10, end + 900,
        blocked=[(end + 100, end + 800)],
    )  # fmt: skip
    one.recorder.answered(answer)
    found = explain(one.report("chatcmpl-1"))
    assert [interval.stage for interval in found][:3] == ["receive", "tokenise", "submit"]
    assert sum(interval.end_ns - interval.begin_ns for interval in found) == end + 900 - (begin - 50)
    assert ("stream", "the client reads slowly", 0.0007) in by_cause(found)


def test_memory_is_bounded_and_live_requests_stay() -> None:
    one = box(max_num_seqs=2)
    one.recorder._most = 5
    for index in range(30):
        submit = request(f"r{index}", max_tokens=3, arrival_ns=index)
        one.submit(named(submit, f"cmpl-{index}", client_id=f"call-{index}"))
    assert len(one.recorder._requests) == 30
    assert one.report("call-29").request is not None and one.report("cmpl-29").request is not None
    one.run()
    assert len(one.recorder._requests) == 5
    assert len(one.recorder._names) == 10, "no names are kept of what is forgotten"
    assert len(one.recorder.slowest(3)) == 3


def test_forgotten_steps_leave_the_stages() -> None:
    one = box()
    one.submit(request("r", prompt_len=60, max_tokens=20))
    one.run()
    whole = explained(one, "r")
    prefill = sum(interval.ms for interval in whole if interval.stage == "prefill")
    remembered = list(one.recorder.steps)
    for kept in ([], remembered[10:], [*remembered[:2], *remembered[8:]]):
        one.recorder.steps.clear()
        one.recorder.steps.extend(kept)
        found = explained(one, "r")
        assert any(interval.cause == "its steps are not remembered one by one" for interval in found)
        assert abs(sum(interval.ms for interval in found if interval.stage == "prefill") - prefill) < 0.01
        assert not any(interval.cause == "the step itself was slow" for interval in found)


def test_folding_loses_no_time_and_gaps_name_their_steps() -> None:
    one = box(max_num_batched_tokens=64, prefill_chunk_limit=48)
    one.submit(request("chat", max_tokens=60, arrival_ns=0))
    for _ in range(10):
        one.step()
    one.submit(request("document", prompt_len=300, max_tokens=2, arrival_ns=1))
    one.run()
    each = pieces(one.report("chat"))
    folded = phases(joined(each))
    assert sum(phase.ms for phase in folded) == pytest.approx(sum(piece.ms for piece in each))
    assert [phase.stage for phase in folded][-2:] == ["prefill", "decode"]
    assert sum(piece.token for piece in each) == 60
    gaps = slow_gaps(each)
    assert gaps and gaps == sorted(gaps, key=lambda gap: -gap.ms)
    assert (
        gaps[0].by == "document"
        and gaps[0].step is not None
        and "prompt tokens (document 48)" in contents(gaps[0].step)
    )


def test_a_gap_across_a_preemption_is_one_gap() -> None:
    one = box(num_blocks=14)
    for index, name in enumerate("abcd"):
        one.submit(request(name, prompt_len=6, max_tokens=24, arrival_ns=index))
    one.run()
    victim = next(name for step in one.recorder.steps for name, _, _ in step.preempted)
    each = pieces(one.report(victim))
    assert sum(piece.token for piece in each) == 24, "each token came once"
    worst = slow_gaps(each)[0]
    assert worst.step is None and "preempted" in worst.cause


def named(submit: Submit, answer_id: str, client_id: str = "mine") -> Submit:
    return msgspec.structs.replace(submit, answer_id=answer_id, client_id=client_id)


def test_a_call_with_several_prompts_and_ids_that_are_used_again() -> None:
    one = box()
    for index in range(2):
        one.submit(named(request(f"r{index}", max_tokens=3 + index, arrival_ns=5), "cmpl-1"))
    one.step()
    for name in ("mine", "cmpl-1"):
        live = one.report(name)
        assert live.request is not None and live.request.live and len(live.siblings) == 1
    one.run()
    both = one.report("mine")
    assert both.request is not None and both.request.request_id == "r1" and both.siblings == ["r0"]
    assert one.report("r0").siblings == ["r1"] and one.report("cmpl-1").siblings == ["r0"]
    one.submit(named(request("r2", arrival_ns=6), "cmpl-2"))
    one.recorder.answered(AnswerTrace("r0", "cmpl-1", "mine", "completions", 5, finished_ns=9))  # later, of the first
    last = one.report("mine")
    assert last.request is not None and last.request.request_id == "r2" and not last.siblings
    assert one.report("cmpl-1").siblings == ["r0"]


def test_a_gateway_that_tells_its_ids_only_with_the_answer() -> None:
    one = box()
    for index in range(2):
        one.submit(request(f"r{index}", max_tokens=3 + index, arrival_ns=5))
    one.run()
    assert one.report("mine").request is None
    for index in range(2):
        one.recorder.answered(AnswerTrace(f"r{index}", "cmpl-1", "mine", "completions", 5, finished_ns=9))
    assert one.report("mine").siblings == one.report("cmpl-1").siblings == ["r0"]


def test_a_clients_id_never_takes_the_place_of_ours() -> None:
    one = box()
    one.submit(request("r0"))
    one.submit(named(request("r1", arrival_ns=1), "cmpl-1", client_id="r0"))
    found = one.report("r0").request
    assert found is not None and found.request_id == "r0"


def test_a_live_request_is_explained_up_to_the_moment_of_the_question() -> None:
    one = box(max_num_seqs=1)
    one.submit(request("runs", max_tokens=20))
    one.step()
    one.submit(request("waits", arrival_ns=1))
    one.step()
    one.now += 7 * MS
    for name in ("runs", "waits"):
        record = one.report(name).request
        assert record is not None and one.explain(name)[-1].end_ns == one.now + OFFSET_NS
        assert one.explain(name)[0].begin_ns == record.submitted_ns + OFFSET_NS


def test_refusals_are_remembered_apart() -> None:
    one = box()
    for index in range(300):
        submit = named(request(f"no{index}"), f"cmpl-{index}", client_id=f"call-{index}")
        one.recorder.refused(submit, "queue_full: the queue is full", one.now)
    record = one.report("no299").request
    assert record is not None and record.choices[0].end == "refused: queue_full: the queue is full"
    assert one.report("call-299").request is record and len(one.recorder._names) == 2 * 256
    assert one.report("no0").request is None and not one.recorder.requests()
    assert explain(one.report("no299")) == []


def test_an_unknown_request_is_told_as_such() -> None:
    assert box().report("nobody").request is None
    assert explain(box().report("nobody")) == []


def test_the_pool_and_the_adapter_are_told_where_they_are_not_the_usual() -> None:
    one = box()
    one.add_worker("w1", capacity(pool="chat", adapters=["sql"]))
    one.submit(request("plain"))
    one.submit(msgspec.structs.replace(request("own"), pool="chat", adapter="sql"))
    one.run()
    refused = msgspec.structs.replace(request("refused"), pool="chta", adapter="<sql>")
    one.recorder.refused(refused, "no such pool", one.now)
    told = {}
    for name in ("plain", "own", "refused"):
        report = one.report(name)
        record, found = report.request, explain(report)
        assert record is not None
        told[name] = lines(summary(record), found)[0], as_page(report, found, found).decode()
        made = as_json(report, found, found)
        assert (made["pool"], made["adapter"]) == (record.pool, record.adapter)
    assert ", pool chat, adapter sql, length" in told["own"][0]
    assert ", pool chta, adapter <sql>, refused: no such pool" in told["refused"][0]
    assert "pool" not in told["plain"][0] and "adapter" not in told["plain"][0]
    for what in ("<b>chat</b>", "<b>sql</b>"):
        assert what in told["own"][1] and what not in told["plain"][1]
    assert "<b>&lt;sql&gt;</b>" in told["refused"][1]
