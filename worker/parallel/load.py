"""Loading a model over several ranks: rank 0's side, and what each rank does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import torch

from observability.startup import start_up
from shared.config import size_bytes
from shared.lifecycle import StartupError
from worker.config import WorkerConfig
from worker.loading import load_model_runner
from worker.model import device_of
from worker.parallel.followers import Followers
from worker.parallel.ranks import Ranks, join, mine, serve_store
from worker.runner import Runner

GPUS = "CUDA_VISIBLE_DEVICES"


def load_over_ranks(config: WorkerConfig, thread_name: str) -> tuple[Runner, Followers]:
    """Start the followers and load the model with them; this process is rank 0 from now on.

    Its own part is loaded on a thread of ``thread_name``, which may be left behind where a follower is lost. Raises
    StartupError, one line, if the model can't be had, ServiceFault if a follower is lost.
    """
    size = config.tensor_parallel
    kind = device_of(config.device).type
    if kind == "cpu":
        os.environ[GPUS] = ""  # transformers takes a GPU where it sees one
    elif size > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise StartupError(f"tensor-parallel is {size}, and there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}")
    store = serve_store(size)
    followers = Followers(config, lambda rank: _visible(kind, rank), store.port)
    ranks = Ranks(0, size, followers.smallest, wants_invariance(config, kind))

    def load() -> Runner:
        join(ranks, store, kind)
        start_up.ended("ranks")
        runner = load_part(config)
        followers.ready()
        ranks.begin_steps()
        return runner

    try:
        return followers.unless_lost(load, thread_name), followers
    except BaseException:
        followers.close()
        raise


def load_part(config: WorkerConfig) -> Runner:
    """What this process is to run of the model. Raises StartupError."""
    ranks = mine()
    assert ranks is not None
    threads = (config.threads or torch.get_num_threads()) // ranks.size
    share = dataclasses.replace(
        config,
        threads=max(1, threads),
        kv_cache_memory=str(size_bytes(config.kv_cache_memory) // ranks.size),
        swap_space=str(size_bytes(config.swap_space) // ranks.size),
    )
    return load_model_runner(share)


def wants_invariance(config: WorkerConfig, device_type: str) -> bool:
    """Whether sums over ranks must not depend on a row's company: on a GPU that costs time, and is asked for."""
    return device_type == "cpu" or config.batch_invariant


def _visible(device_type: str, rank: int) -> Mapping[str, str]:
    """A follower sees its own GPU alone: whatever runs there finds it at index 0, on every thread."""
    if device_type == "cpu":
        return {GPUS: ""}
    given = [name.strip() for name in os.environ.get(GPUS, "").split(",") if name.strip()]
    return {GPUS: given[rank] if given else str(rank)}
