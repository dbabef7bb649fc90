"""A sequence that goes on at another worker has one life, in which the way there is an interval like others."""

from __future__ import annotations

from itertools import pairwise

from mesh_in_a_box import request
from moving_mesh import MovingBox
from recorded_box import RecordedBox

from observability import conventions as names
from observability.explanation_page import as_json, as_page, summary
from observability.explanation_text import lines
from scheduler.core.limits import Limits
from scheduler.spans import spans_of
from shared.messages import Role


class RecordedMoves(RecordedBox, MovingBox):
    pass


def test_the_way_to_another_worker() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, prefill_chunk_limit=16)
    box = RecordedMoves(limits, roles=(Role.PREFILL, Role.DECODE), num_blocks=64)  # type: ignore[arg-type]
    box.submit(request("a", prompt_len=40, max_tokens=20))
    box.drain()
    report = box.report("a")
    record = report.request
    assert record is not None and not record.live
    found = box.explain("a")
    assert all(before.end_ns == after.begin_ns for before, after in pairwise(found))
    stages = [one.stage for one in found]
    assert stages[0] == "queue" and "preempted" not in stages
    (move,) = [one for one in found if one.stage == "move"]
    assert stages.index("prefill") < stages.index("move") < len(stages) - 1
    assert move.by == "w1" and move.ms > 0
    assert move.cause == "its prompt is computed, and another worker decodes: 0.0 MiB of KV blocks in 0.6 ms over box"
    assert summary(record)["preemptions"] == 0
    assert move.cause in "\n".join(lines(summary(record), found))
    assert as_page(report, found, found) and as_json(report, found, found)
    first, second = record.choices[0].stays
    assert (first.worker, first.moved_to, second.worker) == ("w0", "w1", "w1")
    assert first.moved_bytes == 32 * 11 and second.cached == second.known - 1
    spans = {span.name: span for span in spans_of(record.choices[0], record.submitted_ns, box.now, "", lost=False)}
    assert names.PREEMPTED not in spans
    about = spans[names.MOVE].attributes
    assert (about[names.WORKER], about[names.TARGET], about[names.CAUSE]) == ("w0", "w1", "role")
