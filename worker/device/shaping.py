"""Changing logits on a device while the host goes on: :func:`worker.processors.process` and ``open_up``, bit for bit.

:meth:`Shaper.pack` says what must be uploaded, :meth:`Shaper.apply` launches the work. How often a sequence has which
token stays on the device: a step uploads what has changed. The Triton kernels do the work on a GPU
(:mod:`kernels.triton.shaping`), their twins here elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from worker.device.upload import Packing
from worker.processors import Shape
from worker.token_counts import TokenCounts

LEAST_ROOM = 64
"""Entries of a sequence's run in the beginning."""

LEAST_CAPACITY = 1 << 14
"""Entries of all, 8 bytes each."""


@dataclass(slots=True, eq=False)
class _Run:
    """Where a sequence's entries are, and what they say."""

    start: int
    room: int
    counts: npt.NDArray[np.float32]  # as uploaded, [length]


class CountMirror:
    """:class:`TokenCounts` of many sequences, as (token id, count) entries on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runs: WeakKeyDictionary[TokenCounts, _Run] = WeakKeyDictionary()
        self._used = 0
        self.entries = torch.zeros((0, 2), dtype=torch.int32, device=device)

    def follow(
        self, sequences: Sequence[TokenCounts]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """(start and length of each one's run, places to write, entries to write there)."""
        if not all(self._has_room(counts) for counts in sequences):
            self._make_room(sequences)
        runs, places, entries = [], [], []
        for counts in sequences:
            run = self._runs[counts]
            known, length = len(run.counts), len(counts.ids)
            changed = np.append(np.flatnonzero(counts.counts[:known] != run.counts), np.arange(known, length))
            places.append(run.start + changed)
            entries.append(np.stack([counts.ids[changed], counts.counts[changed]], axis=1).astype(np.int32))
            run.counts = counts.counts.copy()
            runs.append((run.start, length))
        return np.array(runs, dtype=np.int32), np.concatenate(places), np.concatenate(entries)

    def _has_room(self, counts: TokenCounts) -> bool:
        run = self._runs.get(counts)
        return run is not None and run.room >= len(counts.ids)

    def _make_room(self, sequences: Sequence[TokenCounts]) -> None:
        """Runs for those without; where they do not fit behind the others, all of these anew and nothing else."""
        lacking = [counts for counts in sequences if not self._has_room(counts)]
        if self._used + sum(_room_for(counts) for counts in lacking) > len(self.entries):
            wanted = max(2 * sum(_room_for(counts) for counts in sequences), LEAST_CAPACITY)
            if wanted > len(self.entries):
                # What is launched already keeps the old one for as long as it runs: memory is freed in stream order.
                self.entries = torch.zeros((wanted, 2), dtype=torch.int32, device=self._device)
            self._runs.clear()
            self._used = 0
            lacking = list(sequences)
        for counts in lacking:
            room = _room_for(counts)
            self._runs[counts] = _Run(self._used, room, np.empty(0, dtype=np.float32))
            self._used += room


def _room_for(counts: TokenCounts) -> int:
    return max(LEAST_ROOM, len(counts.ids) + len(counts.ids) // 2)


@dataclass(frozen=True, slots=True, eq=False)
class ShapeUpload:
    """What the rows of one step ask: what the host must know of it, and places in what is uploaded."""

    lines: list[tuple[int, int, int, int, int]]  # the table of kernels.triton.shaping
    words: int  # of each line of bits
    longest: int  # run of counted tokens
    runs: list[tuple[int, int, int]]
    bias: int  # rows, ids
    biases: int
    table: int
    bits: int
    bans: int
    run_table: int
    penalties: int
    written: int
    entries: int


class Shaper:
    def __init__(self, device: torch.device, triton: bool) -> None:
        self._kernels: Any = None
        if triton:
            import kernels.triton.shaping

            self._kernels = kernels.triton.shaping
        self._mirror = CountMirror(device)

    def pack(self, shapes: Mapping[int, Shape], vocabulary: int, packing: Packing) -> ShapeUpload | None:
        """Add to ``packing`` what ``shapes``, by row, ask. None if none does."""
        if not shapes:
            return None
        words = -(-vocabulary // 32)
        lines: list[tuple[int, int, int, int, int]] = []
        bits: list[npt.NDArray[np.int32]] = []
        bans: list[int] = []
        for row, shape in shapes.items():
            banned = [token for token in shape.banned if 0 <= token < vocabulary]
            number = -1
            left = len(set(banned)) < vocabulary
            if shape.allowed is not None:
                number = len(bits)
                mask = _words(shape.allowed, vocabulary)
                bits.append(mask)
                left = bool(_without(mask, banned).any())
            lines.append((row, number, len(bans), len(bans) + len(banned), int(not left)))
            bans += banned
        biased = [(row, shape.bias) for row, shape in shapes.items() if shape.bias is not None]
        places = np.array([(row, token) for row, (ids, _) in biased for token in ids.tolist()], dtype=np.int64)
        added = [values for _, (_, values) in biased]
        counted = [(row, shape.sampling, shape.counts) for row, shape in shapes.items() if shape.counts is not None]
        runs, written, entries = np.empty((0, 2), np.int32), np.empty(0, np.int64), np.empty((0, 2), np.int32)
        if counted:
            runs, written, entries = self._mirror.follow([counts for *_, counts in counted])
        run_lines = [(row, start, length) for (row, *_), (start, length) in zip(counted, runs.tolist(), strict=True)]
        penalties = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for _, one, _ in counted]
        return ShapeUpload(
            lines=lines,
            words=words,
            longest=max((length for *_, length in run_lines), default=0),
            runs=run_lines,
            bias=packing.add(places.reshape(-1, 2).T),
            biases=packing.add(np.concatenate(added) if added else np.empty(0, dtype=np.float64)),
            table=packing.add(np.array(lines, dtype=np.int32)),
            bits=packing.add(np.stack(bits) if bits else np.empty((0, words), dtype=np.int32)),
            bans=packing.add(np.array(bans, dtype=np.int32)),
            run_table=packing.add(np.array(run_lines, dtype=np.int32).reshape(-1, 3)),
            penalties=packing.add(np.array(penalties, dtype=np.float64).reshape(-1, 3)),
            written=packing.add(written),
            entries=packing.add(entries),
        )

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor, asked: ShapeUpload, uploaded: Sequence[torch.Tensor]) -> torch.Tensor:
        """``logits`` ``[R, V]`` as the rows ask: changed in place, or a wider copy of half floats. Everything that
        :meth:`pack` has added must be applied, in the same order: the counts build upon one another."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        kernels = self._kernels if logits.dtype == torch.float32 and logits.stride(1) == 1 else None
        table, bits, bans = uploaded[asked.table], uploaded[asked.bits], uploaded[asked.bans]
        entries = self._mirror.entries
        if any(number >= 0 or first < last for _, number, first, last, _ in asked.lines):
            if kernels is not None:
                kernels.forbid(logits, table, bits, bans)
            else:
                _forbid(logits, asked, bits, bans)
        rows, ids = uploaded[asked.bias]
        if len(ids):
            logits.index_put_((rows, ids), logits[rows, ids] + uploaded[asked.biases].to(logits.dtype))
        if asked.longest:
            if len(uploaded[asked.written]):
                entries.index_copy_(0, uploaded[asked.written], uploaded[asked.entries])
            if kernels is not None:
                kernels.penalise(logits, entries, uploaded[asked.run_table], uploaded[asked.penalties], asked.longest)
            else:
                _penalise(logits, asked, entries, uploaded[asked.penalties].to(logits.dtype))
        if kernels is not None:
            kernels.open_up(logits, table, bits, bans)
        else:
            _open_up(logits, asked, bits, bans)
        return logits


def _words(allowed: npt.NDArray[np.uint8], vocabulary: int) -> npt.NDArray[np.int32]:
    """A mask's bits as words for exactly the tokens that there are."""
    whole = np.zeros(-(-vocabulary // 32) * 4, dtype=np.uint8)
    length = min(len(allowed), len(whole))
    whole[:length] = allowed[:length]
    words = whole.view("<u4")
    words[-1] &= np.uint32(0xFFFFFFFF >> (-vocabulary % 32))
    return words.view(np.int32)


def _without(mask: npt.NDArray[np.int32], banned: Sequence[int]) -> npt.NDArray[np.int32]:
    if not banned:
        return mask
    left = mask.copy().view(np.uint32)
    for token in banned:
        left[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return left.view(np.int32)


def _masks(
    line: tuple[int, int, int, int, int], vocabulary: int, bits: torch.Tensor, bans: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the grammar allows, what the ban leaves of that) of a row: ``[V]``."""
    _, number, first, last, _ = line
    if number < 0:
        allowed = torch.ones(vocabulary, dtype=torch.bool, device=bits.device)
    else:
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        allowed = ((bits[number][:, None] >> shifts) & 1).bool().flatten()[:vocabulary]
    return allowed, allowed.index_fill(0, bans[first:last].long(), False)


def _forbid(logits: torch.Tensor, asked: ShapeUpload, bits: torch.Tensor, bans: torch.Tensor) -> None:
    for line in asked.lines:
        _, left = _masks(line, logits.shape[1], bits, bans)
        logits[line[0]].masked_fill_(~left if not line[4] else torch.ones_like(left), float("-inf"))


def _open_up(logits: torch.Tensor, asked: ShapeUpload, bits: torch.Tensor, bans: torch.Tensor) -> None:
    for line in asked.lines:
        allowed, left = _masks(line, logits.shape[1], bits, bans)
        row = logits[line[0]]
        opened = torch.zeros_like(row).masked_fill_(~(allowed if line[4] else left), float("-inf"))
        row.copy_(torch.where((row > float("-inf")).any(), row, opened))


def _penalise(logits: torch.Tensor, asked: ShapeUpload, entries: torch.Tensor, penalties: torch.Tensor) -> None:
    for (row, start, length), (repetition, frequency, presence) in zip(asked.runs, penalties, strict=True):
        ids = entries[start : start + length, 0].long()
        times = entries[start : start + length, 1].to(logits.dtype)
        values = logits[row].index_select(0, ids)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * times
        values = values - presence * (times > 0)
        logits[row].index_copy_(0, ids, values)
