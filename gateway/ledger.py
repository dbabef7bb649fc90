"""The gateway's truth about requests in flight: what was asked, which tokens each choice has. Pure: no I/O, no clock.

Tokens come at most once and possibly twice, late or from the past. The numbers decide: another attempt, a lower epoch
and offsets that are here already are dropped; an offset beyond what is here is a gap, and a terminal entry says how
many tokens there should be. A gap ends the choice with an explicit error: a hole never passes for text. Where
log-probabilities are wanted each token must have its own, and those of the prompt must be complete before any token.

Everything that a resume needs is here (prompt, parameters, seed, tokens so far, ``attempt``); today a lost request
ends with an error.
"""

from __future__ import annotations

import array
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from shared.messages import EndReason, RequestEvent, Submit, TokenBatch, TokenEntry, TokenLogprob

Owner = TypeVar("Owner")


@dataclass(slots=True)
class ChoiceRecord:
    tokens: array.array[int] = field(default_factory=lambda: array.array("I"))
    closed: bool = False  # of no more interest: later entries are dropped
    ended: bool = False  # nobody runs it any more: there is nothing to cancel


@dataclass(slots=True)
class RequestRecord(Generic[Owner]):
    """One submitted prompt. ``owner`` is whoever waits for it; the ledger only hands it back."""

    submit: Submit
    owner: Owner
    choices: list[ChoiceRecord]
    epoch: int = 0  # of the scheduler that accepted it; 0 until then
    prompt_logprobs: int = 0  # how many of the prompt's tokens, from the second on, have their log-probabilities here
    wants_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.submit.sampling
        self.wants_logprobs = sampling.logprobs >= 0 or sampling.prompt_logprobs >= 0

    @property
    def prompt_len(self) -> int:
        return len(self.submit.prompt) // 4  # packed uint32

    @property
    def attempt(self) -> int:
        return self.submit.attempt

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


class Progress(msgspec.Struct, frozen=True, gc=False):  # one for each entry of a batch: a dataclass costs four times it
    """New tokens of one choice; ``end`` is an EndReason's value in the piece that ends it."""

    choice: int
    tokens: list[int]
    end: str = ""
    log_prob: float = 0.0  # with ``end``, where it was asked for: cumulative
    logprobs: Sequence[TokenLogprob] = ()  # one for each token, where they were asked for
    cached: int = -1  # prompt tokens that the prefix cache held, where the worker tells


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Log-probabilities of the prompt's tokens that follow those that are here already."""

    logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Broken:
    """A choice (-1: all of them) cannot go on; ``reason`` is for the client."""

    choice: int
    reason: str


Update = Progress | PromptPiece | Broken


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
        if submit.request_id in self._records:
            raise ValueError(f"{submit.request_id} is open already")
        record = RequestRecord(submit, owner, [ChoiceRecord() for _ in range(submit.n)])
        self._records[submit.request_id] = record
        return record

    def close(self, request_id: str) -> None:
        """Forget a request. Closing twice, or what was never open, is fine."""
        self._records.pop(request_id, None)

    def live(self) -> list[tuple[str, int]]:
        """(request, attempt) of every request that still wants tokens."""
        return [(request_id, record.attempt) for request_id, record in self._records.items() if record.open]

    def apply_tokens(self, batch: TokenBatch) -> Iterator[tuple[RequestRecord[Owner], Update]]:
        """What a batch means for the requests that are open, entry by entry."""
        if batch.epoch < self.epoch:
            self.dropped_entries += len(batch.entries)
            return
        for entry in batch.entries:
            record = self._records.get(entry.request_id)
            if record is None or entry.attempt != record.submit.attempt or not 0 <= entry.choice < len(record.choices):
                self.dropped_entries += 1
                continue
            if entry.prompt_logprobs and (piece := _apply_prompt(record, entry)) is not None:
                yield record, piece
            update = _apply(record, record.choices[entry.choice], entry)
            if update is not None:
                yield record, update
            elif entry.tokens or entry.end or not entry.prompt_logprobs:
                self.dropped_entries += 1

    def apply_event(self, event: RequestEvent) -> tuple[RequestRecord[Owner], Broken] | None:
        """What a scheduler's word means: the choice, or the whole request, ends with an error."""
        record = self._records.get(event.request_id)
        if record is None or event.attempt != record.attempt or event.epoch < self.epoch:
            return None
        if event.choice >= len(record.choices):
            return None
        affected = record.choices if event.choice < 0 else [record.choices[event.choice]]
        if all(choice.closed for choice in affected):
            return None
        for choice in affected:
            choice.closed = choice.ended = True
        reason = event.reason or "no reason given"
        return record, Broken(max(-1, event.choice), f"the request was {event.kind}: {reason}")

    def check(self) -> None:
        """Raise AssertionError unless the books are in order."""
        for request_id, record in self._records.items():
            assert request_id == record.submit.request_id
            assert len(record.choices) == record.submit.n
            for choice in record.choices:
                assert len(choice.tokens) <= record.submit.sampling.max_tokens
            assert record.prompt_logprobs <= max(0, record.prompt_len - 1)


def _apply(record: RequestRecord[Owner], choice: ChoiceRecord, entry: TokenEntry) -> Update | None:
    """Book one entry's tokens, or None if it says nothing new."""
    if choice.closed:
        return None
    have = len(choice.tokens)
    if entry.offset > have:
        choice.closed = True
        return Broken(entry.choice, f"tokens {have} to {entry.offset - 1} were lost on the way")
    tokens = entry.tokens[have - entry.offset :]
    if not tokens and not entry.end:
        return None
    logprobs: Sequence[TokenLogprob] = ()
    if record.wants_logprobs:
        reason = _missing(record, entry)
        if reason:
            choice.closed = True
            return Broken(entry.choice, reason)
        if record.submit.sampling.logprobs >= 0:
            logprobs = entry.logprobs[have - entry.offset :]
    try:
        choice.tokens.extend(tokens)
    except (OverflowError, TypeError):
        choice.closed = True
        return Broken(entry.choice, "the worker sent ids that are no tokens")
    cached = entry.cached if entry.cached < record.prompt_len else -1  # some token is always computed
    if not entry.end:
        return Progress(entry.choice, tokens, logprobs=logprobs, cached=cached)
    choice.closed = choice.ended = True
    if entry.count != len(choice.tokens):
        return Broken(entry.choice, f"{len(choice.tokens)} of {entry.count} tokens arrived")
    if entry.end not in (EndReason.STOP, EndReason.LENGTH):
        told = f": {entry.reason}" if entry.reason else ""
        return Broken(entry.choice, f"the worker ended it as {entry.end}{told}")
    return Progress(entry.choice, tokens, entry.end, entry.log_prob, logprobs, cached)


def _apply_prompt(record: RequestRecord[Owner], entry: TokenEntry) -> Update | None:
    """Book an entry's log-probabilities of the prompt, or None if it has none that are new and wanted."""
    if record.submit.sampling.prompt_logprobs < 0 or not record.open:
        return None
    following = 1 + record.prompt_logprobs  # place of the first token that has none yet; that of place 0 never has
    fresh = entry.prompt_logprobs[max(0, following - entry.prompt_offset) :]
    if not fresh:
        return None
    reason = ""
    if entry.prompt_offset > following:
        reason = f"log-probabilities of the prompt from {following} on were lost on the way"
    elif following + len(fresh) > record.prompt_len or not all(map(_is_sound, fresh)):
        reason = "the worker sent log-probabilities of the prompt that make no sense"
    if reason:
        for choice in record.choices:
            choice.closed = True
        return Broken(-1, reason)
    record.prompt_logprobs += len(fresh)
    return PromptPiece(fresh)


def _missing(record: RequestRecord[Owner], entry: TokenEntry) -> str:
    """What an entry with tokens lacks of the log-probabilities that were asked for; empty if nothing."""
    if not entry.tokens and entry.end not in (EndReason.STOP, EndReason.LENGTH):
        return ""  # it ends for another reason, which is told
    sampling = record.submit.sampling
    if sampling.prompt_logprobs >= 0 and record.prompt_logprobs < record.prompt_len - 1:
        return f"log-probabilities of the prompt from {1 + record.prompt_logprobs} on were lost on the way"
    if sampling.logprobs >= 0:
        if len(entry.logprobs) != len(entry.tokens):
            return f"{len(entry.tokens)} tokens came with {len(entry.logprobs)} log-probabilities"
        if not all(map(_is_sound, entry.logprobs)):
            return "the worker sent log-probabilities that make no sense"
    return ""


def _is_sound(logprob: TokenLogprob) -> bool:
    """No NaN, nothing infinite but -inf, ids and values in pairs."""
    values = logprob.top_log_probs
    return (
        logprob.log_prob < math.inf
        and len(logprob.top_ids) == len(values)
        and all(value < math.inf for value in values)
        and all(token >= 0 for token in logprob.top_ids)
    )
