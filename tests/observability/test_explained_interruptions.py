"""A request that is resumed has one life, in which the interruption is an interval like others."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from mesh_in_a_box import request
from recorded_box import MS, OFFSET_NS, RecordedBox

from observability.explanation import Interval, explain
from observability.explanation_page import as_json, as_page, summary
from observability.explanation_text import lines
from scheduler.core.limits import Limits
from scheduler.recorder import GATEWAY_ASKED
from scheduler.spans import spans_of
from shared.flight_record import AnswerTrace, RequestTrace
from shared.messages import pack_tokens

FIRST = request("a", prompt_len=40, max_tokens=20)


def box() -> RecordedBox:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, admission_watermark=0.0, run_ahead=1)
    return RecordedBox(limits, num_blocks=200, max_model_len=400)


def steps(one: RecordedBox, count: int) -> None:
    for _ in range(count):
        one.step()


def resume(one: RecordedBox, attempt: int, after_ms: int = 7) -> None:
    """As the gateway does, which has had no token (so that the box, which counts offsets, takes them all again)."""
    one.now += after_ms * MS
    one.delivered.clear()
    one.submit(msgspec.structs.replace(FIRST, attempt=attempt, resumed=[pack_tokens([])]))


def life(one: RecordedBox) -> tuple[RequestTrace, list[Interval]]:
    report = one.report("a")
    assert report.request is not None
    found = one.explain("a")
    for before, after in pairwise(found):
        assert before.end_ns == after.begin_ns
    assert all(interval.end_ns > interval.begin_ns for interval in found)
    assert found[0].begin_ns == report.request.submitted_ns + OFFSET_NS
    assert as_page(report, found, found) and as_json(report, found, found)
    return report.request, found


def test_a_lost_worker() -> None:
    one = box()
    one.submit(FIRST)
    steps(one, 6)
    one.lose()
    record, found = life(one)
    assert not record.live and found[-1].end_ns == record.ended_ns + OFFSET_NS
    resume(one, 2)
    record, found = life(one)
    assert record.live and record.attempt == 1
    one.run()
    record, found = life(one)
    assert not record.live and found[-1].end_ns == record.ended_ns + OFFSET_NS
    assert record.choices[0].end == "length" and record.choices[0].generated == 20
    (gap,) = [interval for interval in found if interval.stage == "interrupted"]
    assert gap.cause == "lost: its worker is gone; resumed as attempt 2" and gap.ms == 7
    after = found[found.index(gap) + 1 :]
    assert any(interval.cause.startswith("recompute after the interruption") for interval in after)
    assert "preempted" not in {interval.stage for interval in found}
    told = summary(record)
    assert (told["preemptions"], told["interruptions"]) == (0, 1)
    assert told["interrupted"] == ["lost: its worker is gone; resumed as attempt 2"]


def test_lost_twice_the_second_time_before_it_ran() -> None:
    one = box()
    one.submit(FIRST)
    steps(one, 4)
    one.lose()
    resume(one, 2)
    one.now += 3 * MS
    one.recorder.leads_no_more(one.now)
    resume(one, 3, after_ms=11)
    one.run()
    record, found = life(one)
    gaps = [interval for interval in found if interval.stage == "interrupted"]
    assert [(gap.cause.rpartition("; ")[2], gap.ms) for gap in gaps] == [
        ("resumed as attempt 2", 7), ("resumed as attempt 3", 11),
    ]  # fmt: skip
    assert record.choices[0].end == "length"


def test_a_loss_that_its_gateway_noticed_first() -> None:
    one = box()
    one.submit(FIRST)
    steps(one, 6)
    resume(one, 2, after_ms=0)
    one.run()
    record, found = life(one)
    assert [one.why for one in record.choices[0].interruptions] == [GATEWAY_ASKED]
    assert "interrupted" not in {interval.stage for interval in found}, "it took no time"
    assert f"interrupted: {GATEWAY_ASKED}; resumed as attempt 2" in lines(summary(record), found)
    assert "pool" not in lines(summary(record), found)[0], "there is only one"
    report = one.report("a")
    assert GATEWAY_ASKED.encode() in as_page(report, found, found)
    assert all(stay.left_ns for stay in record.choices[0].stays)


def test_what_another_scheduler_had_before() -> None:
    one = box()
    one.now += 50 * MS
    one.submit(msgspec.structs.replace(FIRST, attempt=2))
    one.run()
    began = 10 * MS + OFFSET_NS
    one.recorder.answered(
        AnswerTrace("a", "cmpl-a", "", "completions", began, began + MS, began + 2 * MS, began + 3 * MS)
    )
    found = explain(one.report("a"))
    (gap,) = [interval for interval in found if interval.stage == "interrupted"]
    assert gap.cause == "another scheduler ran it, and what that one knew of it is gone; resumed as attempt 2"
    assert (gap.begin_ns, gap.ms) == (began + 3 * MS, 37)


def test_a_loss_after_which_nobody_could_go_on() -> None:
    one = box()
    one.submit(FIRST)
    steps(one, 6)
    one.lose()
    lost_ns = one.now + OFFSET_NS
    began = OFFSET_NS
    one.recorder.answered(
        AnswerTrace("a", "cmpl-a", "", "completions", began, began, began, began, lost_ns + 30 * MS, "failed")
    )
    last = explain(one.report("a"))[-1]
    assert (last.stage, last.cause) == ("interrupted", "lost: its worker is gone; never resumed")
    assert (last.end_ns, last.ms) == (lost_ns + 30 * MS, 30)


def test_live_requests_of_a_scheduler_that_leads_no_more_are_forgotten_in_their_turn() -> None:
    one = box()
    one.recorder._most = 4
    for index in range(8):
        one.submit(request(f"r{index}", prompt_len=8, arrival_ns=index))
    assert len(one.recorder.requests()) == 8
    one.recorder.leads_no_more(one.now + MS)
    assert len(one.recorder.requests()) == 4
    assert all(not record.live for record in one.recorder.requests())


def test_spans_of_a_resumed_request_begin_with_its_resume() -> None:
    one = box()
    one.submit(FIRST)
    steps(one, 6)
    one.lose()
    resume(one, 2)
    resumed_ns = one.now
    one.run()
    record, _ = life(one)
    spans = list(spans_of(record.choices[0], resumed_ns, record.ended_ns, "", lost=False))
    assert [span.name for span in spans] == ["queue"]
    assert spans[0].start_ns == resumed_ns < spans[0].end_ns <= record.choices[0].stays[-1].admitted_ns
