"""Why one request took its time: its life as intervals with causes, without a gap from its first byte to its last.

Pure: from what the gateway (:class:`AnswerTrace`) and the scheduler (:class:`Report`) remember. Intervals end where the
next begins, so that they add up to the measured time exactly; what the clocks of two machines say out of order is cut.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.flight_record import AnswerTrace, ChoiceTrace, Report, Stay, StepTrace

SLOW = 1.5
"""A decode step that takes so many times the usual one is told apart, with what was in it."""

LACKS = {
    "slots": "every place in the batch is taken",
    "blocks": "no KV blocks for it",
    "head": "it would hold up the blocked head of the queue",
    "preempted": "preempted requests come back first",
    "prefix": "most of its prompt is being computed already",
    "long contexts": "long contexts hold their share",
    "worker": "another worker is to take it",
    "message": "the plan could carry no more prompts",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """``stage``: where the request was; ``cause``: why it took time there; ``by``: the request in its way, if one."""

    begin_ns: int
    end_ns: int
    stage: str
    cause: str = ""
    by: str = ""

    @property
    def ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


def explain(report: Report) -> list[Interval]:
    """The life of the request's last choice to end, which is what its client waited for. Times are unix ns."""
    found: list[Interval] = []
    request = report.request
    answer = request.answer if request is not None else None
    offset = report.unix_offset_ns
    if answer is not None:
        found += _before(answer)
    if request is not None:
        choice = max(request.choices.values(), key=lambda one: (one.ended_ns or 1 << 62, one.choice))
        end_ns = choice.ended_ns or max((one.result_ns for one in report.steps), default=request.submitted_ns)
        life = list(_life(request.request_id, choice, request.submitted_ns, end_ns, report.steps))
        found += [Interval(one.begin_ns + offset, one.end_ns + offset, one.stage, one.cause, one.by) for one in life]
    if answer is not None and answer.finished_ns:
        found += _after(answer, found[-1].end_ns if found else answer.received_ns)
    return _joined(_contiguous(found))


def by_cause(intervals: Sequence[Interval]) -> list[tuple[str, str, float]]:
    """(stage, cause, ms in all), the longest first."""
    total: dict[tuple[str, str], float] = {}
    for one in intervals:
        key = (one.stage, one.cause)
        total[key] = total.get(key, 0.0) + one.ms
    return sorted(((*key, ms) for key, ms in total.items()), key=lambda one: -one[2])


# --- gateway --------------------------------------------------------------------------------------------------------


def _before(answer: AnswerTrace) -> Iterator[Interval]:
    at = answer.received_ns
    for until, stage, cause in (
        (answer.read_ns, "receive", "the client sends its body"),
        (answer.tokenised_ns, "tokenise", ""),
        (answer.accepted_ns, "submit", "the scheduler's answer is awaited"),
    ):
        if until:
            yield Interval(at, until, stage, cause)
            at = until


def _after(answer: AnswerTrace, at: int) -> Iterator[Interval]:
    for begin, end in answer.blocked:
        if end > at:
            yield Interval(at, begin, "stream", "")
            yield Interval(begin, end, "stream", "the client reads slowly")
            at = end
    yield Interval(at, answer.finished_ns, "stream", "")


# --- scheduler and worker -------------------------------------------------------------------------------------------


def _life(
    request_id: str, choice: ChoiceTrace, submitted_ns: int, end_ns: int, steps: Sequence[StepTrace]
) -> Iterator[Interval]:
    at = submitted_ns
    if not choice.stays:
        yield from _queued("queue", request_id, choice, at, end_ns, steps)
        return
    usual = _usual_us(steps)
    left: Stay | None = None
    for stay in choice.stays:
        stage = "queue"
        if left is not None:
            stage = "preempted"
        yield from _queued(stage, request_id, choice, at, stay.admitted_ns, steps, left)
        until = stay.left_ns or end_ns
        yield from _ran(request_id, choice.choice, stay, until, steps, usual, again=left is not None)
        at, left = until, stay
    if at < end_ns:
        yield from _queued("preempted", request_id, choice, at, end_ns, steps, left)


def _queued(
    stage: str, request_id: str, choice: ChoiceTrace, begin: int, end: int, steps: Sequence[StepTrace],
    left: Stay | None = None,
) -> Iterator[Interval]:  # fmt: skip
    """Waiting, cut where its cause changed: what the scheduler noted of it, or else what the head of the queue lacked.

    For want of a place nobody is looked at, so that then the queue's cause counts. A preempted sequence waits in no
    queue: only what was noted of itself counts.
    """
    reason = f"preempted: {left.why_left.replace('_', ' ')}" if left is not None else ""
    by = left.by if left is not None else ""
    changes = [(since, LACKS.get(lack, lack), other) for since, lack, other in choice.causes if begin <= since < end]
    marks = {begin: (reason, by)}
    own: tuple[str, str] | None = None
    moments = sorted(
        [(since, 1, cause, other) for since, cause, other in changes]
        + [
            (one.planned_ns, 0, one.lack, one.lack_of)
            for one in steps
            if left is None and begin <= one.planned_ns < end
        ]
    )
    for at, kind, cause, other in moments:
        if kind == 1:
            own = (cause, other)
            marks[at] = own
        elif cause in ("slots", "preempted") and other != request_id:
            marks[at] = (LACKS[cause], other)
        elif own is not None:
            marks[at] = own
        elif cause and other and other != request_id:
            marks[at] = (f"behind others: the first of them waits, {LACKS.get(cause, cause)}", other)
    at, (cause, by) = begin, marks.pop(begin)
    for moment, (following, other) in sorted(marks.items()):
        yield Interval(at, moment, stage, cause, by)
        at, cause, by = moment, following or reason, other
    yield Interval(at, end, stage, cause, by)


def _ran(
    request_id: str, number: int, stay: Stay, end: int, steps: Sequence[StepTrace], usual_us: float,
    again: bool,
) -> Iterator[Interval]:  # fmt: skip
    """In the batch: step by step, from result to result. ``again``: it comes back after a preemption."""
    at = stay.admitted_ns
    todo = stay.known - stay.cached
    kind = "recompute " if again else ""
    if stay.cached:
        kind = f"{stay.cached:,} of {stay.known:,} tokens are cached; {kind}"
    for one in steps:
        if one.worker != stay.worker or one.step < stay.first_step or not one.result_ns or at >= end:
            continue
        until = min(one.result_ns, end)
        own = sum(tokens for name, choice, tokens in one.chunks if (name, choice) == (request_id, number))
        others = [(tokens, name) for name, _, tokens in one.chunks if name != request_id]
        most = max(others, default=(0, ""))
        beside = f", beside {sum(tokens for tokens, _ in others):,} prompt tokens of others" if others else ""
        if todo > 0 and own:
            yield Interval(at, until, "prefill", f"{kind}{own:,} tokens{beside}", most[1])
        elif todo > 0:
            cause = "the token budget went to other prompts" if others else "the token budget went to decodes"
            yield Interval(at, until, "prefill", cause, most[1])
        else:
            cause, by = _why_slow(one, until - at, usual_us, most)
            yield Interval(at, until, "decode", cause, by)
        todo -= own
        at = until
    if at < end:
        yield Interval(at, end, "prefill" if todo > 0 else "decode", "the worker's result is awaited")


def _why_slow(step: StepTrace, took_ns: int, usual_us: float, most: tuple[int, str]) -> tuple[str, str]:
    if not usual_us or took_ns / 1e3 < SLOW * usual_us:
        return "", ""
    if step.prefill:
        return f"{step.prefill:,} prompt tokens of others in the step", most[1]
    if step.preempted:
        return "preemptions in the step", step.preempted[0][0]
    if step.wait_us > usual_us / 2:
        return "the worker waited for its plan", ""
    if took_ns / 1e3 - step.forward_us > usual_us / 2:
        return "between worker and scheduler", ""
    return "a slow step", ""


def _usual_us(steps: Sequence[StepTrace]) -> float:
    """The median of decode-only steps."""
    plain = [one.forward_us for one in steps if one.result_ns and one.decodes and not one.chunks]
    return statistics.median(plain) if plain else 0.0


# --- tidying --------------------------------------------------------------------------------------------------------


def _contiguous(found: Sequence[Interval]) -> Iterator[Interval]:
    at = found[0].begin_ns if found else 0
    for one in found:
        end = max(at, one.end_ns)
        if one.begin_ns > at:  # between what two processes noted
            yield Interval(at, one.begin_ns, "bus")
            at = one.begin_ns
        if end > at:
            yield Interval(at, end, one.stage, one.cause, one.by)
        at = max(at, end)


def _joined(found: Iterator[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for one in found:
        if joined and (joined[-1].stage, joined[-1].cause, joined[-1].by) == (one.stage, one.cause, one.by):
            joined[-1] = Interval(joined[-1].begin_ns, one.end_ns, one.stage, one.cause, one.by)
        else:
            joined.append(one)
    return joined
