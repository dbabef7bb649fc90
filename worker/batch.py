"""The persistent batch: the sequences in the worker's slots, kept across steps and changed by each plan's delta.

Owns: slots, their tokens, their block tables, and whether a sequence has ended. Knows no tensors: a
:class:`~worker.runner.Runner` turns the :class:`Step` made here into a forward pass. A sequence that joins or leaves
changes bookkeeping only; no KV entry moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from observability.context import is_sampled
from shared.messages import EndReason, Sampling, SlotStart, StepPlan, TokenEntry, TokenLogprob, unpack_tokens
from worker.token_counts import TokenCounts

SCRATCH_PAGE = 0
"""The page that padding rows write to. No sequence's block table ever names it."""


class PlanError(ValueError):
    """A plan that does not fit the batch (unknown slot, missing page...): the ledgers disagree, and a reset follows."""


Bias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Distinct token ids, and what is added to each one's logit."""


class Guide(Protocol):
    """What follows a sequence's output through its grammar; whoever samples gives the slot one."""

    def accept(self, token: int) -> bool:
        """Take in the next token of the output; whether the grammar is complete with it."""
        ...


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence (one choice of one request) in the batch."""

    index: int
    request_id: str
    attempt: int
    choice: int
    gateway: str
    sampling: Sampling
    prompt_index: int
    traceparent: str
    prompt_len: int
    tokens: list[int]  # prompt and generated
    computed: int  # leading tokens whose KV is in the pages
    num_pages: int
    cached: int  # prompt tokens that the prefix cache held when it joined; -1: it joined with generated tokens
    adapter: str = ""  # the LoRA adapter that it runs with; empty: none
    ended: str = ""  # an EndReason once it has ended
    pending: int = 0  # tokens that steps in flight sample for it, after ``tokens``: their values are not here yet
    traced: bool = False  # whoever caused it wants spans
    first_row_ns: int = 0  # when its first row ran: for spans
    first_token_ns: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)  # (unix ns, step, prompt tokens), where traced
    counts: TokenCounts | None = None  # where penalties look at them; the sampler's
    guide: Guide | None = None  # where Sampling.grammar asks; the sampler's
    bias: Bias | None = None  # where Sampling.logit_bias asks; the sampler's
    settings: npt.NDArray[np.int64] | None = None  # how it is sampled, as a device's sampler wants it

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def prompt_rows(self, start: int, count: int) -> int:
        """Of ``count`` rows from position ``start``, how many leading ones are wanted for the prompt's own tokens.

        The row at position p speaks of the token at p + 1. A sequence that joined with generated tokens has said
        it all before.
        """
        if self.sampling.prompt_logprobs < 0 or self.cached < 0 or self.sampling.beam_width:
            return 0
        return max(0, min(start + count, self.prompt_len - 1) - start)


@dataclass(slots=True, frozen=True)
class Row:
    """``count`` consecutive query tokens of one slot: positions ``start .. start + count - 1``.

    Their ids are ``slot.tokens[start : start + count]``; where that is one longer than ``slot.tokens``, the last is the
    token that the step before samples. KV is written for each; each attends causally to all earlier
    positions and itself. With ``padding`` the rows stand for nothing: any token id, KV written to the scratch page,
    each attends to keys ``[0, max(start, 1))``, and the output is thrown away.
    """

    slot: Slot
    start: int
    count: int
    sample: bool  # the logits of the last token are wanted, and a token is sampled for position start + count
    padding: bool = False


class Run(NamedTuple):
    """What a plan wants of one slot: a row or, of a fork, only a token."""

    slot: Slot
    samples: bool  # the plan counts on a token
    staged: bool  # it had not ended when the step was staged: there is a row for it, or a fork


@dataclass(slots=True)
class Step:
    """What one forward pass runs. It names sequences: by the time that it is settled, their slots may be others'."""

    rows: list[Row]
    runs: list[Run] = field(default_factory=list)  # in the order of the plan and of what is sampled
    forks: list[tuple[Row, Slot]] = field(default_factory=list)  # a slot that samples from the logits of another's row
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (page, place in host memory)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # (place in host memory, page)

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(slots=True)
class Sampled:
    """What a forward pass yields: for each row with ``sample``, in row order, then for each of ``step.forks``."""

    tokens: list[int]  # the sampled token; for a beam (Sampling.beam_width > 0) any value
    # By place in ``tokens``. Beams: their best continuations and log-probabilities, best first.
    candidates: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    # Where Sampling.want_score asks: the token's log-probability under the model, before temperature and filters.
    log_probs: dict[int, float] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # where Sampling.logprobs asks, likewise
    failures: dict[int, str] = field(default_factory=dict)  # why this row alone has no token: its sequence fails
    # (slot, index in its prompt of the first, of the prompt's tokens): where Sampling.prompt_logprobs asks.
    prompt_logprobs: list[tuple[Slot, int, list[TokenLogprob]]] = field(default_factory=list)


@dataclass(slots=True)
class Settled:
    """What a step's result says (see StepResult), and the entries for gateways."""

    tokens: list[int] = field(default_factory=list)
    ended: list[tuple[int, str]] = field(default_factory=list)
    entries: list[tuple[Slot, TokenEntry]] = field(default_factory=list)
    candidates: list[tuple[int, list[int], list[float]]] = field(default_factory=list)


class Batch:
    """``tables[slot, i]`` is the page that holds tokens ``i * block_size ..`` of the sequence in ``slot`` (int32).

    A step is staged, runs, and is settled; the next one may be staged before that (:meth:`must_settle` says when not).
    A sequence that turns out to have ended in the earlier step has then run one row of the later one in vain. That
    row's page is its own: a scheduler gives an ended sequence's pages to others only in plans that it makes after the
    result that tells of the end, and those run after the later step. So do all that a later plan has read or written.
    """

    def __init__(self, block_size: int, num_blocks: int, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self.eos_token_ids = eos_token_ids
        self.slots: dict[int, Slot] = {}
        self.tables = np.zeros((16, self.max_blocks_per_seq), dtype=np.int32)
        self.changed: dict[int, int] = {}  # slot: the first place of its table written since somebody took a copy

    def clear(self) -> None:
        self.slots.clear()

    def stage(self, plan: StepPlan) -> Step:
        """Apply the plan's delta and return the rows to run. Raises :class:`PlanError` if the plan does not fit."""
        for index in plan.drops:
            self.slots.pop(index, None)
        for start in plan.starts:
            self._start(start)
        for index, place, page in plan.replaces:
            self._replace_page(self._slot(index), place, page)
        for index, token in plan.feeds:
            self._slot(index).tokens.append(token)
        for index, pages in plan.pages:
            self._append_pages(self._slot(index), pages)
        rows: list[Row] = []
        runs: list[Run] = []
        for index, count in [*((index, 1) for index in plan.decodes), *plan.chunks]:
            slot = self._slot(index)
            if slot.ended:
                runs.append(Run(slot, samples=True, staged=False))
                continue
            row = self._row(slot, count)
            rows.append(row)
            runs.append(Run(slot, row.sample, staged=True))
        for index, count in plan.padding:
            slot = self._slot(index)
            rows.append(Row(slot, max(1, slot.computed), count, sample=False, padding=True))
        forks = self._forks(plan, rows)
        runs += [Run(slot, samples=True, staged=True) for _, slot in forks]
        self._advance(rows, forks)
        return Step(rows, runs, forks, list(plan.copies), list(plan.swap_outs), list(plan.swap_ins))

    def must_settle(self, plan: StepPlan) -> bool:
        """Whether the plan can't be staged while a step is in flight: it adds to tokens that are not all here."""
        parents = [self.slots.get(start.parent) for start in plan.starts if start.parent >= 0]
        return bool(plan.feeds) or any(parent is not None and parent.pending for parent in parents)

    def settle(self, step: Step, sampled: Sampled) -> Settled:
        """Account for what ``step`` has sampled. Steps are settled in the order in which they were staged."""
        settled = Settled()
        for slot, offset, logprobs in sampled.prompt_logprobs:
            # The prompt's, whichever choice computes it: the first choice's entries carry them.
            entry = TokenEntry(
                slot.request_id, slot.attempt, 0, 0, [], prompt_logprobs=logprobs, prompt_offset=offset
            )  # fmt: skip
            settled.entries.append((slot, entry))
        places = iter(range(len(sampled.tokens)))
        for slot, samples, staged in step.runs:
            if not samples:
                continue  # a chunk that does not reach the end samples nothing
            place = next(places, -1) if staged else -1
            if staged:
                slot.pending -= 1
            if slot.ended:
                settled.tokens.append(-1)
            elif place < 0:
                raise PlanError(f"{len(sampled.tokens)} tokens sampled, more expected")
            elif slot.sampling.beam_width:
                settled.tokens.append(-2)
                settled.candidates.append((slot.index, *sampled.candidates[place]))
            else:
                self._take(slot, sampled, place, settled)
        if (left := sum(1 for _ in places)) > 0:
            raise PlanError(f"{len(sampled.tokens)} tokens sampled, {left} too many")
        return settled

    def _take(self, slot: Slot, sampled: Sampled, cursor: int, settled: Settled) -> None:
        token = sampled.tokens[cursor]
        offset = slot.generated
        cached = slot.cached if not offset else -1
        if cursor in sampled.failures:
            slot.ended = EndReason.FAILED.value
            settled.tokens.append(0)  # the scheduler counts one per row
            settled.ended.append((slot.index, slot.ended))
            entry = TokenEntry(slot.request_id, slot.attempt, slot.choice, offset, [], slot.ended, offset,
                               cached=cached, reason=sampled.failures[cursor])  # fmt: skip
            settled.entries.append((slot, entry))
            return
        slot.tokens.append(token)
        slot.ended = self._end_reason(slot, token)
        settled.tokens.append(token)
        count = 0
        if slot.ended:
            settled.ended.append((slot.index, slot.ended))
            count = slot.generated
        logprobs = [sampled.logprobs[cursor]] if cursor in sampled.logprobs else []
        entry = TokenEntry(slot.request_id, slot.attempt, slot.choice, offset, [token], slot.ended, count,
                           sampled.log_probs.get(cursor, 0.0), logprobs, cached=cached)  # fmt: skip
        settled.entries.append((slot, entry))

    def _end_reason(self, slot: Slot, token: int) -> str:
        sampling = slot.sampling
        if slot.guide is not None and slot.guide.accept(token):
            return EndReason.STOP.value
        if slot.generated > sampling.min_tokens:  # so many other tokens came before this one
            if token in self.eos_token_ids and not sampling.ignore_eos:
                return EndReason.STOP.value
            if token in sampling.stop_token_ids:
                return EndReason.STOP.value
        if slot.generated >= sampling.max_tokens:
            return EndReason.LENGTH.value
        return ""

    def _slot(self, index: int) -> Slot:
        try:
            return self.slots[index]
        except KeyError:
            raise PlanError(f"slot {index} is empty") from None

    def _advance(self, rows: list[Row], forks: list[tuple[Row, Slot]]) -> None:
        """What is known without the tokens."""
        for row in rows:
            if not row.padding:
                row.slot.computed += row.count
                row.slot.pending += row.sample
        for _, slot in forks:
            slot.pending += 1

    def _row(self, slot: Slot, count: int) -> Row:
        start = slot.computed
        stop = start + count
        length = len(slot.tokens) + slot.pending
        if count < 1 or stop > length:
            raise PlanError(f"slot {slot.index}: {count} tokens from {start}, the sequence has {length}")
        if stop > slot.num_pages * self.block_size:
            raise PlanError(f"slot {slot.index}: {stop} tokens do not fit in {slot.num_pages} pages")
        return Row(slot, start, count, sample=stop == length)

    def _start(self, start: SlotStart) -> None:
        current = self.slots.get(start.slot)
        if current is not None and not current.ended:
            raise PlanError(f"slot {start.slot} is taken")
        while start.slot >= len(self.tables):
            self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)])
        parent = self._slot(start.parent) if start.parent >= 0 else None
        slot = Slot(
            index=start.slot,
            request_id=start.request_id,
            attempt=start.attempt,
            choice=start.choice,
            gateway=start.gateway,
            sampling=start.sampling,
            prompt_index=start.prompt_index,
            traceparent=start.traceparent,
            traced=is_sampled(start.traceparent),
            prompt_len=start.prompt_len,
            tokens=unpack_tokens(start.tokens) if parent is None else list(parent.tokens),
            computed=start.computed,
            num_pages=0,
            cached=start.computed if parent is None else parent.cached,
            adapter=start.adapter,
        )
        if slot.generated:
            slot.cached = -1
        if parent is None:
            table = start.pages
        else:  # what is written of the parent's; blocks that are reserved for it beyond stay its own
            table = self.tables[parent.index, : min(parent.num_pages, -(-start.computed // self.block_size))].tolist()
        self._append_pages(slot, table)
        self.slots[start.slot] = slot

    def _forks(self, plan: StepPlan, rows: list[Row]) -> list[tuple[Row, Slot]]:
        forks = []
        ends = {row.slot.index: row for row in rows if row.sample}
        for start in plan.starts:
            if start.parent >= 0:
                if start.parent not in ends or start.computed != len(self._slot(start.slot).tokens):
                    raise PlanError(f"slot {start.slot} forks from {start.parent}, whose prompt does not end here")
                forks.append((ends[start.parent], self._slot(start.slot)))
        return forks

    def _replace_page(self, slot: Slot, place: int, page: int) -> None:
        if not (0 <= place < slot.num_pages and SCRATCH_PAGE < page <= self.num_blocks):
            raise PlanError(f"slot {slot.index}: page {page} for place {place} of {slot.num_pages}")
        self.tables[slot.index, place] = page
        self._has_changed(slot.index, place)

    def _append_pages(self, slot: Slot, pages: list[int]) -> None:
        end = slot.num_pages + len(pages)
        if end > self.max_blocks_per_seq:
            raise PlanError(f"slot {slot.index}: {end} pages, the longest sequence has {self.max_blocks_per_seq}")
        if not all(SCRATCH_PAGE < page <= self.num_blocks for page in pages):
            raise PlanError(f"slot {slot.index}: a page outside 1..{self.num_blocks}")
        self.tables[slot.index, slot.num_pages : end] = pages
        self._has_changed(slot.index, slot.num_pages)
        slot.num_pages = end

    def _has_changed(self, index: int, place: int) -> None:
        self.changed[index] = min(place, self.changed.get(index, place))
