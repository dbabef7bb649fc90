"""The spans that the scheduler records of a sequence once it has ended. Pure: from what the flight recorder noted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from observability import conventions as names
from shared.flight_record import ChoiceTrace

Attributes = dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are ns on the clock of what it was made from."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    events: list[tuple[str, int, Attributes]] = field(default_factory=list)
    error: str = ""


def spans_of(choice: ChoiceTrace, submitted_ns: int, ended_ns: int, error: str, lost: bool) -> Iterator[Span]:
    """Where one choice was while no worker ran it, and what a lost worker could not tell of itself.

    Of a resumed request only what came since it was submitted again: the attempt before has its spans already.
    ``error`` goes to the span in which it ended, if it is one of these; ``lost``: its worker has taken its spans along.
    """
    stays = [stay for stay in choice.stays if stay.admitted_ns >= submitted_ns]
    admitted_ns = stays[0].admitted_ns if stays else ended_ns
    yield Span(
        names.QUEUE, submitted_ns, admitted_ns, {}, _waits(choice, submitted_ns, admitted_ns),
        "" if stays else error,
    )  # fmt: skip
    for index, stay in enumerate(stays):
        last = index + 1 == len(stays)
        if last and (not stay.left_ns or stay.left_ns >= ended_ns):
            if lost:
                about: Attributes = {names.WORKER: stay.worker, names.STEP_NUMBER: stay.first_step}
                yield Span(names.LOST, stay.admitted_ns, ended_ns, about, [], error)
            return
        back_ns = ended_ns if last else stays[index + 1].admitted_ns
        if stay.moved_to:
            about = {
                names.WORKER: stay.worker, names.CAUSE: stay.why_left, names.TARGET: stay.moved_to,
                names.MOVED_BYTES: stay.moved_bytes, names.TRANSPORT: stay.transport,
            }  # fmt: skip
            yield Span(names.MOVE, stay.left_ns, back_ns, about)
            continue
        about = {names.WORKER: stay.worker, names.CAUSE: stay.why_left, names.PREEMPTED_BY: stay.by}
        waits = _waits(choice, stay.left_ns, back_ns)
        yield Span(names.PREEMPTED, stay.left_ns, back_ns, about, waits, error if last else "")


def _waits(choice: ChoiceTrace, begin_ns: int, end_ns: int) -> list[tuple[str, int, Attributes]]:
    """What it waited for in that time, as it changed."""
    return [
        (names.WAITS, since_ns, {names.LACK: str(lack), names.IN_THE_WAY: by})
        for since_ns, lack, by in choice.causes
        if begin_ns <= since_ns < end_ns
    ]
