"""The core and a runner in one process: every request gets its tokens, whatever the policy; a fault is told."""

from __future__ import annotations

import itertools
from contextlib import closing

import pytest

from headrace.bench.workload import Shot
from headrace.gpu_check.one_process import OneProcess, ServingFailed
from scheduler.core.limits import Limits
from shared.messages import Capacity
from worker.batch import Batch, Sampled, Step
from worker.simulated import SimulatedRunner, StepTime, expected_tokens

VOCABULARY = 100
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_limit=8)


def runner() -> SimulatedRunner:
    capacity = Capacity("model", 64, 4, 200, VOCABULARY, [], "simulated", grammars=False)
    return SimulatedRunner(capacity, StepTime(200, 10))


def shots(count: int) -> list[Shot]:
    return [Shot(0.0, [(3 * number + index) % VOCABULARY for index in range(1 + 5 * number % 23)], 3 + number % 5)
            for number in range(count)]  # fmt: skip


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_every_request_gets_its_own_tokens(policy: str) -> None:
    with closing(OneProcess(runner(), LIMITS, policy)) as serving:
        taken, seconds = serving.serve(shots(9), concurrency=5)
        for number, shot in enumerate(shots(9)):
            wanted = expected_tokens(shot.prompt, number, shot.max_tokens, VOCABULARY)
            assert serving.tokens[f"check-{number}"] == wanted
        assert sorted(one.completion_tokens for one in taken) == sorted(shot.max_tokens for shot in shots(9))
        assert all(0 < one.ttft_s <= one.e2e_s <= seconds for one in taken)
        assert serving.seen.new_tokens == sum(shot.max_tokens for shot in shots(9))


def test_after_its_time_what_is_open_is_given_up_and_the_next_load_is_served() -> None:
    endless = (Shot(0.0, [1, 2, 3], 8) for _ in itertools.count())
    with closing(OneProcess(runner(), LIMITS)) as serving:
        taken, seconds = serving.serve(endless, concurrency=4, lasting_s=0.1)
        assert taken and seconds >= 0.1
        serving.forget()
        again, _ = serving.serve(shots(3), concurrency=3)
        assert len(again) == 3
        assert serving.seen.new_tokens == sum(shot.max_tokens for shot in shots(3))


def test_a_step_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = runner()

    def forward(batch: Batch, step: Step) -> Sampled:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(broken, "forward", forward)
    with closing(OneProcess(broken, LIMITS)) as serving, pytest.raises(ServingFailed, match="illegal memory access"):
        serving.serve(shots(2), concurrency=2)


def test_a_request_that_can_never_fit_is_told() -> None:
    with closing(OneProcess(runner(), LIMITS)) as serving, pytest.raises(ServingFailed, match="too_long"):
        serving.serve([Shot(0.0, [1] * 60, 30)], concurrency=1)
