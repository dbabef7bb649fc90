"""Beams at a simulated worker: what they cost, and how likely their continuations are.

A real model's continuations are unlike one another: one is mostly much likelier than the rest. Here a beam's best one
has a probability drawn from U(0.3, 0.95), and each further one half of what is left; which beams survive, and so how
much they share, follows from that. It is an assumption, not a measurement.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from headrace.simulate.step_time import StepWork
from shared.beams import candidates_wanted
from shared.messages import SlotStart

FIRST_CONTINUATION = 1 << 29
"""Token ids from here on are continuations of beams."""


@dataclass(slots=True)
class _Beam:
    context: int
    known: int  # tokens it has
    wanted: int
    chance: random.Random


class SimulatedBeams:
    def __init__(self) -> None:
        self.in_slot: dict[int, _Beam] = {}

    def start(self, start: SlotStart) -> None:
        known = len(start.tokens) // 4
        chance = random.Random(f"{start.request_id}/{start.choice}/{known}")
        self.in_slot[start.slot] = _Beam(start.computed, known, candidates_wanted(start.sampling, ()), chance)

    def run(self, slot: int, count: int, work: StepWork) -> list[tuple[int, list[int], list[float]]]:
        """Run ``count`` tokens of the beam; what it may go on with, if they reach its end."""
        beam = self.in_slot[slot]
        work.add_rows(beam.context, count)
        beam.context += count
        if count > 1 and beam.context < beam.known:
            return []
        first = beam.chance.randrange(1 << 28)
        likely = beam.chance.uniform(0.3, 0.95)
        left = 1 - likely
        log_probs = [math.log(likely)]
        for _ in range(beam.wanted - 1):
            left /= 2
            log_probs.append(math.log(left))
        log_probs.sort(reverse=True)
        return [(slot, [FIRST_CONTINUATION + first + rank for rank in range(beam.wanted)], log_probs)]
