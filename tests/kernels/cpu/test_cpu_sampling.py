"""The C++ sampler: the tokens of the torch reference, on every instruction set that this processor has."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.build import ISAS
from kernels.cpu.library import Library, find
from kernels.cpu.sampling import MAX_VOCABULARY, RowChoice, can_choose, choose_tokens
from shared.messages import Sampling
from worker import sampling as worker_sampling
from worker.filters import weights
from worker.sampling import SampleRow, choose_in_torch, sample

needs_library = pytest.mark.skipif(
    not isinstance(find(), Library), reason="the C++ kernels are not built or turned off"
)

VOCABULARIES = [1, 5, 63, 64, 65, 300, 1000, 9000, 20_000]
SPECIALS = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38, -0.0]

ON_THREADS = """
import torch
from kernels.cpu.library import load
from kernels.cpu.sampling import RowChoice, choose_tokens

library = load()
logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1))
rows = [RowChoice(1.0, 0.95, 0.0, 0, (number, 0, 0, 0)) for number in range(40)]
drawn = []
for threads in (1, 2, 5):
    library.c.headrace_set_threads(threads)
    drawn += [choose_tokens(library, logits, rows).tolist() for _ in range(20)]
print("same" if all(tokens == drawn[0] for tokens in drawn) else "different")
"""


@pytest.fixture
def library() -> Iterator[Library]:
    """The library, whose instruction set is put back afterwards."""
    found = find()
    assert isinstance(found, Library)
    isa = found.isa
    yield found
    found.select(isa)


def choices(rows: Sequence[SampleRow]) -> list[RowChoice]:
    return [worker_sampling._row_choice(row) for row in rows]


def each_isa(library: Library, logits: torch.Tensor, rows: Sequence[SampleRow]) -> dict[str, list[int]]:
    before = library.isa
    drawn = {isa: choose_tokens(library, logits, choices(rows)).tolist() for isa in ISAS if library.select(isa)}
    library.select(before)
    return drawn


def assert_like_torch(library: Library, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    wanted = choose_in_torch(logits.clone(), rows)
    possible = (logits > float("-inf")).any(dim=-1).tolist()  # a NaN is not above anything
    wanted = [token if some else -1 for token, some in zip(wanted, possible, strict=True)]
    drawn = each_isa(library, logits, rows)
    assert drawn == dict.fromkeys(drawn, wanted)


def random_logits(count: int, vocabulary: int, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def rows_of(count: int, **how: float) -> list[SampleRow]:
    return [SampleRow(Sampling(seed, 16, **how), seed % 3, seed % 2, 7 * seed) for seed in range(count)]  # type: ignore[arg-type]


samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.just(16),
    temperature=st.sampled_from([0.0, 1e-8, 1e-5, 1e-4, 0.3, 0.7, 1.0, 2.0]),
    top_p=st.one_of(st.sampled_from([1.0, 0.9, 0.5, 0.25, 1e-9, 0.99, 0.9999]), st.floats(1e-6, 1.0)),
    top_k=st.sampled_from([0, 0, 0, 1, 2, 5, 50, 300, 1000, 10**9]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.5, 1.0]),
)
sample_rows = st.builds(
    SampleRow, samplings, prompt_index=st.integers(0, 100), choice=st.integers(0, 100), position=st.integers(0, 10**6)
)


@needs_library
@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(sample_rows, min_size=1, max_size=8),
    vocabulary=st.sampled_from(VOCABULARIES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 1e30]),
    tied=st.booleans(),
    specials=st.dictionaries(st.sampled_from(SPECIALS), st.sampled_from([0.001, 0.1, 0.9]), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_tokens_are_those_of_torch(
    rows: list[SampleRow], vocabulary: int, dtype: torch.dtype, spread: float, tied: bool,
    specials: dict[float, float], seed: int,
) -> None:  # fmt: skip
    found = find()
    assert isinstance(found, Library)
    logits = random_logits(len(rows), vocabulary, spread, seed)
    if tied:
        logits = logits.round()
    places = random.Random(seed)
    for value, share in specials.items():
        generator = torch.Generator().manual_seed(places.getrandbits(32))
        logits[torch.rand(logits.shape, generator=generator) < share] = value
    assert_like_torch(found, logits.to(dtype), rows)


@needs_library
@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_p": 0.9}, {"top_p": 0.3}, {"top_p": 0.999}, {"top_k": 50},
     {"top_k": 5000}, {"top_k": 5000, "top_p": 0.95}, {"min_p": 0.001}, {"top_p": 0.8, "min_p": 0.01}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_real_vocabulary(library: Library, how: dict[str, float], spread: float) -> None:
    """Also where thousands of tokens pass, and the filter's edge lies deep in the crowd."""
    assert_like_torch(library, random_logits(6, 49_152, spread).bfloat16(), rows_of(6, **how))


@needs_library
def test_few_blocks_of_noise_are_enough(library: Library) -> None:
    """Blocks are passed over by bounds on their noise: over thousands of draws never by one that is too low."""
    assert_like_torch(library, random_logits(3000, 1000, 1.0), rows_of(3000))


@needs_library
def test_top_p_of_equal_tokens_is_their_share_exactly(library: Library) -> None:
    for drawn in each_isa(library, torch.zeros(600, 8), rows_of(600, top_p=0.5)).values():
        assert set(drawn) == {0, 1, 2, 3}


@needs_library
@pytest.mark.parametrize("off", [-1e-9, 0.0, 1e-9])
def test_a_bound_that_single_precision_cannot_tell_from_the_mass_of_a_level(library: Library, off: float) -> None:
    levels = torch.tensor([0.0, -1.3, -2.7, -3.1, -4.9])
    logits = levels[torch.randint(0, 5, (30_000,), generator=torch.Generator().manual_seed(3))]
    logits[:300] = -4.9
    mass = torch.stack([weights(logits[logits == level]).double().sum() for level in levels]).cumsum(0)
    rows = [
        SampleRow(Sampling(seed, 16, top_p=float(mass[level] / mass[-1]) * (1 + off)), 0, 0, seed)
        for level in range(4)
        for seed in range(4)
    ]
    assert_like_torch(library, logits.repeat(len(rows), 1), rows)


@needs_library
def test_a_token_depends_on_its_row_alone(library: Library) -> None:
    hows = [{"temperature": 0.0}, {}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 3000}]
    rows = [SampleRow(Sampling(n, 16, **hows[n % 6]), 0, 0, n) for n in range(24)]  # type: ignore[arg-type]
    logits = random_logits(24, 5000).bfloat16()
    together = choose_tokens(library, logits, choices(rows)).tolist()
    alone = [int(choose_tokens(library, logits[n : n + 1], choices(rows[n : n + 1]))[0]) for n in range(24)]
    assert alone == together
    assert choose_tokens(library, logits.flip(0), choices(rows[::-1])).tolist() == together[::-1]
    wide = torch.full((24, 6000), 99.0, dtype=torch.bfloat16)
    wide[:, :5000] = logits
    assert choose_tokens(library, wide[:, :5000], choices(rows)).tolist() == together


@needs_library
def test_the_number_of_threads_changes_no_token() -> None:
    """In a process of its own: in this one, decoders of other tests may hold on to their threads."""
    run = subprocess.run([sys.executable, "-c", ON_THREADS], capture_output=True, text=True, timeout=240, check=False)
    assert run.stdout.split() == ["same"], run.stderr


@needs_library
def test_logits_are_left_as_they_are(library: Library) -> None:
    logits = random_logits(4, 700)
    logits[2, 5] = float("inf")
    before = logits.clone()
    choose_tokens(library, logits, choices(rows_of(4, top_p=0.9)))
    assert torch.equal(logits, before)


@needs_library
def test_no_rows_have_no_tokens(library: Library) -> None:
    assert choose_tokens(library, torch.zeros(0, 100), []).tolist() == []


@needs_library
def test_what_it_cannot_choose_from_is_refused(library: Library) -> None:
    for logits in (
        torch.zeros(1, 8, dtype=torch.float64),
        torch.zeros(1, 8, dtype=torch.float16),
        torch.zeros(8, 1).expand(8, 2)[:1],
        torch.zeros(1, 1).expand(1, MAX_VOCABULARY + 1),
        torch.zeros(1, 8, device="meta"),
    ):
        assert not can_choose(logits)
        with pytest.raises(ValueError, match="can be chosen"):
            choose_tokens(library, logits, choices(rows_of(1)))
    with pytest.raises(ValueError, match="2 rows"):
        choose_tokens(library, torch.zeros(1, 8), choices(rows_of(2)))


def test_the_sampler_gives_the_same_with_and_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(40, 3000).bfloat16()
    logits[7] = float("nan")
    logits[8, 11] = float("inf")
    rows = rows_of(40, temperature=0.8, top_p=0.95)
    drawn = sample(logits.clone(), rows)
    assert drawn[7:9] == [0, 11]
    monkeypatch.setattr(worker_sampling, "load", lambda: None)
    assert sample(logits.clone(), rows) == drawn
