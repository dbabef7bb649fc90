"""What a scheduler remembers of requests and steps, as it travels to whoever explains a request (``headrace explain``).

Times are the scheduler's own clock in ns; ``Report.unix_offset_ns`` turns them into unix times.
"""

from __future__ import annotations

import msgspec


class StepTrace(msgspec.Struct, array_like=True):
    """One iteration of one worker, as planned and as it went."""

    worker: str
    step: int
    planned_ns: int
    decodes: int
    chunks: list[tuple[str, int, int]]  # (request, choice, prompt tokens)
    admitted: list[tuple[str, int]]  # (request, choice) that joined, resumed ones too
    preempted: list[tuple[str, str, str]]  # (request, cause, request whose growth it was)
    padding: int
    waiting: int  # sequences in the queue behind it
    lack: str  # what they waited for (scheduler.core.sequence.Lack); empty: nothing waited
    lack_of: str  # the request that is first among them
    result_ns: int = 0  # when its result was in; 0: it is not
    forward_us: int = 0
    wait_us: int = 0  # how long the worker waited for the plan
    recompute: int = 0  # of the prompt tokens, those that had been computed before a preemption
    new_tokens: int = 0  # tokens that it generated

    @property
    def prefill(self) -> int:
        return sum(tokens for _, _, tokens in self.chunks)


class Stay(msgspec.Struct, array_like=True):
    """One time that a sequence was in a batch."""

    worker: str
    first_step: int
    admitted_ns: int
    cached: int  # tokens that it did not have to compute
    known: int  # tokens that it had: prompt, and what was generated before
    left_ns: int = 0  # 0: it is still there
    why_left: str = ""  # an EndReason, a RequestEvent's kind, or the cause of a preemption
    by: str = ""  # of a preemption: the request whose growth it was
    done: int = 0  # prompt tokens planned in this stay
    lost: int = 0  # of a preemption: leading tokens that had been computed, and are to be computed again
    moved_to: str = ""  # the worker where it went on, with its KV blocks
    moved_bytes: int = 0  # that were fetched for that
    fetch_us: int = 0  # time that the fetches took, most of it while it ran on
    transport: str = ""

    @property
    def todo(self) -> int:
        """Tokens that must still be computed before it generates."""
        return self.known - self.cached - self.done

    @property
    def interrupted(self) -> bool:
        """It ended with its worker or its scheduler, not by a preemption or an end of its own."""
        return self.why_left.startswith(INTERRUPTED)

    @property
    def preempted(self) -> bool:
        """Of one after which it came back: it had to give way."""
        return not (self.interrupted or self.moved_to)

    @property
    def forked(self) -> bool:
        """It joined with another choice's tokens and blocks, and samples from that one's logits."""
        return self.cached == self.known


INTERRUPTED = ("lost", "moved")
"""How the ends begin after which a gateway submits a request again."""


class Interruption(msgspec.Struct, array_like=True):
    """Between two attempts."""

    at_ns: int
    why: str
    resumed_ns: int  # when it was submitted again
    attempt: int  # as which it goes on
    causes: list[tuple[int, str, str]]  # why it waited in the attempt before


class ChoiceTrace(msgspec.Struct, array_like=True):
    choice: int
    causes: list[tuple[int, str, str]]  # why it waited: (since ns, Lack, request in the way), as it changed
    stays: list[Stay] = []
    end: str = ""
    ended_ns: int = 0
    generated: int = 0
    first_token_ns: int = 0  # when the result with its first token was in
    interruptions: list[Interruption] = []

    @property
    def interrupted(self) -> bool:
        """It has ended in a way after which its gateway submits it again."""
        return self.end.startswith(INTERRUPTED)


class AnswerTrace(msgspec.Struct, array_like=True):
    """What a gateway remembers of one prompt that it answered. Times are unix ns; 0: it did not come to that."""

    request_id: str
    answer_id: str  # what the client knows it by: the answer's ``id``
    client_id: str  # the client's X-Request-Id, or ours
    endpoint: str
    received_ns: int  # the request's head was in
    read_ns: int = 0  # its body was in
    tokenised_ns: int = 0
    accepted_ns: int = 0  # a scheduler had accepted it
    finished_ns: int = 0  # the last byte was handed to the connection
    outcome: str = ""
    blocked: list[tuple[int, int]] = []  # times at which the client took nothing though something was there


class RequestTrace(msgspec.Struct, array_like=True):
    request_id: str
    gateway: str
    tenant: str
    priority: int
    prompt_len: int
    max_tokens: int
    submitted_ns: int
    position: int  # in the queue, at submit
    choices: dict[int, ChoiceTrace]
    traceparent: str = ""
    answer: AnswerTrace | None = None  # once its gateway has told
    arrival_ns: int = 0  # at its gateway, unix time: the same for all prompts of one call
    client_id: str = ""  # as in AnswerTrace; known from its submission on
    answer_id: str = ""
    attempt: int = 1  # the first that came to this scheduler: those before it were another one's
    pool: str = ""  # of workers, that it waited for first; of a refused one: that it asked for
    adapter: str = ""  # the LoRA adapter that it runs with

    @property
    def live(self) -> bool:
        return any(not choice.end for choice in self.choices.values())

    @property
    def names(self) -> list[str]:
        """What its client may call it."""
        return [name for name in (self.answer_id, self.client_id) if name]

    @property
    def ended_ns(self) -> int:
        return max((choice.ended_ns for choice in self.choices.values()), default=0)

    @property
    def took_ns(self) -> int:
        """From the request's head to the answer's last byte; from submit to end where the gateway has not told."""
        if self.answer is not None and self.answer.finished_ns:
            return self.answer.finished_ns - self.answer.received_ns
        return self.ended_ns - self.submitted_ns


class Report(msgspec.Struct, array_like=True):
    """What one scheduler knows of one request. ``steps`` are those of its workers that overlap its life; where they
    would be too many, the longest and those with prompt tokens or preemptions are kept, and ``left_out`` counts.
    ``siblings`` are the requests of the other prompts that the same call carried; ``now_ns`` is when it was made."""

    scheduler: str
    epoch: int
    unix_offset_ns: int
    request: RequestTrace | None
    steps: list[StepTrace] = []
    left_out: int = 0
    siblings: list[str] = []
    now_ns: int = 0
