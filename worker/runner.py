"""The seam between the step loop and a model: what a runner must offer, real or simulated."""

from __future__ import annotations

from typing import Protocol

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
