"""What workers' roles mean for who takes new prompts, and who may go on with what another has computed."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.worker_state import WorkerState
from shared.messages import Capacity, Role


def can_fetch(target: WorkerState, source: WorkerState) -> bool:
    """True if KV blocks of ``source`` can be fetched by ``target``, and mean there what they mean here.

    Of a worker that offers none itself nobody knows whether it can fetch: it may be of a version that can't.
    """
    offered = source.capacity.transfer and target.capacity.transfer
    same = _alike(source.capacity.weights, target.capacity.weights)
    return bool(offered) and same and _form(target.capacity) == _form(source.capacity)


def same_adapter(target: WorkerState, source: WorkerState, adapter: str) -> bool:
    """True if the adapter is the same at both, as far as they tell; so is none."""
    return _alike(*(_weights_of(one.capacity, adapter) for one in (target, source)))


def other_weights(one: Capacity, other: Capacity) -> str:
    """The model or the first adapter for which the two tell of different weights; empty: none."""
    if not _alike(one.weights, other.weights):
        return f"model {one.model!r}"
    for name in one.adapters:
        if name in other.adapters and not _alike(_weights_of(one, name), _weights_of(other, name)):
            return f"adapter {name!r}"
    return ""


def _weights_of(capacity: Capacity, adapter: str) -> str:
    return dict(zip(capacity.adapters, capacity.adapter_weights, strict=False)).get(adapter, "")


def _alike(one: str, other: str) -> bool:
    """Whether digests of weights are equal. One that is not told, as of an older worker, is taken to be."""
    return one == other or not (one and other)


def settle_newcomers(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Set which of the workers of one queue take new prompts: all but those that decode, for which a prefill worker
    computes prompts. It must be able to hand them over, and hold whatever they could: nothing waits for nobody.

    Returns those with which that has changed.
    """
    workers = list(workers)
    givers = [one for one in workers if one.role is Role.PREFILL and not one.draining]
    changed = []
    for worker in workers:
        takes_new = worker.role is not Role.DECODE or not any(_covers(giver, worker) for giver in givers)
        if takes_new is not worker.takes_new:
            worker.takes_new = takes_new
            changed.append(worker)
    return changed


def _covers(giver: WorkerState, worker: WorkerState) -> bool:
    return (
        can_fetch(worker, giver)
        and giver.max_model_len >= worker.max_model_len
        and giver.slots >= worker.slots
        and giver.pool.num_blocks >= worker.pool.num_blocks
        and set(giver.capacity.adapters) >= set(worker.capacity.adapters)
    )


def _form(capacity: Capacity) -> tuple[str, str, str, int]:
    return capacity.model, capacity.dtype, capacity.kv_dtype, capacity.block_size
