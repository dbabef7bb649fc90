"""One step on a device, from its launch until its tokens are on the host."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import DeviceBatch, RaggedBatch
from shared.beams import candidates_wanted
from worker.asking import banned_tokens, prompt_rows, shape_of
from worker.assembly import assemble
from worker.batch import Batch, Row, Sampled, Slot, Step
from worker.device.graphs import padded
from worker.device.lora import numbers_of
from worker.device.memory import PROFILED_ROWS
from worker.device.port import Event, Fetched, fetch
from worker.device.sampling import (
    SETTINGS,
    Pending,
    PromptTokens,
    SamplingParams,
    Teller,
    Wanted,
    gather_prompt,
    pack_settings,
    sequence_settings,
    what_is_asked,
)
from worker.device.state import Delta
from worker.device.upload import Packing
from worker.processors import asks_for_counts

if TYPE_CHECKING:
    from worker.device.runner import DeviceRunner

PROMPT_PIECE = 256
"""Log-probabilities of a prompt's tokens in one entry: at 20 alternatives each some 80 kB."""


@dataclass(slots=True, frozen=True)
class _Choice:
    """A token to be sampled: from the logits of ``row``, for ``slot``, which it or its parent is."""

    slot: Slot
    row: int  # in step.rows
    position: int  # in the sequence, of the token


_Gathered = tuple[list[torch.Tensor], Teller]
"""What is told of a prompt's tokens: see :func:`~worker.device.sampling.gather_prompt`."""


@dataclass(slots=True, frozen=True)
class _Ragged:
    """Rows of a forward pass that is no graph's. ``places``: of what goes up for it."""

    host: RaggedBatch
    places: list[int]
    adapters: int | None  # place of the numbers of its tokens' adapters, if there are any


@dataclass(slots=True, frozen=True)
class _Early:
    """A pass before the step's own, over a prompt's tokens that are told of: their logits are gone by the next one."""

    ragged: _Ragged
    prompts: list[tuple[PromptTokens, int]]  # and where their tokens go up


class DeviceFlight:
    """Implements :class:`~worker.runner.Flight`."""

    def __init__(self, runner: DeviceRunner, batch: Batch, step: Step) -> None:
        self._runner = runner
        self._step = step
        self.swaps: list[tuple[Event, Event]] = []
        self.swap_us = 0
        self._began = runner.port.record()
        self._ended: Event | None = None
        self._logits: torch.Tensor | None = None  # of the rows that are kept; in the order of ``_kept``
        self._pending: Pending | None = None
        self._fetched: Fetched | None = None
        self._failures: dict[int, str] = {}
        place = {id(row): index for index, row in enumerate(step.rows)}
        self._choices = [
            _Choice(row.slot, index, row.start + row.count) for index, row in enumerate(step.rows) if row.sample
        ]
        self._choices += [_Choice(slot, place[id(row)], row.start + row.count) for row, slot in step.forks]
        early, self._rows = cut_prompts(step.rows, PROFILED_ROWS)
        self._prompts = [] if early else prompt_rows(step.rows)  # those that the step's own pass tells of
        told = [(0, row, row.count) for rows in early for row in rows]
        self._pieces = _pieces(told or self._prompts)
        self._gathered: list[_Gathered] = []  # by passes before it
        self.needs_earlier = any(
            choice.slot.pending > 1 and _looks_back(choice.slot) for choice in self._choices
        )  # fmt: skip
        self._packing = Packing()
        self._early = [self._prepare_early(batch, rows) for rows in early]
        self._prepare(batch)

    # --- the forward pass -------------------------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> None:
        """Everything that goes up with the step, but for what its sampling may look up in earlier tokens."""
        runner, rows, packing = self._runner, self._rows, self._packing
        size = None
        if rows and not self._pieces and all(row.count == 1 and not row.padding for row in rows):
            size = runner.graphs.size_for(len(rows))
        self._size = size
        from_device = [(row.slot, row.start) for row in rows] if size is not None else []
        self._delta = Delta(runner.state, batch, from_device, packing)
        if size is not None:
            slots = [row.slot.index for row in rows]
            numbers = numbers_of(rows, runner.adapters)
            self._adapters = numbers is not None
            inputs = padded(slots, [row.start for row in rows], size, runner.state.scratch, numbers)
            self._inputs = packing.add(np.array(inputs, dtype=np.int64))
        elif rows:
            self._ragged = self._prepare_ragged(batch, rows, self._prompts)
        settings = [_settings(choice.slot) for choice in self._choices]
        positions = np.array([choice.position for choice in self._choices], dtype=np.int64)
        packed = pack_settings(np.array(settings, dtype=np.int64).reshape(-1, SETTINGS), positions)
        self._asked = what_is_asked(packed)
        self._settings = packing.add(packed)
        self._targets = packing.add(np.array([choice.slot.index for choice in self._choices], dtype=np.int64))
        self._kept_at = packing.add(np.array(self._kept_places(), dtype=np.int64))

    def _kept_places(self) -> list[int]:
        """For each choice its row of the logits that are kept, if that is not simply the next; else empty."""
        if self._size is not None:
            places = [choice.row for choice in self._choices]
        else:
            sampling = [index for index, row in enumerate(self._step.rows) if row.sample]
            of_row = {index: place for place, index in enumerate(sampling)}
            places = [of_row[choice.row] for choice in self._choices]
        return [] if places == list(range(len(places))) else places

    def _prepare_early(self, batch: Batch, rows: list[Row]) -> _Early:
        ragged = self._prepare_ragged(batch, rows, [(index, row, row.count) for index, row in enumerate(rows)])
        prompts, first = [], 0
        for row in rows:
            tokens = row.slot.tokens[row.start + 1 : row.start + row.count + 1]
            place = self._packing.add(np.array(tokens, dtype=np.int64))
            prompts.append((PromptTokens(first, tokens, row.slot.sampling.prompt_logprobs), place))
            first += row.count
        return _Early(ragged, prompts)

    def _prepare_ragged(self, batch: Batch, rows: list[Row], prompts: list[tuple[int, Row, int]]) -> _Ragged:
        """``prompts``: (index in ``rows``, row, leading tokens whose logits are wanted)."""
        packing = self._packing
        tokens, positions, ragged = assemble(batch, rows, 0, self._runner.capacity.max_model_len)
        starts = ragged.query_start
        pending = [
            (int(starts[index + 1]) - 1, row.slot.index)
            for index, row in enumerate(rows)
            if not row.padding and row.start + row.count > len(row.slot.tokens)
        ]  # whose last token is one that the step before samples
        keep = starts[1:][[row.sample for row in rows]] - 1
        if prompts:
            keep = np.concatenate([keep, *(starts[index] + np.arange(wanted) for index, _, wanted in prompts)])
        places = [
            packing.add(array)
            for array in (
                tokens, positions, ragged.query_start.astype(np.int32), ragged.visible.astype(np.int32),
                ragged.write_slots, keep, np.array([row.slot.index for row in rows], dtype=np.int64),
                np.array([at for at, _ in pending], dtype=np.int64),
                np.array([slot for _, slot in pending], dtype=np.int64),
            )
        ]  # fmt: skip
        numbers = numbers_of(rows, self._runner.adapters)
        adapters = None if numbers is None else packing.add(np.repeat(numbers, [row.count for row in rows]))
        return _Ragged(ragged, places, adapters)

    def forward(self) -> None:
        """Launch all up to the logits. May be launched again if it, or what follows it, lacks memory."""
        runner = self._runner
        port = runner.port
        uploaded = self._uploaded = self._packing.send(runner.uploads)
        port.run(lambda: self._delta.apply(uploaded))
        gathered: list[_Gathered] = []
        self._gathered = gathered
        for early in self._early:
            port.run(partial(self._run_early, early, uploaded, gathered))
        if self._size is not None:
            inputs = uploaded[self._inputs]
            keys = 1 + max(row.start for row in self._rows)
            runner.graphs.launch(inputs, keys, self._adapters)
            count = len(self._rows)
            port.run(lambda: self._have(runner.graphs.logits(count)))
        elif self._rows:
            port.run(lambda: self._have(self._run_ragged(self._ragged, uploaded)))

    def _have(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def _run_early(self, early: _Early, uploaded: list[torch.Tensor], gathered: list[_Gathered]) -> None:
        logits = self._run_ragged(early.ragged, uploaded)
        gathered += [gather_prompt(logits, one, uploaded[place]) for one, place in early.prompts]
        self._have(logits.new_empty((0, logits.shape[1])))  # no view: the pass after this one has the memory

    def _run_ragged(self, rows: _Ragged, uploaded: list[torch.Tensor]) -> torch.Tensor:
        state = self._runner.state
        tokens, positions, starts, visible, write_slots, keep, slots, at, of = (uploaded[p] for p in rows.places)
        if len(at):
            tokens.index_copy_(0, at, state.last_token.index_select(0, of))
        ragged = rows.host
        batch = DeviceBatch(
            query_start=starts,
            visible=visible,
            block_tables=state.tables[:, : ragged.block_tables.shape[1]].index_select(0, slots),
            write_slots=write_slots,
            max_query=int(np.diff(ragged.query_start).max()),
            max_keys=int(ragged.visible.max()),
            host=ragged,
        )
        adapters = None if rows.adapters is None else uploaded[rows.adapters]
        return self._runner.model.forward(tokens, positions, batch, keep, adapters)

    # --- sampling ---------------------------------------------------------------------------------------------------

    def choose(self) -> None:
        """See :meth:`worker.runner.Flight.choose`."""
        began = time.perf_counter()
        if self._choices or self._pieces:
            wanted = self._wanted()
            self._runner.guarded(lambda: self._launch_choice(wanted), self.forward)
        for choice in self._choices:
            if not choice.slot.sampling.beam_width:
                self._runner.state.hold(choice.slot, choice.position)
        self._ended = self._runner.port.record()
        self._runner.guarded_by_itself(self._fetch)
        self._launch_s = time.perf_counter() - began

    def _fetch(self) -> None:
        self._fetched = fetch(self._runner.port, lambda: self._pending.tensors if self._pending is not None else [])

    def _launch_choice(self, wanted: Wanted) -> None:
        """The last thing that it does is to change what the step itself reads: until then it may be launched again."""
        uploaded, drawn, filtered = self._uploaded, *self._asked

        def work() -> None:
            logits = self._logits
            assert logits is not None
            count = len(self._choices)
            kept = uploaded[self._kept_at]
            if len(kept):
                sampled = sum(row.sample for row in self._step.rows) if self._size is None else len(logits)
                logits = torch.cat([logits.index_select(0, kept), logits[sampled:]])
            params = SamplingParams.of(uploaded[self._settings], drawn, filtered)
            pending = self._runner.sampler.enqueue(logits, params, wanted)
            for tensors, teller in self._gathered:
                pending.add(tensors, teller)
            if count:
                self._runner.state.last_token.index_copy_(0, uploaded[self._targets], pending.tokens)
            self._pending, self._logits = pending, None

        self._runner.port.run(work)

    def _wanted(self) -> Wanted:
        eos, vocab_size = self._runner.capacity.eos_token_ids, self._runner.model.vocab_size
        shapes, logprobs, scores, beams = {}, {}, [], {}
        for index, choice in enumerate(self._choices):
            slot = choice.slot
            sampling = slot.sampling
            if slot.ended:
                continue  # in the step before: nobody asks for this token
            banned = banned_tokens(sampling, choice.position - slot.prompt_len, eos, vocab_size)
            if sampling.logprobs >= 0:
                logprobs[index] = sampling.logprobs
            if sampling.beam_width:
                beams[index] = candidates_wanted(sampling, eos), banned
                continue
            if sampling.want_score:
                scores.append(index)
            shape = shape_of(slot, banned, vocab_size, self._failures, index)
            if shape is not None:
                shapes[index] = shape
        first = len(self._choices)
        prompts = []
        for slot, offset, count in self._pieces if not self._early else ():
            tokens = slot.tokens[offset : offset + count]
            prompts.append(PromptTokens(first, tokens, slot.sampling.prompt_logprobs))
            first += count
        return Wanted(shapes, logprobs, scores, beams, prompts)

    # --- and what comes of it ---------------------------------------------------------------------------------------

    def done(self) -> bool:
        """See :meth:`worker.runner.Flight.done`."""
        assert self._fetched is not None
        return self._fetched.ready.done()

    def result(self) -> Sampled:
        """See :meth:`worker.runner.Flight.result`."""
        fetched, ended = self._fetched, self._ended
        assert fetched is not None and ended is not None
        fetched.ready.wait()
        port = self._runner.port
        self.swap_us = self._runner.swap_us = sum(port.elapsed_us(first, last) for first, last in self.swaps)
        self._busy_us = port.elapsed_us(self._began, ended)
        self._runner.landed(self._launch_s, self._busy_us)
        if self._pending is None:
            return Sampled([])
        told = self._pending.finish(fetched.arrays())
        prompts = [
            (slot, offset, described)
            for (slot, offset, _), described in zip(self._pieces, told.prompt_logprobs, strict=True)
        ]
        return Sampled(told.tokens, told.candidates, told.log_probs, told.logprobs, self._failures, prompts)

    def busy_us(self) -> int | None:
        """See :meth:`worker.runner.Flight.busy_us`."""
        return self._busy_us


def cut_prompts(rows: list[Row], most: int) -> tuple[list[list[Row]], list[Row]]:
    """(rows of passes before the step's own, rows of that) so that no pass keeps more logits than memory was measured
    with: ``most``. What is told of a prompt's tokens comes in parts of up to PROMPT_PIECE, each in one of the first.
    """
    asking = prompt_rows(rows)
    if sum(row.sample for row in rows) + sum(wanted for _, _, wanted in asking) <= most:
        return [], rows
    wanted_of = {index: wanted for index, _, wanted in asking}
    early: list[list[Row]] = [[]]
    rest = []
    for index, row in enumerate(rows):
        wanted = wanted_of.get(index, 0)
        for first in range(0, wanted, min(PROMPT_PIECE, most)):
            part = Row(row.slot, row.start + first, min(PROMPT_PIECE, most, wanted - first), sample=False)
            if early[-1] and sum(one.count for one in early[-1]) + part.count > most:
                early.append([])
            early[-1].append(part)
        if wanted < row.count:
            rest.append(Row(row.slot, row.start + wanted, row.count - wanted, row.sample) if wanted else row)
    return ([] if early == [[]] else early), rest


def _looks_back(slot: Slot) -> bool:
    """Whether its sampling looks at the tokens so far."""
    return bool(slot.sampling.grammar or slot.sampling.beam_width or asks_for_counts(slot.sampling))


def _settings(slot: Slot) -> npt.NDArray[np.int64]:
    if slot.settings is None:
        slot.settings = sequence_settings(slot.sampling, slot.prompt_index, slot.choice)
    return slot.settings


def _pieces(prompts: list[tuple[int, Row, int]]) -> list[tuple[Slot, int, int]]:
    """(sequence, index in its prompt, tokens) of what is told of prompts, each small enough for a message."""
    return [
        (row.slot, row.start + first + 1, min(PROMPT_PIECE, wanted - first))
        for _, row, wanted in prompts
        for first in range(0, wanted, PROMPT_PIECE)
    ]
