"""Sampling that does not wait: the tokens of worker.sampling, the logits of worker.processors, the log-probabilities of
worker.logprobs; and that nothing in between reads anything back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rows import SPECIALS, broken_logits, mixed_rows, random_logits, sample_rows
from shaped_rows import CPU, VOCABULARY, check_shapes, params_of, random_shape, shape_logits, upload
from torch.utils._python_dispatch import TorchDispatchMode

from shared.messages import Sampling
from worker.device import provision
from worker.device.sampling import (
    DeviceSampler,
    Pending,
    PromptTokens,
    SamplingParams,
    Wanted,
    choose,
    host_params,
    pack_settings,
    sequence_settings,
    what_is_asked,
)  # fmt: skip
from worker.device.shaping import CountMirror, Shaper
from worker.logprobs import describe, describe_prompt, log_probabilities
from worker.noise import row_keys
from worker.processors import Shape, process
from worker.sampling import SampleRow, choose_in_torch, sample
from worker.token_counts import TokenCounts

WAITING = {
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "is_nonzero", "equal", "_unique2", "bincount",
    "repeat_interleave.Tensor",
}  # fmt: skip
"""What has to know something of a tensor's contents on the host."""


class NothingWaits(TorchDispatchMode):
    """Raises at an operation that a GPU would have to be waited for."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("aten::")
        if name in WAITING or name.split(".")[0] in WAITING:
            raise AssertionError(f"{name} waits for the device")
        if name.startswith(("index.", "index_put")):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype != torch.bool for index in indices), f"{name} of a mask waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor is anything read behind torch's back."""

    def refuse(*_: object) -> None:
        raise AssertionError("the device is waited for")

    with monkeypatch.context() as patched, NothingWaits():
        for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__"):
            patched.setattr(torch.Tensor, name, refuse)
        yield


def finish(pending: Pending) -> Any:
    return pending.finish([tensor.numpy() for tensor in pending.tensors])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(sample_rows, min_size=1, max_size=8),
    vocabulary=st.sampled_from([1, 5, 63, 64, 65, 300, 1000, 9000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 1e30]),
    tied=st.booleans(),
    specials=st.dictionaries(st.sampled_from(SPECIALS), st.sampled_from([0.001, 0.1, 0.9]), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_tokens_are_those_of_the_sampler(
    rows: list[SampleRow], vocabulary: int, dtype: torch.dtype, spread: float, tied: bool,
    specials: dict[float, float], seed: int,
) -> None:  # fmt: skip
    logits = broken_logits(len(rows), vocabulary, spread, tied, specials, seed).to(dtype)
    before = logits.clone()
    assert choose(logits, params_of(rows)).tolist() == sample(before.clone(), rows)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def test_over_many_rows_and_a_real_vocabulary() -> None:
    rows = mixed_rows(1400)
    logits = random_logits(1400, 500)
    assert choose(logits, params_of(rows)).tolist() == choose_in_torch(logits.clone(), rows)
    rows = mixed_rows(28)
    logits = random_logits(28, 50_257).bfloat16()
    assert choose(logits, params_of(rows)).tolist() == sample(logits.clone(), rows)


def test_rows_of_nothing_finite_give_the_first_token() -> None:
    rows = mixed_rows(14)
    logits = torch.full((14, 70), float("-inf"))
    logits[::2] = float("nan")
    assert choose(logits, params_of(rows)).tolist() == [0] * 14 == sample(logits.clone(), rows)


def test_settings_of_a_sequence_are_packed_once_and_its_key_takes_in_each_position() -> None:
    rows = mixed_rows(9)
    sequences = np.stack([sequence_settings(row.sampling, row.prompt_index, row.choice) for row in rows])
    packed = pack_settings(sequences, np.array([row.position for row in rows]))
    assert np.array_equal(packed, host_params(rows))
    assert packed[4].tolist() == row_keys([row.key for row in rows]).tolist()


def test_padding_is_greedy_and_what_nobody_asks_is_left_out() -> None:
    packed = np.zeros((5, 4), dtype=np.int64)
    assert what_is_asked(packed) == (False, False)
    logits = random_logits(4, 100)
    assert choose(logits, SamplingParams.of(torch.from_numpy(packed))).tolist() == logits.argmax(-1).tolist()
    plain = [
        SampleRow(Sampling(3, 4, min_p=0.2), 0, 0, 0),
        SampleRow(Sampling(3, 4, temperature=0.0, top_k=2), 0, 0, 0),
    ]
    assert what_is_asked(host_params(plain)) == (True, False)
    assert what_is_asked(host_params([SampleRow(Sampling(3, 4, top_k=2), 0, 0, 0)])) == (True, True)


# --- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shapes_are_those_of_the_processors(dtype: torch.dtype) -> None:
    check_shapes(False, dtype, 60)


def test_a_step_uploads_the_counts_that_have_changed() -> None:
    mirror = CountMirror(CPU)
    counts = [TokenCounts(20, with_prompt=True) for _ in range(3)]
    tokens = [list(range(n, n + 20)) for n in range(3)]
    for one, sequence in zip(counts, tokens, strict=True):
        one.follow(sequence)
    _, written, _ = mirror.follow(counts)
    assert len(written) == 60
    for step in range(4):
        for one, sequence in zip(counts, tokens, strict=True):
            sequence.append(step % 2)
            one.follow(sequence)
        _, written, entries = mirror.follow(counts)
        assert len(written) == 3 and entries[:, 0].tolist() == [step % 2] * 3
        assert entries[0].tolist() == [step % 2, 1 + step // 2]


def test_counts_survive_growth_and_a_full_mirror() -> None:
    """Sequences come, grow and go until the entries have been laid out anew many times."""
    rng = random.Random(5)
    shaper = Shaper(CPU, triton=False)
    alive: list[tuple[list[int], Shape]] = []
    for step in range(60):
        if step % 3 == 0:
            sampling = Sampling(step, 9, repetition_penalty=1.3, frequency_penalty=0.4)
            alive.append(([rng.randrange(9000) for _ in range(3000)], Shape(sampling, counts=TokenCounts(9, True))))
        if len(alive) > 5:
            alive.pop(rng.randrange(len(alive)))
        for tokens, shape in alive:
            tokens += [rng.randrange(9000) for _ in range(rng.choice([1, 1, 700]))]
            assert shape.counts is not None
            shape.counts.follow(tokens)
        running = {row: shape for row, (_, shape) in enumerate(alive) if row != step % 4}
        if running:
            logits = random_logits(len(alive), 9000, seed=step)
            assert torch.equal(shape_logits(shaper, logits.clone(), running), process(logits.clone(), running))


# --- whole steps ---------------------------------------------------------------------------------------------------


def a_step(dtype: torch.dtype) -> tuple[torch.Tensor, list[SampleRow], Wanted]:
    rng = random.Random(3)
    prompts = [PromptTokens(8, [rng.randrange(VOCABULARY) for _ in range(70)], 3), PromptTokens(78, [5], 0)]
    logits = random_logits(79, VOCABULARY).to(dtype)
    shapes = {row: random_shape(rng) for row in (0, 2, 3, 7)}
    rows = [
        SampleRow(shapes[row].sampling if row in shapes else Sampling(row, 4, top_p=0.8), 0, 0, row, shapes.get(row))
        for row in range(8)
    ]
    wanted = Wanted(shapes, {0: 0, 2: 5, 5: 2}, [1, 2], {4: (6, (3, 9)), 6: (4, ())}, prompts)
    return logits, rows, wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_tells_what_the_host_would(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows, wanted = a_step(dtype)
    params = params_of(rows)
    sampler = DeviceSampler(CPU, upload)
    given_ = logits.clone()
    with nothing_waits(monkeypatch):
        pending = sampler.enqueue(given_, params, wanted)
    told = finish(pending)
    assert told.tokens == sample(logits[:8].clone(), rows)
    asking = list(wanted.logprobs)
    described = describe(
        log_probabilities(logits[asking]), [told.tokens[row] for row in asking], list(wanted.logprobs.values())
    )
    assert told.logprobs == dict(zip(asking, described, strict=True))
    for row in wanted.scores:
        assert told.log_probs[row] == float(torch.log_softmax(logits[row].double(), dim=-1)[told.tokens[row]])
    for row, (count, banned) in wanted.beams.items():
        log_probs = torch.log_softmax(logits[row].double(), dim=-1)
        log_probs[list(banned)] = float("-inf")
        best = log_probs.topk(count)
        assert told.candidates[row] == (best.indices.tolist(), best.values.tolist())
    assert told.prompt_logprobs == [
        describe_prompt(logits[one.first : one.first + len(one.tokens)], one.tokens, one.top) for one in wanted.prompts
    ]


def test_a_step_of_a_prompts_rows_alone() -> None:
    logits = random_logits(3, 50)
    pending = DeviceSampler(CPU, upload).enqueue(logits, params_of([]), Wanted(prompts=[PromptTokens(0, [4, 5, 6], 1)]))
    told = finish(pending)
    assert told.tokens == [] and told.prompt_logprobs == [describe_prompt(logits, [4, 5, 6], 1)]


def test_candidates_that_are_not_possible_are_left_out() -> None:
    logits = torch.full((1, 6), float("-inf"))
    logits[0, [1, 4]] = torch.tensor([0.0, 1.0])
    pending = DeviceSampler(CPU, upload).enqueue(
        logits, params_of([SampleRow(Sampling(1, 2), 0, 0, 0)]), Wanted(beams={0: (9, (4,))})
    )
    assert finish(pending).candidates[0][0] == [1]


def test_a_step_that_asks_nothing_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> torch.Tensor:
        raise AssertionError("there is nothing to upload")

    rows = mixed_rows(14)
    logits = random_logits(14, 200)
    params = params_of(rows)
    with nothing_waits(monkeypatch):
        pending = DeviceSampler(CPU, refuse).enqueue(logits, params, Wanted())
    assert len(pending.tensors) == 1 and finish(pending).tokens == sample(logits.clone(), rows)


def test_at_start_tokens_are_chosen_from_logits_of_every_type_that_steps_have(monkeypatch: pytest.MonkeyPatch) -> None:
    types: list[torch.dtype] = []

    def note(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        types.append(logits.dtype)
        return choose(logits, params)

    sampler = DeviceSampler(CPU, upload)
    monkeypatch.setattr(sampler, "sample", note)
    provision._sampling(sampler, CPU)(random_logits(3, 200).bfloat16())
    assert types == [torch.bfloat16, torch.float32], "as the model says them, and wider once a row is shaped"


@pytest.mark.parametrize("waits", [lambda x: x.tolist(), lambda x: x[x > 0], lambda x: bool(x.any()), torch.nonzero])
def test_what_waits_is_noticed(waits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"waits for the device|is waited for"), nothing_waits(monkeypatch):
        waits(torch.ones(3))
