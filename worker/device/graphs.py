"""Steps that only decode, at a few batch sizes each recorded as a graph: one launch instead of hundreds.

A step of ``n`` rows runs as one of the next size of :func:`sizes_up_to`; the rows beyond ``n`` stand for nothing: each
is a sequence of one key, of the scratch slot, in the scratch page. A graph holds for sequences of up to so many keys,
a power of two: kernels read each sequence's own length on the device, but what they launch is bounded by it. Mixed
steps are not captured, in whole or in pieces: they are bound by arithmetic, and what their launches take is hidden
behind the step before.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch

from kernels.contract import DeviceBatch
from worker.device.lora import NOBODY
from worker.device.model import DeviceModel
from worker.device.port import Graph, Port
from worker.device.state import DeviceState

log = logging.getLogger("headrace.worker.device")

WARM_UPS = 2
"""Steps that run in the way of a graph before it is captured: they compile, and set up, what must not be in it."""

LEAST_KEYS = 512
"""Bounds on keys below are not told apart."""

MOST_GRAPHS = 256
"""The least recently used goes first. All sizes up to 256 rows, of sequences of up to 32,768 keys, are 245."""

MOST_DROPS = 3
"""Times that all graphs gave way to a step that lacked memory, until no more are captured."""


def sizes_up_to(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, ... up to ``largest``, which is one of them (none if it is 0)."""
    sizes = [size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest]
    return [*sizes, largest] if largest > 0 else []


def key_bound(keys: int, longest: int) -> int:
    """The bound of the graphs that serve sequences of ``keys`` keys."""
    return min(max(LEAST_KEYS, 1 << (keys - 1).bit_length()), max(longest, keys))


def bounds_up_to(longest: int) -> list[int]:
    """All bounds on keys where no sequence is longer."""
    bounds = [key_bound(1, longest)]
    while bounds[-1] < longest:
        bounds.append(key_bound(bounds[-1] + 1, longest))
    return bounds


class DecodeGraphs:
    """``largest``: rows; 0 has no step run here. ``room``: bytes of the device's memory after which nothing more is
    captured. ``adapters``: rows may have LoRA adapters."""

    def __init__(
        self, model: DeviceModel, state: DeviceState, port: Port, block_size: int, longest: int, largest: int,
        room: int, adapters: bool = False,
    ) -> None:  # fmt: skip
        self._model = model
        self._state = state
        self._port = port
        self._block_size = block_size
        self._longest = longest
        self._sizes = sizes_up_to(min(largest, model.graph_tokens))
        self._room = room
        self._adapters = adapters
        # By rows, bound on keys, and whether rows have LoRA adapters; the least recently used first.
        self._graphs: OrderedDict[tuple[int, int, bool], Graph] = OrderedDict()
        self._warm: dict[tuple[int, int, bool], int] = {}
        self._drops = 0
        self._ends = ""  # why nothing more is captured
        count = self._sizes[-1] if self._sizes else 0
        device = port.device
        # Where every graph finds what the step is about: slots, positions, and the numbers of adapters.
        self._inputs = torch.zeros((3, count), dtype=torch.int64, device=device)
        self._starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        self._every = torch.arange(count, dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None  # [largest, vocab_size], once their type is known
        self.used = 0  # bytes of the device's memory
        self.replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def size_for(self, rows: int) -> int | None:
        """How many rows a step of ``rows`` decodes runs as; None: it runs elsewhere."""
        return next((size for size in self._sizes if size >= rows), None)

    @property
    def open(self) -> bool:
        """Whether more may be captured."""
        return not self._ends

    def ahead(self) -> list[tuple[int, int, bool]]:
        """What there is to capture before anybody asks for it, as (size, bound on keys, with adapters): the shortest
        sequences first, and of those the largest size, in whose memory the others find room."""
        kinds = (False, True) if self._adapters else (False,)
        bounds = [(keys, kind) for kind in kinds for keys in bounds_up_to(self._longest)]
        return [(size, *bound) for bound in bounds for size in reversed(self._sizes)][:MOST_GRAPHS]

    def capture(self, size: int, keys: int, adapters: bool = False, *, alone: bool = True) -> None:
        """One of :meth:`ahead`, after a step of nobody's. Without memory for the step nothing more is captured; if it
        is not ``alone``, since other ranks wait for their sums by then, it raises what the port does."""

        def nobody() -> None:
            self._inputs[0, :size].fill_(self._state.scratch)
            self._inputs[1, :size].zero_()
            self._inputs[2, :size].fill_(NOBODY)

        try:
            self._port.run(nobody)
            self._port.run(partial(self._pass, size, keys, adapters))
        except self._port.out_of_memory:
            if not alone:
                raise
            self._end("there is no memory for more")
            return
        self._warm[size, keys, adapters] = WARM_UPS
        self._captured((size, keys, adapters))

    def launch(self, inputs: torch.Tensor, keys: int, adapters: bool = False) -> None:
        """The forward pass of ``inputs``, int64 ``[3, size]``: slots, positions, and where ``adapters`` says that there
        are some, their numbers. No sequence has more ``keys``."""
        size = inputs.shape[1]
        self._port.run(lambda: self._inputs[:, :size].copy_(inputs))
        key = size, key_bound(keys, self._longest), adapters
        graph = self._graphs.get(key) or self._captured(key)
        if graph is None:
            self._port.run(partial(self._pass, *key))
            return
        self._graphs.move_to_end(key)
        self.replays += 1
        self._port.run(graph.replay)

    def logits(self, rows: int) -> torch.Tensor:
        """Those of the first ``rows``, valid until the next launch. To be asked in work that runs after it."""
        assert self._logits is not None
        return self._logits[:rows]

    def drop(self) -> None:
        """Give up all graphs: their memory is wanted. Nothing may be running."""
        if not self._graphs:
            return
        self._graphs.clear()
        self._warm.clear()
        self.used = 0
        self._drops += 1
        if self._drops >= MOST_DROPS:
            self._end("steps lacked their memory time and again")

    def _captured(self, key: tuple[int, int, bool]) -> Graph | None:
        """A new graph; None where there is to be none, or not yet."""
        runs = self._warm.get(key, 0)
        self._warm[key] = runs + 1
        if self._ends or runs < WARM_UPS:
            return None
        self._port.give_back()  # a capture would, and what it takes could not be told from what is freed
        before = self._port.reserved()
        try:
            graph = self._port.capture(partial(self._pass, *key))
        except self._port.out_of_memory:
            self._end("there is no memory for more")
            return None
        except Exception as error:  # noqa: BLE001  whatever a model's own code does that has no place in a graph
            self._end(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None
        self.used += max(0, self._port.reserved() - before)
        self._graphs[key] = graph
        log.debug("captured decode steps of %d rows, %d keys at most; graphs take %d MiB", *key[:2], self.used >> 20)
        if len(self._graphs) > MOST_GRAPHS:  # capturing has waited for the device: the oldest is not running
            dropped, _ = self._graphs.popitem(last=False)
            self._warm.pop(dropped)
        if self.used > self._room:
            self._end("they have the memory that they were given")
        return graph

    def _end(self, reason: str) -> None:
        self._ends = reason
        log.warning("no more graphs are captured, %d are kept: %s", len(self._graphs), reason)

    def _pass(self, size: int, keys: int, adapters: bool) -> None:
        """A step of ``size`` rows: what a graph holds. Everything it reads or writes stays where it is."""
        state, block_size = self._state, self._block_size
        slots, positions = self._inputs[0, :size], self._inputs[1, :size]
        width = min(-(-keys // block_size), state.tables.shape[1])
        tables = state.tables[:, :width].index_select(0, slots)
        pages = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
        batch = DeviceBatch(
            query_start=self._starts[: size + 1],
            visible=(positions + 1).to(torch.int32),
            block_tables=tables,
            write_slots=pages * block_size + positions % block_size,
            max_query=1,
            max_keys=keys,
        )
        logits = self._model.forward(
            state.last_token.index_select(0, slots), positions, batch, self._every[:size],
            self._inputs[2, :size] if adapters else None,
        )  # fmt: skip
        if self._logits is None:
            self._logits = logits.new_zeros((len(self._every), logits.shape[1]))
        self._logits[:size].copy_(logits)


def padded(
    slots: Sequence[int], positions: Sequence[int], size: int, scratch: int, adapters: Sequence[int] | None = None
) -> list[list[int]]:
    """``[3, size]`` for :meth:`DecodeGraphs.launch`: rows beyond those given are of the scratch slot."""
    filler = size - len(slots)
    numbers = [NOBODY] * len(slots) if adapters is None else adapters
    return [[*slots, *[scratch] * filler], [*positions, *[0] * filler], [*numbers, *[NOBODY] * filler]]
