"""A step whose rows run in two passes: which logits come of which, and in what order they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from worker.batch import Row

PromptRows = tuple[int, Row, int]
"""(index among the step's rows, row, how many of its leading tokens' logits are wanted)."""


class Part(NamedTuple):
    """Some of a step's rows. ``places``: of the logits of a pass over them, where they stand among all of the step."""

    rows: list[Row]
    prompts: list[PromptRows]
    places: list[int]


def part_of(rows: Sequence[Row], prompts: Sequence[PromptRows], member: Sequence[bool]) -> Part:
    """The rows for which ``member`` is true."""
    index_in_part = {index: number for number, index in enumerate(i for i, one in enumerate(member) if one)}
    places = []
    done = 0
    for row, inside in zip(rows, member, strict=True):
        places += [done] if inside and row.sample else []
        done += row.sample
    mine = []
    for index, row, wanted in prompts:
        if member[index]:
            mine.append((index_in_part[index], row, wanted))
            places += range(done, done + wanted)
        done += wanted
    return Part([row for row, inside in zip(rows, member, strict=True) if inside], mine, places)


def joined(*parts: tuple[Part, torch.Tensor]) -> torch.Tensor:
    """The logits of all parts in the order of the step."""
    places = torch.tensor([place for part, _ in parts for place in part.places], dtype=torch.int64)
    logits = torch.cat([logits for _, logits in parts])
    out = torch.empty_like(logits)
    out[places.to(logits.device)] = logits
    return out
