"""The seam between the step loop and a model: what a runner must offer, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shared.messages import Capacity
from worker.batch import Batch, Sampled, Step


class Runner(Protocol):
    """Runs forward passes over a :class:`~worker.batch.Batch`. Called from one thread only."""

    capacity: Capacity
    kv_bytes_copied: int  # in all, by page copies (copy-on-write); 0 as long as no plan asks for one
    swap_us: int  # spent on swaps in the last forward

    def forward(self, batch: Batch, step: Step) -> Sampled:
        """Execute ``step.swap_outs``, ``step.copies``, ``step.swap_ins``, then one forward pass over ``step.rows``.

        A fork samples from the logits of its row. A beam's candidates are as many as the search must see
        (:func:`shared.beams.candidates_wanted`). The noise of a sampled token depends only on (sampling.seed,
        slot.prompt_index, slot.choice, its position in the sequence). Log-probabilities are the model's, before what
        the sampling parameters do. A grammar that fails ends its sequence alone (``Sampled.failures``). Raises on a
        model fault; the batch is then lost.
        """
        ...


class Flight(Protocol):
    """A step that a device is working on. Everything raises on a model fault; the batch is then lost."""

    needs_earlier: bool  # choosing its tokens looks at those of the step before: that one must be settled first
    swap_us: int  # spent on swaps; known once it is done

    def choose(self) -> None:
        """Have the tokens sampled. Once, before the next step is launched."""
        ...

    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        ...

    def result(self) -> Sampled:
        """Wait for the step and say what it has sampled. Steps end in the order in which they were launched."""
        ...

    def busy_us(self) -> int | None:
        """How long the device worked on it, if it keeps such a clock; to be asked after :meth:`result`."""
        ...


@runtime_checkable
class PipelinedRunner(Protocol):
    """A :class:`Runner` whose steps overlap: the next one may be launched before the last one's tokens are here."""

    def launch(self, batch: Batch, step: Step) -> Flight:
        """:meth:`Runner.forward` up to where the logits are wanted: returns while the device works."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A :class:`Runner` whose device may be lost to this process."""

    lacked_memory: int  # times that a step lacked memory, and was launched again

    def answers(self) -> bool:
        """Whether the device still does anything, now that a step has failed. Waits for what it is at."""
        ...


@dataclass(slots=True)
class Landed:
    """The flight of a step that has been run already."""

    sampled: Sampled
    swap_us: int = 0
    needs_earlier: bool = False

    def choose(self) -> None: ...

    def done(self) -> bool:
        return True

    def result(self) -> Sampled:
        return self.sampled

    def busy_us(self) -> int | None:
        return None
