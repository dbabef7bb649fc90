"""Why one request took its time: its life as intervals with causes, without a gap from its first byte to its last.

Pure: from what the gateway (:class:`AnswerTrace`) and the scheduler (:class:`Report`) remember. Intervals end where the
next begins, so that they add up to the measured time exactly; what the clocks of two machines say out of order is cut.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shared.flight_record import AnswerTrace, ChoiceTrace, Report, RequestTrace, Stay, StepTrace

SLOW = 1.5
"""A decode step that takes so many times the usual one is told apart, with what was in it."""

LACKS = {
    "turn": "others are before it",
    "slots": "every place in the batch is taken",
    "blocks": "no KV blocks for it",
    "head": "it would hold up the blocked head of the queue",
    "preempted": "preempted requests come back first",
    "prefix": "most of its prompt is being computed already",
    "long contexts": "long contexts hold their share",
    "worker": "another worker is to take it",
    "suspect": "tried in turn after a crash",
    "message": "the plan could carry no more prompts",
}

MOVES = {
    "role": "its prompt is computed, and another worker decodes",
    "drain": "its worker stops, and another one goes on",
    "balance": "its worker runs out of KV blocks, and another one goes on",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """``stage``: where the request was; ``cause``: why it took time there; ``by``: the request in its way, if one.

    ``steps`` iterations are in it, with ``tokens`` prompt tokens of its own and ``others`` of other requests. Where it
    is a single one, ``step`` is that, and ``token`` tells that a token of the request came at its end.
    """

    begin_ns: int
    end_ns: int
    stage: str
    cause: str = ""
    by: str = ""
    note: str = ""  # what holds for all of it
    steps: int = 0
    tokens: int = 0
    others: int = 0
    step: StepTrace | None = None
    token: bool = False

    @property
    def ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


def explain(report: Report) -> list[Interval]:
    """The life of the request's last choice to end, which is what its client waited for. Times are unix ns."""
    return joined(pieces(report))


def pieces(report: Report) -> list[Interval]:
    """The same, iteration by iteration."""
    found: list[Interval] = []
    request = report.request
    answer = request.answer if request is not None else None
    if answer is not None:
        found += _before(answer)
    if request is not None:
        choice = last_choice(request)
        end_ns = choice.ended_ns or report.now_ns
        offset = report.unix_offset_ns
        found += [
            replace(one, begin_ns=one.begin_ns + offset, end_ns=one.end_ns + offset)
            for one in _life(request, choice, max(request.submitted_ns, end_ns), report.steps)
        ]
        if request.attempt > 1 and answer is not None and answer.accepted_ns:
            before = Interval(
                answer.accepted_ns, request.submitted_ns + offset, "interrupted",
                f"another scheduler ran it, and what that one knew of it is gone; resumed as attempt {request.attempt}",
            )  # fmt: skip
            found = sorted([*found, before], key=lambda one: one.begin_ns)
    if answer is not None and answer.finished_ns:
        at = found[-1].end_ns if found else answer.received_ns
        if request is not None and choice.interrupted:  # given up: there was nothing to send meanwhile
            found.append(Interval(at, answer.finished_ns, "interrupted", f"{choice.end}; never resumed"))
        else:
            found += _after(answer, at)
    return list(_contiguous(found))


def last_choice(request: RequestTrace) -> ChoiceTrace:
    """The choice that ended last, or still runs."""
    return max(request.choices.values(), key=lambda one: (one.ended_ns or 1 << 62, one.choice))


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


def _life(request: RequestTrace, choice: ChoiceTrace, end_ns: int, steps: Sequence[StepTrace]) -> Iterator[Interval]:
    at = request.submitted_ns
    if not choice.stays:
        yield from _waited(request.request_id, choice, at, end_ns, steps, None)
        return
    usual = _usual_us(steps)
    left: Stay | None = None
    for number, stay in enumerate(choice.stays):
        until = stay.left_ns or end_ns
        begin = stay.admitted_ns
        parent = request.choices[min(request.choices)]
        if stay.forked and not number and parent is not choice:
            # It joins with the prompt that the first choice computed: until then, that one's life is its own.
            joined = (one.result_ns for one in steps if (one.worker, one.step) == (stay.worker, stay.first_step))
            begin = min(next(joined, 0) or until, until)
            yield from _life(request, parent, begin, steps)
        else:
            if left is not None and left.moved_to:
                yield Interval(at, begin, "move", _why_moved(left), left.moved_to)
            else:
                yield from _waited(request.request_id, choice, at, begin, steps, left)
        again = "" if left is None or left.moved_to else "interruption" if left.interrupted else "preemption"
        yield from _ran(request.request_id, choice, stay, begin, until, steps, usual, again)
        at, left = until, stay
        if at >= end_ns:
            return
    yield from _waited(request.request_id, choice, at, end_ns, steps, left)


def _why_moved(left: Stay) -> str:
    reason = MOVES.get(left.why_left, left.why_left)
    took = f"{left.moved_bytes / (1 << 20):,.1f} MiB of KV blocks in {left.fetch_us / 1000:,.1f} ms"
    return f"{reason}: {took}" + (f" over {left.transport}" if left.transport else "")


def _waited(
    request_id: str, choice: ChoiceTrace, at: int, end: int, steps: Sequence[StepTrace], left: Stay | None
) -> Iterator[Interval]:
    """Between two stays: in the queue, preempted (``left``: the stay before), or between two attempts."""
    if left is not None and left.interrupted:
        left = None
    for one in choice.interruptions:
        if at <= one.at_ns < end:
            if one.at_ns > at:
                yield from _queued("preempted" if left else "queue", request_id, one.causes, at, one.at_ns, steps, left)
            at, left = min(one.resumed_ns, end), None
            yield Interval(one.at_ns, at, "interrupted", f"{one.why}; resumed as attempt {one.attempt}")
    if at < end:
        causes = [cause for one in choice.interruptions for cause in one.causes] + choice.causes
        yield from _queued("preempted" if left else "queue", request_id, causes, at, end, steps, left)


def _queued(
    stage: str, request_id: str, causes: Sequence[tuple[int, str, str]], begin: int, end: int,
    steps: Sequence[StepTrace], left: Stay | None = None,
) -> Iterator[Interval]:  # fmt: skip
    """Waiting, cut where its cause changed: what the scheduler noted of it, or else what the head of the queue lacked.

    For want of a place nobody is looked at, so that then the queue's cause counts. A preempted sequence waits in no
    queue: only what was noted of itself counts.
    """
    reason = f"preempted: {left.why_left.replace('_', ' ')}" if left is not None else ""
    by = left.by if left is not None else ""
    back = f"{reason}; it comes back later: " if left is not None else ""
    changes = [
        (since, back + LACKS.get(lack, lack), other or by) for since, lack, other in causes if begin <= since < end
    ]
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
    request_id: str, choice: ChoiceTrace, stay: Stay, at: int, end: int, steps: Sequence[StepTrace], usual_us: float,
    again: str,
) -> Iterator[Interval]:  # fmt: skip
    """In the batch: step by step, from result to result. ``again``: after what it comes back, if it does."""
    todo = stay.known - stay.cached
    note = f"{stay.cached:,} of {stay.known:,} tokens were cached" if 0 < stay.cached < stay.known else ""
    expected = stay.first_step
    for one in steps:
        if one.worker != stay.worker or one.step < stay.first_step:
            continue
        skipped, expected = one.step > expected, one.step + 1
        if one.result_ns <= at or at >= end:
            continue
        until = min(one.result_ns, end)
        own = sum(tokens for name, number, tokens in one.chunks if (name, number) == (request_id, choice.choice))
        beside = [(tokens, name) for name, _, tokens in one.chunks if name != request_id]
        others = sum(tokens for tokens, _ in beside)
        most = max(beside, default=(0, ""))
        if skipped:
            began = max(at, min(until, one.result_ns - one.forward_us * 1000))
            yield from _forgotten(at, began, choice, todo)
            at, todo = began, todo if own else 0
        if todo == 1 and not own:
            own = 1  # a prompt's last token runs as a decode does
        if todo > 0:
            cause = _why_prefill(one, todo, own, others, again)
            yield Interval(
                at, until, "prefill", cause, most[1], note, 1, own, others, one, todo <= own and until == one.result_ns
            )
        else:
            cause, by = _why_slow(one, until - at, usual_us, most)
            yield Interval(at, until, "decode", cause, by, "", 1, 0, others, one, until == one.result_ns)
        todo -= own
        at = until
    if at < end and expected == stay.first_step and choice.first_token_ns:
        yield from _forgotten(at, end, choice, todo)
    elif at < end:
        cause = stay.why_left if stay.interrupted else "the worker's result is awaited"
        yield Interval(at, end, "prefill" if todo > 0 else "decode", cause)


def _forgotten(begin: int, end: int, choice: ChoiceTrace, todo: int) -> Iterator[Interval]:
    """Steps that are no longer remembered, or were left out for their number."""
    first = min(max(begin, choice.first_token_ns), end) if todo > 0 else begin
    for at, until, stage in ((begin, first, "prefill"), (first, end, "decode")):
        if until > at:
            yield Interval(at, until, stage, "its steps are not remembered one by one")


def _why_prefill(step: StepTrace, todo: int, own: int, others: int, again: str) -> str:
    if own < todo and others > own:
        return "the token budget went to other prompts" if not own else "most of the token budget went to other prompts"
    if own < todo and step.decodes > own:
        return "the token budget went to decodes" if not own else "most of the token budget went to decodes"
    beside = "beside prompts of others" if others else ""
    if again:
        return f"recompute after the {again}" + (f", {beside}" if beside else "")
    return beside


def _why_slow(step: StepTrace, took_ns: int, usual_us: float, most: tuple[int, str]) -> tuple[str, str]:
    if not usual_us or took_ns / 1e3 < SLOW * usual_us:
        return "", ""
    # Of what it took beside the usual, the largest part: on the device, for want of its plan, or on the way.
    device = step.forward_us - usual_us
    plan = min(step.wait_us, took_ns / 1e3 - step.forward_us)
    way = took_ns / 1e3 - step.forward_us - plan
    if device >= max(plan, way):
        if step.prefill:
            return "prompt tokens of others in the step", most[1]
        if step.preempted:
            return "preemptions in the step", step.preempted[0][0]
        return "the step itself was slow", ""
    return ("the worker waited for its plan" if plan >= way else "between worker and scheduler"), ""


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
            yield replace(one, begin_ns=at, end_ns=end)
        at = max(at, end)


def joined(found: Iterable[Interval]) -> list[Interval]:
    """With neighbours that say the same made one."""
    made: list[Interval] = []
    for one in found:
        last = made[-1] if made else None
        if last is not None and (last.stage, last.cause, last.by, last.note) == (
            one.stage, one.cause, one.by, one.note,
        ):  # fmt: skip
            made[-1] = replace(
                last, end_ns=one.end_ns, steps=last.steps + one.steps, tokens=last.tokens + one.tokens,
                others=last.others + one.others, step=None, token=False,
            )  # fmt: skip
        else:
            made.append(one)
    return made
