"""The gateway's truth about requests in flight: what was asked, which tokens each choice has. Pure: no I/O, no clock.

Tokens come at most once and possibly twice, late or from the past. The numbers decide: another attempt, a lower epoch
and offsets that are here already are dropped; an offset beyond what is here is a gap, and a terminal entry says how
many tokens there should be. Where log-probabilities are wanted each token must have its own, and those of the prompt
must be complete before any token. A hole never passes for text: whatever is missing makes the request :class:`Lost`.
Only between two workers nothing keeps order: where a sequence has moved, some entries of the second one are kept until
what they have overtaken is here.

What was lost is resumed as a new *attempt*: :meth:`RequestRecord.suspend` refuses all entries of older ones from then
on, and :meth:`RequestRecord.offer` is the submission that goes on behind the tokens that are here. They are right
whoever computes the rest, since a token is a function of the logits, the seed, the choice and the position. What makes
no sense, or ended for good, is :class:`Broken` and stays an error.
"""

from __future__ import annotations

import array
import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from shared.messages import EndReason, RequestEvent, Submit, TokenBatch, TokenEntry, TokenLogprob, pack_tokens

Owner = TypeVar("Owner")

MOST_EARLY = 16
"""Entries of a choice that are kept: by then what they seem to have overtaken is rather lost."""

MOST_OVERTAKEN = 4
"""Tokens that may be on their way from the worker before: those of the few plans that it had in flight at last."""

NONSENSE = "the worker sent log-probabilities that make no sense"


@dataclass(slots=True)
class ChoiceRecord:
    tokens: array.array[int] = field(default_factory=lambda: array.array("I"))
    closed: bool = False  # of no more interest: later entries are dropped
    ended: bool = False  # nobody runs it any more: there is nothing to cancel
    cancelled_s: float | None = None  # when its cancel was sent last, if it was stopped here
    worker: str = ""  # whose tokens came last in this attempt
    early: list[tuple[str, TokenEntry]] = field(default_factory=list)  # (worker, entry) by offset, see MOST_EARLY


@dataclass(slots=True)
class RequestRecord(Generic[Owner]):
    """One submitted prompt. ``owner`` is whoever waits for it; the ledger only hands it back."""

    submit: Submit  # the first one
    owner: Owner
    choices: list[ChoiceRecord]
    attempt: int = field(init=False)
    epoch: int = 0  # of the scheduler that accepted this attempt; 0 until then
    prompt_logprobs: int = 0  # how many of the prompt's tokens, from the second on, have their log-probabilities here
    wants_logprobs: bool = field(init=False)
    interrupted_s: float | None = None  # when it was lost first since its last progress
    losses: int = 0  # since its last progress
    cause: str = ""  # of the first of them
    trouble: str = ""  # why it does not go on, as last heard
    _oldest: int = field(init=False)  # attempt that somebody may still run

    def __post_init__(self) -> None:
        sampling = self.submit.sampling
        self.wants_logprobs = sampling.logprobs >= 0 or sampling.prompt_logprobs >= 0
        self.attempt = self._oldest = self.submit.attempt

    @property
    def prompt_len(self) -> int:
        return len(self.submit.prompt) // 4  # packed uint32

    @property
    def resuming(self) -> bool:
        """It was accepted once, and lost."""
        return self.attempt > self.submit.attempt

    @property
    def open(self) -> bool:
        """Tokens are still wanted."""
        return any(not choice.closed for choice in self.choices)

    @property
    def running(self) -> bool:
        """Somebody may still be computing it."""
        return any(not choice.ended for choice in self.choices)

    def settle(self) -> None:
        """Nobody runs any of it, and nobody wants to."""
        for choice in self.choices:
            choice.closed = choice.ended = True

    def refused(self) -> None:
        """Nobody runs this attempt, nor an older one."""
        self._oldest = self.attempt + 1

    def begin_elsewhere(self) -> None:
        """In a mesh that has never heard of it; where it was before, its attempts are cancelled."""
        self.epoch = 0
        self._oldest = self.attempt

    def accept(self, epoch: int) -> None:
        """A scheduler of ``epoch`` runs this attempt, and no older one."""
        self.epoch = max(self.epoch, epoch)
        self._oldest = self.attempt

    def suspend(self, cause: str, reason: str, now_s: float) -> None:
        """Something of it was lost: entries and events of this attempt count no more, and it is to be offered again."""
        self.attempt += 1
        self.epoch = 0
        self.losses += 1
        self.trouble = reason
        for choice in self.choices:
            choice.worker = ""
            choice.early.clear()
        if self.interrupted_s is None:
            self.interrupted_s = now_s
            self.cause = cause

    def go_on(self, now_s: float) -> float | None:
        """It makes progress; how long it had been interrupted, in seconds, or None if it was not."""
        if self.interrupted_s is None:
            return None
        paused_s = now_s - self.interrupted_s
        self.interrupted_s = None
        self.losses = 0
        return paused_s

    def attempts_to_cancel(self) -> range:
        """Those that a scheduler may know: a resume that was sent need not have replaced what ran before it."""
        return range(self._oldest, self.attempt + 1)

    def offer(self) -> Submit:
        """The submission of this attempt: the first one, or one that goes on behind what is here.

        A beam search starts over. The last of ``max_tokens`` tokens is computed again: only a worker says how it ended.
        """
        submit = self.submit
        if not self.resuming:
            return submit
        sampling = submit.sampling
        resumed: list[bytes] = []
        done: list[int] = []
        if not sampling.beam_width:
            most = sampling.max_tokens - 1
            resumed = [b"" if choice.closed else pack_tokens(choice.tokens[:most]) for choice in self.choices]
            done = [index for index, choice in enumerate(self.choices) if choice.closed]
        # What the prefix cache holds of the attempt before has no log-probabilities.
        salt = f"{submit.request_id}/{self.attempt}" if sampling.prompt_logprobs >= 0 else submit.cache_salt
        return msgspec.structs.replace(
            submit, attempt=self.attempt, resumed=resumed, done_choices=done, cache_salt=salt
        )


class Progress(msgspec.Struct, frozen=True, gc=False):  # one for each entry of a batch: a dataclass costs four times it
    """New tokens of one choice; ``end`` is an EndReason's value in the piece that ends it."""

    choice: int
    tokens: list[int]
    end: str = ""
    log_prob: float = 0.0  # of ``tokens`` together, where it was asked for
    logprobs: Sequence[TokenLogprob] = ()  # one for each token, where they were asked for
    cached: int = -1  # prompt tokens that the prefix cache held, where the worker tells


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Log-probabilities of the prompt's tokens that follow those that are here already."""

    logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Lost:
    """Something of this attempt will never come; the request is to be resumed. ``cause``: lost, moved or gap."""

    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A choice (-1: all of them) cannot go on; ``reason`` is for the client."""

    choice: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unwanted:
    """A choice that was stopped here goes on."""

    choice: int


Update = Progress | PromptPiece | Lost | Broken | Unwanted


class Ledger(Generic[Owner]):
    """Owns every open request of this gateway."""

    def __init__(self) -> None:
        self.epoch = 0  # highest epoch heard of; lower ones are fenced off
        self.dropped_entries = 0
        self._records: dict[str, RequestRecord[Owner]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord[Owner]]:
        return iter(list(self._records.values()))

    def open(self, submit: Submit, owner: Owner) -> RequestRecord[Owner]:
        record = RequestRecord(submit, owner, [ChoiceRecord() for _ in range(submit.n)])
        self.take(record)
        return record

    def take(self, record: RequestRecord[Owner]) -> None:
        """Own a request from now on. Raises ValueError for one that is here already."""
        if record.submit.request_id in self._records:
            raise ValueError(f"{record.submit.request_id} is open already")
        self._records[record.submit.request_id] = record

    def close(self, request_id: str) -> None:
        """Forget a request. Closing twice, or what was never open, is fine."""
        self._records.pop(request_id, None)

    def live(self) -> list[tuple[str, int]]:
        """(request, attempt) of every request that still wants tokens; attempt 0 of one that is not accepted yet."""
        return [
            (request_id, record.attempt if record.epoch else 0)
            for request_id, record in self._records.items()
            if record.open
        ]

    def apply_tokens(self, batch: TokenBatch) -> Iterator[tuple[RequestRecord[Owner], Update]]:
        """What a batch means for the requests that are open, entry by entry.

        Whoever is told of a loss suspends the request before he goes on: later entries are then of an older attempt.
        """
        if batch.epoch < self.epoch:
            self.dropped_entries += len(batch.entries)
            return
        for entry in batch.entries:
            record = self._records.get(entry.request_id)
            if record is None or entry.attempt != record.attempt or not 0 <= entry.choice < len(record.choices):
                self.dropped_entries += 1
                continue
            if record.epoch < batch.epoch:  # its tokens have overtaken the reply
                record.accept(batch.epoch)
            if entry.prompt_logprobs and (piece := _apply_prompt(record, entry)) is not None:
                yield record, piece
                if not isinstance(piece, PromptPiece):
                    continue
            choice = record.choices[entry.choice]
            if choice.worker != batch.worker:
                if entry.offset <= len(choice.tokens) or choice.closed:
                    choice.worker = batch.worker
                elif entry.end or entry.prompt_logprobs or len(choice.early) == MOST_EARLY:
                    entry = choice.early[0][1] if choice.early else entry  # says what is missing
                elif choice.early or entry.offset <= len(choice.tokens) + MOST_OVERTAKEN:
                    insort(choice.early, (batch.worker, entry), key=lambda one: one[1].offset)
                    continue
            update = _apply(record, choice, entry)
            if update is not None:
                yield record, update
            elif entry.tokens or entry.end or not entry.prompt_logprobs:
                self.dropped_entries += 1
                if choice.cancelled_s is not None and not entry.end:
                    yield record, Unwanted(entry.choice)
            while choice.early and choice.early[0][1].offset <= len(choice.tokens):  # (none after a loss)
                choice.worker, entry = choice.early.pop(0)
                update = _apply(record, choice, entry)
                if update is not None:
                    yield record, update
                else:
                    self.dropped_entries += 1

    def apply_event(self, event: RequestEvent) -> tuple[RequestRecord[Owner], Broken | Lost] | None:
        """What a scheduler's word means: the request is to be resumed, or a choice, or all, ends with an error.

        One worker's loss tells of some of the choices, another one's that the request is to blame: what is final counts
        for an older attempt too, until a newer one is accepted.
        """
        record = self._records.get(event.request_id)
        if record is None or event.epoch < self.epoch:
            return None
        lost = event.kind in ("lost", "moved")
        if event.attempt not in ((record.attempt,) if lost else record.attempts_to_cancel()):
            return None
        if event.choice >= len(record.choices):
            return None
        affected = record.choices if event.choice < 0 else [record.choices[event.choice]]
        if all(choice.closed for choice in affected):
            return None
        reason = f"the request was {event.kind}: {event.reason or 'no reason given'}"
        if lost:
            return record, Lost(event.kind, reason)
        for choice in affected:
            choice.closed = choice.ended = True
        return record, Broken(max(-1, event.choice), reason)

    def check(self) -> None:
        """Raise AssertionError unless the books are in order."""
        for request_id, record in self._records.items():
            assert request_id == record.submit.request_id
            assert len(record.choices) == record.submit.n
            for choice in record.choices:
                assert len(choice.tokens) <= record.submit.sampling.max_tokens
                assert len(choice.early) <= MOST_EARLY
                assert choice.closed or all(entry.offset > len(choice.tokens) for _, entry in choice.early)
            assert record.prompt_logprobs <= max(0, record.prompt_len - 1)
            assert record.submit.attempt <= record._oldest <= record.attempt + 1
            assert (record.interrupted_s is None) == (record.losses == 0)


def _apply(record: RequestRecord[Owner], choice: ChoiceRecord, entry: TokenEntry) -> Update | None:
    """Book one entry's tokens, or None if it says nothing new."""
    if choice.closed:
        return None
    have = len(choice.tokens)
    if entry.offset > have:
        return Lost("gap", f"tokens {have} to {entry.offset - 1} were lost on the way")
    tokens = entry.tokens[have - entry.offset :]
    if not tokens and not entry.end:
        return None
    if entry.end and entry.end not in (EndReason.STOP, EndReason.LENGTH):
        if entry.end == EndReason.CANCELLED:  # not by this gateway: it would not wait for it
            return Lost("lost", "it was cancelled by somebody else")
        choice.closed = choice.ended = True
        told = f": {entry.reason}" if entry.reason else ""
        return Broken(entry.choice, f"the worker ended it as {entry.end}{told}")
    logprobs: Sequence[TokenLogprob] = ()
    if record.wants_logprobs:
        if (hole := _hole(record, choice, entry)) is not None:
            return hole
        if record.submit.sampling.logprobs >= 0:
            logprobs = entry.logprobs[have - entry.offset :]
    log_prob = 0.0
    if record.submit.sampling.want_score and tokens:
        if len(tokens) < len(entry.tokens):
            return Lost("gap", "log-probabilities of some tokens came only together with those of others")
        log_prob = entry.log_prob
        if not log_prob < math.inf:
            choice.closed = True
            return Broken(entry.choice, NONSENSE)
    if entry.end and entry.count > have + len(tokens):
        return Lost("gap", f"{have + len(tokens)} of {entry.count} tokens arrived")
    try:
        choice.tokens.extend(tokens)
    except (OverflowError, TypeError):
        choice.closed = True
        return Broken(entry.choice, "the worker sent ids that are no tokens")
    cached = entry.cached if entry.cached < record.prompt_len else -1  # some token is always computed
    if not entry.end:
        return Progress(entry.choice, tokens, "", log_prob, logprobs, cached)
    choice.closed = choice.ended = True
    if entry.count != len(choice.tokens):
        return Broken(entry.choice, f"the worker counts {entry.count} tokens and has sent {len(choice.tokens)}")
    return Progress(entry.choice, tokens, entry.end, log_prob, logprobs, cached)


def _apply_prompt(record: RequestRecord[Owner], entry: TokenEntry) -> Update | None:
    """Book an entry's log-probabilities of the prompt, or None if it has none that are new and wanted."""
    if record.submit.sampling.prompt_logprobs < 0 or not record.open:
        return None
    following = 1 + record.prompt_logprobs  # place of the first token that has none yet; that of place 0 never has
    fresh = entry.prompt_logprobs[max(0, following - entry.prompt_offset) :]
    if not fresh:
        return None
    if entry.prompt_offset > following:
        return Lost("gap", f"log-probabilities of the prompt from {following} on were lost on the way")
    if following + len(fresh) > record.prompt_len or not all(map(_is_sound, fresh)):
        for choice in record.choices:
            choice.closed = True
        return Broken(-1, "the worker sent log-probabilities of the prompt that make no sense")
    record.prompt_logprobs += len(fresh)
    return PromptPiece(fresh)


def _hole(record: RequestRecord[Owner], choice: ChoiceRecord, entry: TokenEntry) -> Lost | Broken | None:
    """What is wrong with the log-probabilities that were asked for, of an entry with new tokens or an end."""
    sampling = record.submit.sampling
    if sampling.prompt_logprobs >= 0 and record.prompt_logprobs < record.prompt_len - 1:
        return Lost("gap", f"log-probabilities of the prompt from {1 + record.prompt_logprobs} on were lost on the way")
    if sampling.logprobs < 0:
        return None
    if len(entry.logprobs) < len(entry.tokens):
        return Lost("gap", f"{len(entry.tokens)} tokens came with {len(entry.logprobs)} log-probabilities")
    if len(entry.logprobs) > len(entry.tokens) or not all(map(_is_sound, entry.logprobs)):
        choice.closed = True
        return Broken(entry.choice, NONSENSE)
    return None


def _is_sound(logprob: TokenLogprob) -> bool:
    """No NaN, nothing infinite but -inf, ids and values in pairs."""
    values = logprob.top_log_probs
    return (
        logprob.log_prob < math.inf
        and len(logprob.top_ids) == len(values)
        and all(value < math.inf for value in values)
        and all(token >= 0 for token in logprob.top_ids)
    )
