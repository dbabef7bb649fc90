"""The scheduler's spans of a sequence, from what the flight recorder noted of it."""

from __future__ import annotations

from observability import conventions as names
from scheduler.core.sequence import Lack
from scheduler.spans import spans_of
from shared.flight_record import ChoiceTrace, Stay


def test_never_admitted() -> None:
    choice = ChoiceTrace(0, [(10, Lack.TURN, "a"), (20, Lack.BLOCKS, "")])
    (queue,) = spans_of(choice, 10, 90, "dropped", lost=False)
    assert (queue.name, queue.start_ns, queue.end_ns, queue.error) == (names.QUEUE, 10, 90, "dropped")
    assert queue.events == [
        (names.WAITS, 10, {names.LACK: "turn", names.IN_THE_WAY: "a"}),
        (names.WAITS, 20, {names.LACK: "blocks", names.IN_THE_WAY: ""}),
    ]


def test_preempted_and_back() -> None:
    stays = [Stay("w", 1, 30, 0, 5, 50, "no_free_block", "b"), Stay("w", 9, 80, 0, 7, 99, "length")]
    choice = ChoiceTrace(0, [(10, Lack.TURN, ""), (55, Lack.PREEMPTED, "c")], stays)
    queue, preempted = spans_of(choice, 10, 99, "", lost=False)
    assert (queue.end_ns, len(queue.events)) == (30, 1)
    assert (preempted.name, preempted.start_ns, preempted.end_ns) == (names.PREEMPTED, 50, 80)
    assert preempted.attributes == {names.WORKER: "w", names.CAUSE: "no_free_block", names.PREEMPTED_BY: "b"}
    assert preempted.events == [(names.WAITS, 55, {names.LACK: "preempted", names.IN_THE_WAY: "c"})]


def test_ended_while_preempted() -> None:
    choice = ChoiceTrace(0, [], [Stay("w", 1, 30, 0, 5, 50, "no_free_block", "b")])
    _, preempted = spans_of(choice, 10, 99, "dropped", lost=False)
    assert (preempted.name, preempted.start_ns, preempted.end_ns, preempted.error) == ("preempted", 50, 99, "dropped")


def test_a_lost_worker_took_its_spans_along_and_the_last_stay_stands_for_them() -> None:
    choice = ChoiceTrace(0, [], [Stay("w", 4, 30, 0, 5, 99, "lost: silent", "")])
    queue, lost = spans_of(choice, 10, 99, "lost", lost=True)
    assert not queue.error
    assert (lost.name, lost.start_ns, lost.end_ns, lost.error) == (names.LOST, 30, 99, "lost")
    assert lost.attributes == {names.WORKER: "w", names.STEP_NUMBER: 4}
    assert [span.name for span in spans_of(choice, 10, 99, "", lost=False)] == [names.QUEUE]
