"""The sampler: distributions against softmax, filters against ``transformers``, and what a token may depend on."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from shared.messages import Sampling
from worker import filters
from worker.filters import apply_filters
from worker.noise import BLOCK, block_noise, row_keys, token_noise
from worker.processors import Shape
from worker.sampling import SampleRow, sample

FROZEN_KEYS = [4750131251579153869, -382595335363931853]
FROZEN_PLACES = [[38, 5, 13], [52, 13, 49]]
FROZEN_LARGEST = [5.6411146668952625, 5.420743205085961, 3.4473367756518205]


def rows(count: int, *, seed: int = 0, prompt_index: int = 0, choice: int = 0, **how: float) -> list[SampleRow]:
    """Rows that differ in their position alone."""
    sampling = Sampling(seed, 16, **how)  # type: ignore[arg-type]
    return [SampleRow(sampling, prompt_index, choice, position) for position in range(count)]


def random_logits(count: int, vocabulary: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def chi_square_z(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How many standard deviations Pearson's statistic lies above its mean, rare outcomes lumped together."""
    expected = probabilities * counts.sum()
    common = expected >= 8
    observed = torch.cat([counts[common].double(), counts[~common].sum()[None].double()])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    if wanted[-1] < 8:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("vocabulary", [50, 300])
def test_samples_follow_softmax(temperature: float, vocabulary: int) -> None:
    logits = random_logits(1, vocabulary)
    drawn = sample(logits.repeat(40_000, 1), rows(40_000, seed=3, temperature=temperature))
    counts = torch.bincount(torch.tensor(drawn), minlength=vocabulary)
    assert abs(chi_square_z(counts, torch.softmax(logits[0].double() / temperature, -1))) < 4


@pytest.mark.parametrize("vary", ["seed", "prompt_index", "choice"])
def test_every_part_of_the_key_gives_independent_samples(vary: str) -> None:
    logits = random_logits(1, 100)
    count = 20_000
    drawn = []
    for shift in (0, 1):
        made = [
            SampleRow(Sampling(base["seed"], 16), base["prompt_index"], base["choice"], 5)
            for number in range(count)
            for base in [{"seed": 1, "prompt_index": 1, "choice": 1} | {vary: 2 * number + shift}]
        ]
        drawn.append(torch.tensor(sample(logits.repeat(count, 1), made)))
    probabilities = torch.softmax(logits[0].double(), -1)
    for tokens in drawn:
        assert abs(chi_square_z(torch.bincount(tokens, minlength=100), probabilities)) < 4
    agree = float((drawn[0] == drawn[1]).double().mean())
    chance = float((probabilities**2).sum())
    assert abs(agree - chance) < 4 * math.sqrt(chance / count)


def test_noise_is_gumbel_and_uncorrelated_between_neighbours() -> None:
    keys = torch.from_numpy(row_keys([(9, 0, 0, position) for position in range(4000)]))
    largest, place = block_noise(keys, 2)
    noise = torch.cat(
        [token_noise(keys, torch.full((4000,), b), largest[:, b], place[:, b]) for b in range(2)], dim=1
    )  # fmt: skip
    assert noise.shape == (4000, 2 * BLOCK)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    uniform = torch.exp(-torch.exp(-noise)).sort(dim=0).values  # each token's should be uniform
    worst = (uniform - (torch.arange(4000) + 0.5)[:, None] / 4000).abs().amax(dim=0)
    assert float(worst.max()) * math.sqrt(4000) < 2.2  # Kolmogorov-Smirnov over 128 tokens
    for one, two in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise[:, :BLOCK], noise[:, BLOCK:])):
        correlation = torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(one.numel())


def test_the_noise_algorithm_is_frozen() -> None:
    """A changed constant would change every seeded answer: these values are the contract."""
    keys = torch.from_numpy(row_keys([(42, 0, 0, 7), (2**63 - 1, 3, 2, 100_000)]))
    assert keys.tolist() == FROZEN_KEYS
    largest, place = block_noise(keys, 3)
    assert place.tolist() == FROZEN_PLACES
    torch.testing.assert_close(largest[0], torch.tensor(FROZEN_LARGEST, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_winner_is_the_winner_of_all_tokens() -> None:
    """Looking into few blocks only must not change the argmax over the whole vocabulary."""
    logits = random_logits(200, 1000, spread=3.0)
    made = rows(200, seed=5, temperature=0.8)
    keys = torch.from_numpy(row_keys([row.key for row in made]))
    largest, place = block_noise(keys, 16)
    blocks = [token_noise(keys, torch.full((200,), b), largest[:, b], place[:, b]) for b in range(16)]
    everything = (logits - logits.amax(-1, keepdim=True)) / 0.8 + torch.cat(blocks, dim=1)[:, :1000]
    assert sample(logits.clone(), made) == everything.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_token_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    logits = random_logits(24, 777).to(dtype)
    how = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1},
           {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.6}]  # fmt: skip
    made = [SampleRow(Sampling(n, 16, **how[n % 6]), n, 0, 3 * n) for n in range(24)]  # type: ignore[arg-type]
    together = sample(logits.clone(), made)
    assert together == [sample(logits[n : n + 1].clone(), [made[n]])[0] for n in range(24)]
    assert together == sample(logits.flip(0), made[::-1])[::-1]


@pytest.mark.parametrize("cut", [4, 128])
@pytest.mark.parametrize(
    "how",
    [{"top_k": 1}, {"top_k": 7}, {"top_k": 500}, {"top_p": 0.3}, {"top_p": 0.95}, {"top_p": 0.9999}, {"min_p": 0.2},
     {"top_k": 20, "top_p": 0.8}, {"top_k": 300, "top_p": 0.5, "min_p": 0.05}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("vocabulary", [100, 12_000])
def test_filters_leave_what_transformers_leaves(
    how: dict[str, float], vocabulary: int, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "FIRST_CUT", cut)
    scores = random_logits(6, vocabulary).double()  # in float32 the reference's own cumulative sums lose the tail
    wanted = scores.clone()
    if "top_k" in how:
        wanted = TopKLogitsWarper(int(how["top_k"]))(None, wanted)  # type: ignore[arg-type]
    if "top_p" in how:
        wanted = TopPLogitsWarper(how["top_p"])(None, wanted)  # type: ignore[arg-type]
    if "min_p" in how:
        wanted = MinPLogitsWarper(how["min_p"])(None, wanted)  # type: ignore[arg-type]
    width = -(-vocabulary // BLOCK) * BLOCK
    ours = torch.full((6, width), float("-inf"), dtype=torch.float64)
    ours[:, :vocabulary] = scores - scores.amax(-1, keepdim=True)
    apply_filters(ours, [Sampling(0, 16, **how)] * 6)  # type: ignore[arg-type]
    assert torch.equal(torch.isfinite(ours[:, :vocabulary]), torch.isfinite(wanted))
    assert not torch.isfinite(ours[:, vocabulary:]).any()


@pytest.mark.parametrize("how", [{}, {"top_k": 0}, {"top_k": -1}, {"top_k": 300}, {"top_k": 10**9}, {"top_p": 1.0}])
def test_filters_that_are_off_leave_everything(how: dict[str, float]) -> None:
    scores = random_logits(2, 320)
    before = scores.clone()
    apply_filters(scores, [Sampling(0, 16, **how)] * 2)  # type: ignore[arg-type]
    kept = 300 if how.get("top_k") == 300 else 320
    assert torch.isfinite(scores).sum(-1).tolist() == [kept, kept]
    assert kept == 300 or torch.equal(scores, before)


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {"temperature": 1e-8}, {"temperature": 1e-4}, {"top_p": 1e-9}, {"top_k": 1},
            {"min_p": 1.0}], ids=str
)  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_extreme_settings_are_greedy(how: dict[str, float], scale: float) -> None:
    logits = random_logits(50, 500) * scale
    assert sample(logits.clone(), rows(50, **how)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1e-8}, {"top_k": 1}, {"top_p": 1e-9}], ids=str)
def test_ties_go_to_the_lowest_id(how: dict[str, float]) -> None:
    logits = torch.zeros(3, 400)
    logits[0, [17, 18, 300]] = 5.0
    logits[1, [399, 250]] = 5.0
    assert sample(logits, rows(3, **how)) == [17, 250, 0]


def test_top_k_keeps_exactly_k_of_tied_tokens() -> None:
    drawn = sample(torch.zeros(400, 128), rows(400, top_k=3))
    assert set(drawn) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_a_broken_row_harms_nobody_else(temperature: float, how: dict[str, float]) -> None:
    healthy = random_logits(5, 200)
    made = rows(5, temperature=temperature, **how)
    wanted = sample(healthy.clone(), made)
    logits = healthy.clone()
    logits[1] = float("nan")
    logits[2, 7] = float("nan")
    logits[2, 8] = float("inf")
    logits[3] = float("-inf")
    drawn = sample(logits, made)
    assert [drawn[0], drawn[4]] == [wanted[0], wanted[4]]
    assert drawn[1:4] == [0, 8, 0]


def test_masked_tokens_never_win() -> None:
    logits = torch.full((500, 70), float("-inf"))
    logits[:, [5, 69]] = 0.0
    drawn = sample(logits, rows(500))
    assert set(drawn) == {5, 69}


def test_banned_tokens_do_not_come() -> None:
    logits = torch.zeros(2, 64)
    logits[:, 9] = 50.0
    how = [Sampling(0, 16, temperature=t) for t in (0.0, 1.0)]
    made = [SampleRow(sampling, 0, 0, 0, Shape(sampling, banned=(9,))) for sampling in how]
    assert 9 not in sample(logits, made)
