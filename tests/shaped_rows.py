"""Rows whose logits are changed in every way before they are sampled from, on a device and by worker.processors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sampling_rows import random_logits

from shared.messages import Sampling
from worker.device.sampling import DeviceSampler, SamplingParams, host_params, what_is_asked
from worker.device.shaping import Shaper
from worker.device.upload import Packing
from worker.processors import Shape, asks_for_counts, bias_of, process
from worker.sampling import SampleRow, sample
from worker.token_counts import TokenCounts

CPU = torch.device("cpu")

VOCABULARY = 97


def upload(packed: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(packed.copy())


def params_of(rows: Sequence[SampleRow]) -> SamplingParams:
    packed = host_params(rows)
    return SamplingParams.of(torch.from_numpy(packed), *what_is_asked(packed))


def random_shape(rng: random.Random, mask_bytes: int = 16, vocabulary: int = VOCABULARY) -> Shape:
    """Any mixture of what may change a row."""
    how: dict[str, Any] = {}
    if rng.random() < 0.5:
        how |= {"repetition_penalty": rng.choice([0.7, 1.3]), "presence_penalty": rng.choice([0.0, 0.5])}
    if rng.random() < 0.5:
        how |= {"frequency_penalty": rng.choice([0.3, -2.0])}
    if rng.random() < 0.4:
        how["logit_bias"] = [(rng.randrange(vocabulary + 5), rng.uniform(-5, 5)) for _ in range(4)]
    sampling = Sampling(rng.randrange(1000), 16, temperature=rng.choice([0.0, 1.0]), **how)
    counts = None
    if asks_for_counts(sampling):
        counts = TokenCounts(5, with_prompt=sampling.repetition_penalty != 1)
        counts.follow([rng.randrange(vocabulary) for _ in range(rng.randrange(5, 60))])
    banned = tuple(rng.sample(range(vocabulary), rng.choice([0, 0, 1, 3])))
    allowed = None
    kind = rng.randrange(5)
    if kind < 3:
        allowed = np.frombuffer(rng.randbytes(mask_bytes), dtype=np.uint8).copy()
        if kind == 1:  # what is banned is all that the grammar allows
            allowed[:] = 0
            for token in banned:
                if token // 8 < mask_bytes:
                    allowed[token // 8] |= 1 << token % 8
        if kind == 2:  # nothing that the model has
            allowed[: -(-vocabulary // 8)] = 0
    return Shape(sampling, banned, counts, allowed, bias_of(sampling, vocabulary))


def shape_logits(shaper: Shaper, logits: torch.Tensor, shapes: dict[int, Shape]) -> torch.Tensor:
    packing = Packing()
    asked = shaper.pack(shapes, logits.shape[1], packing)
    assert asked is not None
    return shaper.apply(logits, asked, packing.send(upload))


def check_shapes(triton: bool, dtype: torch.dtype, trials: int) -> None:
    """Logits as worker.processors makes them, and tokens also where nothing is left to come."""
    rng = random.Random(11)
    shaper = Shaper(CPU, triton=triton)
    sampler = DeviceSampler(CPU, upload, triton)
    for trial in range(trials):
        logits = random_logits(7, VOCABULARY, seed=trial)
        if trial % 3 == 2:
            logits[rng.randrange(7)] = rng.choice([float("-inf"), float("nan")])
        logits = logits.to(dtype)
        mask_bytes = rng.choice([12, 13, 16])  # as many tokens as the tokenizer has, not the model
        shapes = {row: random_shape(rng, mask_bytes) for row in rng.sample(range(7), rng.randrange(1, 7))}
        wanted = process(logits.clone(), shapes)
        got = shape_logits(shaper, logits.clone(), shapes)
        possible = (wanted > float("-inf")).any(dim=-1).tolist()
        for row in range(7):
            if possible[row] or row not in shapes:
                torch.testing.assert_close(got[row], wanted[row], rtol=0, atol=0, equal_nan=True)
        rows = [
            SampleRow(shapes[row].sampling if row in shapes else Sampling(row, 4), 0, 0, trial, shapes.get(row))
            for row in range(7)
        ]
        assert sampler.sample(got, params_of(rows)).tolist() == sample(logits.clone(), rows)
