"""Two ranks, this process and a follower, give the tokens of one; a follower that does not ends the worker."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from batch_driver import BatchDriver

from shared.lifecycle import ServiceFault, StartupError
from shared.messages import Capacity, Sampling, SlotStart, StepPlan, pack_tokens
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.parallel.followers import Followers
from worker.parallel.load import load_over_ranks
from worker.parallel.ranks import leave
from worker.runner import Runner
from worker.torch_runner import TorchRunner

GREEDY = Sampling(seed=1, max_tokens=20, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(seed=5, max_tokens=20, temperature=0.8, top_p=0.9, ignore_eos=True, frequency_penalty=0.5)
BEAMS = Sampling(seed=1, max_tokens=4, beam_width=3)
LONG, SHORT = [1 + index * 7 % 250 for index in range(70)], [3 + index * 5 % 250 for index in range(9)]


@dataclass
class Led:
    runner: TorchRunner
    followers: Followers
    alone: dict[str, object]  # what one rank says
    capacity: Capacity  # of one rank


@pytest.fixture(scope="module")
def led(tiny_model: Callable[..., Path]) -> Iterator[Led]:
    folder = str(tiny_model("llama"))
    threads = torch.get_num_threads()
    one = TorchRunner.load(folder, dtype="float32", kv_cache_memory=1 << 20, num_threads=1, self_check=False)
    alone = {"mixed": mixed(one, _plain(one)), "forked": forked(one, _plain(one)), "beams": beams(one, _plain(one))}
    config = WorkerConfig(model=folder, dtype="float32", device="cpu", tensor_parallel=2, kv_cache_memory="1MiB")
    with mock.patch.dict(os.environ):
        runner, followers = load_over_ranks(config, "load-model")
        assert isinstance(runner, TorchRunner)
        yield Led(runner, followers, alone, one.capacity)
        followers.close()
        leave()
    torch.set_num_threads(threads)


def _plain(runner: Runner) -> Batch:
    capacity = runner.capacity
    return Batch(capacity.block_size, capacity.num_blocks, capacity.max_model_len, frozenset(capacity.eos_token_ids))


def mixed(runner: TorchRunner, batch: Batch) -> list[list[int]]:
    """Chunks beside decodes, sequences that come and go, one that is preempted and starts again."""
    driver = BatchDriver(runner)
    driver.batch = batch
    long = driver.start(LONG, GREEDY)
    driver.step({long.slot: 30})
    short = driver.start(SHORT, SEEDED, prompt_index=1)
    driver.step({long.slot: 40, short.slot: 9})
    for _ in range(5):
        driver.step({long.slot: 1, short.slot: 1})
    driver.drop(long)
    again = driver.start(LONG, GREEDY, generated=long.tokens)
    driver.step({short.slot: 1, again.slot: 16})
    driver.run_to_end(16)
    return [again.tokens, short.tokens]


def forked(runner: TorchRunner, batch: Batch) -> list[int]:
    """Two choices of one prompt, of which the second takes over the first's page."""
    prompt = LONG[:16]
    fields = {"request_id": "r", "attempt": 1, "gateway": "g", "prompt_len": 16, "sampling": SEEDED}
    first = SlotStart(slot=0, choice=0, tokens=pack_tokens(prompt), pages=[1, 2], **fields)  # type: ignore[arg-type]
    other = SlotStart(slot=1, choice=1, tokens=b"", pages=[], computed=16, parent=0, **fields)  # type: ignore[arg-type]
    plans = [StepPlan(1, "w", 1, 1, starts=[first, other], chunks=[(0, 16)])]
    plans += [StepPlan(1, "w", 1, 2, pages=[(1, [3])], decodes=[0, 1])]
    plans += [StepPlan(1, "w", 1, number, decodes=[0, 1]) for number in range(3, 8)]
    return run(runner, batch, plans)


def beams(runner: TorchRunner, batch: Batch) -> list[int]:
    """The best continuations of a beam's first step."""
    start = SlotStart(0, "r", 1, 0, "g", pack_tokens(SHORT), len(SHORT), [1], BEAMS)
    step = batch.stage(StepPlan(2, "w", 1, 1, starts=[start], chunks=[(0, len(SHORT))]))
    return batch.settle(step, runner.forward(batch, step)).candidates[0][1]


def run(runner: TorchRunner, batch: Batch, plans: list[StepPlan]) -> list[int]:
    tokens = []
    for plan in plans:
        step = batch.stage(plan)
        tokens += batch.settle(step, runner.forward(batch, step)).tokens
    return tokens


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.parallel.load.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(StartupError, match=r"^tensor-parallel is 2, and there is 1 GPU$"):
        load_over_ranks(WorkerConfig(tensor_parallel=2), "load-model")


def test_two_ranks_choose_what_one_chooses(led: Led) -> None:
    for name, what in {"mixed": mixed, "forked": forked, "beams": beams}.items():
        batch = led.followers.batch(led.runner.capacity)
        assert what(led.runner, batch) == led.alone[name], name  # type: ignore[operator]
        batch.clear()
    assert not led.followers.fault


def test_the_scheduler_is_told_of_one_ranks_pages(led: Led) -> None:
    """Each holds half of the heads, so that the same memory, divided, has room for as many tokens."""
    assert led.runner.capacity.kv_bytes_per_token == led.capacity.kv_bytes_per_token // 2
    assert led.runner.capacity.num_blocks == led.capacity.num_blocks
    assert led.runner.model.num_kv_heads == 1


def test_a_follower_that_chooses_other_tokens_ends_the_worker_with_a_reason(led: Led) -> None:
    batch = led.followers.batch(led.runner.capacity)
    start = SlotStart(0, "r", 1, 0, "g", pack_tokens(SHORT), len(SHORT), [1], GREEDY)
    run(led.runner, batch, [StepPlan(3, "w", 1, 1, starts=[start], chunks=[(0, len(SHORT))])])
    batch._outcomes[0].tokens[0] += 1
    with contextlib.suppress(RuntimeError, ServiceFault):  # it may be gone before it has run its part
        led.runner.forward(batch, batch.stage(StepPlan(3, "w", 1, 2, decodes=[0])))
    deadline = time.monotonic() + 60
    while not led.followers.fault and time.monotonic() < deadline:
        time.sleep(0.01)
    assert led.followers.fault == "rank 1: it chose other tokens than rank 0 in step 1 (1 of 1)"
    assert led.followers.ended_by(3, 2, "a connection is gone"), "which is no fault of this step"
    with pytest.raises(ServiceFault, match="it chose other tokens"):
        batch.stage(StepPlan(3, "w", 1, 3))
