"""The ledger: each token once and in order, or an explicit end."""

from __future__ import annotations

import random

import pytest

from gateway.ledger import Broken, Ledger, Progress, PromptPiece, RequestRecord, Update
from shared.messages import RequestEvent, Sampling, Submit, TokenBatch, TokenEntry, TokenLogprob, pack_tokens

EPOCH = 5


def ledger_with(request_id: str = "r", n: int = 1, attempt: int = 0) -> tuple[Ledger[str], RequestRecord[str]]:
    ledger: Ledger[str] = Ledger()
    ledger.epoch = EPOCH
    submit = Submit(request_id, attempt, "gw", "m", b"", Sampling(0, 100), 0, n=n)
    return ledger, ledger.open(submit, "owner")


def entry(
    offset: int, tokens: list[int], end: str = "", count: int = 0, choice: int = 0, attempt: int = 0
) -> TokenEntry:
    return TokenEntry("r", attempt, choice, offset, tokens, end, count)


def apply(ledger: Ledger[str], *entries: TokenEntry, epoch: int = EPOCH) -> list[Update]:
    updates = [update for _, update in ledger.apply_tokens(TokenBatch(epoch, "w", 1, 1, list(entries)))]
    ledger.check()
    return updates


def test_tokens_in_order() -> None:
    ledger, record = ledger_with()
    assert apply(ledger, entry(0, [1, 2])) == [Progress(0, [1, 2])]
    assert apply(ledger, entry(2, [3], "length", 3)) == [Progress(0, [3], "length")]
    assert record.choices[0].tokens.tolist() == [1, 2, 3]
    assert not record.open


def test_what_is_here_already_is_dropped() -> None:
    ledger, _ = ledger_with()
    apply(ledger, entry(0, [1, 2]))
    assert apply(ledger, entry(0, [1, 2])) == []
    assert apply(ledger, entry(1, [2, 3])) == [Progress(0, [3])]
    assert ledger.dropped_entries == 1


def test_a_gap_ends_the_choice() -> None:
    ledger, record = ledger_with()
    apply(ledger, entry(0, [1]))
    (update,) = apply(ledger, entry(2, [3]))
    assert isinstance(update, Broken)
    assert apply(ledger, entry(1, [2])) == []
    assert record.choices[0].tokens.tolist() == [1]


def test_a_terminal_entry_checks_the_count() -> None:
    ledger, _ = ledger_with()
    (update,) = apply(ledger, entry(0, [1], "stop", 2))
    assert isinstance(update, Broken)


@pytest.mark.parametrize("end", ["failed", "cancelled", "nonsense"])
def test_other_ends_are_errors(end: str) -> None:
    ledger, _ = ledger_with()
    (update,) = apply(ledger, entry(0, [1], end, 1))
    assert isinstance(update, Broken)


def test_ids_that_are_no_tokens() -> None:
    ledger, _ = ledger_with()
    (update,) = apply(ledger, entry(0, [-1]))
    assert isinstance(update, Broken)


def test_other_attempts_epochs_requests_and_choices_are_dropped() -> None:
    ledger, _ = ledger_with(attempt=1)
    assert apply(ledger, entry(0, [1], attempt=0), entry(0, [1], attempt=2)) == []
    assert apply(ledger, entry(0, [1], attempt=1), epoch=EPOCH - 1) == []
    assert apply(ledger, entry(0, [1], attempt=1, choice=1), entry(0, [1], attempt=1, choice=-1)) == []
    assert apply(ledger, TokenEntry("other", 1, 0, 0, [1])) == []
    assert ledger.dropped_entries == 6
    assert apply(ledger, entry(0, [1], attempt=1)) == [Progress(0, [1])]


def test_live_lists_what_still_wants_tokens() -> None:
    ledger, _ = ledger_with(n=2)
    apply(ledger, entry(0, [1], "stop", 1))
    assert ledger.live() == [("r", 0)]
    apply(ledger, entry(0, [1], "stop", 1, choice=1))
    assert ledger.live() == []
    ledger.close("r")
    ledger.close("r")
    assert len(ledger) == 0


def test_an_id_is_open_once() -> None:
    ledger, record = ledger_with()
    with pytest.raises(ValueError, match="open already"):
        ledger.open(record.submit, "again")


def test_events_end_what_they_name() -> None:
    ledger, record = ledger_with(n=2)

    def event(choice: int, attempt: int = 0, epoch: int = EPOCH, request_id: str = "r") -> object:
        return ledger.apply_event(RequestEvent(epoch, "lost", request_id, attempt, choice, "its worker died"))

    assert event(0, attempt=1) is None
    assert event(0, epoch=EPOCH - 1) is None
    assert event(0, request_id="x") is None
    assert event(2) is None
    applied = event(1)
    assert applied == (record, Broken(1, "the request was lost: its worker died"))
    assert [choice.closed for choice in record.choices] == [False, True]
    assert event(-1) == (record, Broken(-1, "the request was lost: its worker died"))
    assert event(-1) is None


def test_any_order_of_duplicates_delivers_each_token_once_or_breaks() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        ledger, _ = ledger_with()
        tokens = list(range(10, 30))
        sent = []
        at = 0
        while at < len(tokens):
            size = rng.randint(1, 3)
            last = at + size >= len(tokens)
            sent.append(entry(at, tokens[at : at + size], "length" if last else "", len(tokens) if last else 0))
            at += size
        stream = [piece for piece in sent if rng.random() > 0.02 for _ in range(rng.choice((1, 1, 2)))]
        for _ in range(rng.randint(0, 2)):
            left, right = rng.randrange(len(stream)), rng.randrange(len(stream))
            stream[left], stream[right] = stream[right], stream[left]
        got: list[int] = []
        broken = False
        for update in apply(ledger, *stream):
            if isinstance(update, Broken):
                broken = True
            else:
                assert not broken, f"seed {seed}"
                got += update.tokens
        assert got == tokens[: len(got)], f"seed {seed}"
        assert broken or got == tokens or ledger.live(), f"seed {seed}"


def told(*log_probs: float) -> list[TokenLogprob]:
    return [TokenLogprob(log_prob, 1, [4], [log_prob]) for log_prob in log_probs]


def wanting(n: int = 1, prompt_len: int = 4, **sampling: int) -> tuple[Ledger[str], RequestRecord[str]]:
    ledger: Ledger[str] = Ledger()
    submit = Submit("r", 0, "gw", "m", pack_tokens(range(prompt_len)), Sampling(0, 100, **sampling), 0, n=n)
    return ledger, ledger.open(submit, "owner")


def test_log_probabilities_are_cut_with_their_tokens() -> None:
    ledger, _ = wanting(logprobs=1)
    first, second, third = told(-1, -2, -3)
    assert apply(ledger, TokenEntry("r", 0, 0, 0, [7, 8], logprobs=[first, second])) == [
        Progress(0, [7, 8], logprobs=[first, second])
    ]
    again = TokenEntry("r", 0, 0, 1, [8, 9], logprobs=[second, third])
    assert apply(ledger, again) == [Progress(0, [9], logprobs=[third])]
    assert apply(ledger, again) == []


@pytest.mark.parametrize(
    "logprobs",
    [
        [], told(-1), told(-1, -2, -3), told(-1, float("nan")), told(-1, float("inf")),
        [*told(-1), TokenLogprob(-1.0, 1, [1, 2], [-1.0])], [*told(-1), TokenLogprob(-1.0, 1, [-1], [-1.0])],
        [*told(-1), TokenLogprob(-1.0, 1, [1], [float("nan")])],
    ],
)  # fmt: skip
def test_a_token_without_a_sound_log_probability_is_a_hole(logprobs: list[TokenLogprob]) -> None:
    ledger, record = wanting(logprobs=1)
    (update,) = apply(ledger, TokenEntry("r", 0, 0, 0, [7, 8], logprobs=logprobs))
    assert isinstance(update, Broken)
    assert not record.open
    plain, _ = wanting()
    assert apply(plain, TokenEntry("r", 0, 0, 0, [7, 8], logprobs=logprobs)) == [Progress(0, [7, 8])]


def test_what_is_impossible_is_sound() -> None:
    ledger, _ = wanting(logprobs=1)
    (update,) = apply(ledger, TokenEntry("r", 0, 0, 0, [7], logprobs=told(-float("inf"))))
    assert isinstance(update, Progress)


def piece(offset: int, *log_probs: float, tokens: tuple[int, ...] = ()) -> TokenEntry:
    return TokenEntry("r", 0, 0, 0, list(tokens), prompt_logprobs=told(*log_probs), prompt_offset=offset)


def test_the_prompts_log_probabilities_come_in_pieces() -> None:
    ledger, record = wanting(prompt_logprobs=1, prompt_len=5)
    assert apply(ledger, piece(1, -1, -2)) == [PromptPiece(told(-1, -2))]
    assert apply(ledger, piece(1, -1, -2)) == []
    assert apply(ledger, piece(2, -2, -3)) == [PromptPiece(told(-3))]
    assert apply(ledger, piece(4, -4, tokens=(9,))) == [PromptPiece(told(-4)), Progress(0, [9])]
    assert record.prompt_logprobs == 4


def test_a_hole_in_the_prompts_log_probabilities_ends_all_choices() -> None:
    for bad in (piece(2, -2), piece(1, float("nan")), piece(1, -1, -2, -3, -4)):
        ledger, record = wanting(n=2, prompt_logprobs=1)
        (update,) = apply(ledger, bad)
        assert isinstance(update, Broken)
        assert update.choice == -1
        assert not record.open


def test_no_token_passes_before_the_prompts_log_probabilities() -> None:
    ledger, _ = wanting(prompt_logprobs=1)
    (update,) = apply(ledger, entry(0, [1]))
    assert isinstance(update, Broken)
    ledger, _ = wanting(n=2, prompt_logprobs=1)
    apply(ledger, piece(1, -1, -2, -3))
    assert apply(ledger, entry(0, [1], choice=1)) == [Progress(1, [1])]
    ledger, _ = wanting(prompt_logprobs=1, prompt_len=1)  # the first token has none
    assert apply(ledger, entry(0, [1])) == [Progress(0, [1])]
    ledger, _ = wanting(prompt_logprobs=1)
    (update,) = apply(ledger, entry(0, [], "failed"))
    assert isinstance(update, Broken)
    assert "failed" in update.reason


def test_unwanted_log_probabilities_of_the_prompt_are_dropped() -> None:
    ledger, _ = wanting()
    assert apply(ledger, piece(1, -1, tokens=(9,))) == [Progress(0, [9])]


def test_what_the_cache_held_is_less_than_the_prompt() -> None:
    for cached, expected in ((-1, -1), (0, 0), (3, 3), (4, -1), (10**6, -1)):
        ledger, _ = wanting()
        assert apply(ledger, TokenEntry("r", 0, 0, 0, [1], cached=cached)) == [Progress(0, [1], cached=expected)]


def test_log_probabilities_stay_with_their_tokens_in_any_order_of_duplicates() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        ledger, _ = wanting(logprobs=1)
        cuts = sorted(rng.sample(range(1, 30), 8))
        bounds = list(zip([0, *cuts], [*cuts, 30], strict=True))
        entries = []
        for low, high in bounds:
            start = max(0, low - rng.randint(0, 4))
            log_probs = told(*(-float(place) for place in range(start, high)))
            entries.append(TokenEntry("r", 0, 0, start, list(range(start, high)), logprobs=log_probs))
            if rng.random() < 0.3:
                entries.append(rng.choice(entries))
        got = [update for update in apply(ledger, *entries) if isinstance(update, Progress)]
        pairs = [pair for update in got for pair in zip(update.tokens, update.logprobs, strict=True)]
        assert pairs == [(place, told(-float(place))[0]) for place in range(30)], f"seed {seed}"
