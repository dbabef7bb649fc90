"""The ledger: each token once and in order, or an explicit end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from gateway.ledger import (
    MOST_EARLY,
    MOST_OVERTAKEN,
    Broken,
    Ledger,
    Lost,
    Progress,
    PromptPiece,
    RequestRecord,
    Unwanted,
    Update,
)
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


def apply(ledger: Ledger[str], *entries: TokenEntry, epoch: int = EPOCH, worker: str = "w") -> list[Update]:
    updates = [update for _, update in ledger.apply_tokens(TokenBatch(epoch, worker, 1, 1, list(entries)))]
    ledger.check()
    return updates


def test_tokens_in_order() -> None:
    ledger, record = ledger_with()
    assert apply(ledger, entry(0, [1, 2])) == [Progress(0, [1, 2])]
    assert apply(ledger, entry(2, [3], "length", 3)) == [Progress(0, [3], "length")]
    assert record.choices[0].tokens.tolist() == [1, 2, 3]
    assert not record.open


def test_tokens_of_a_choice_that_was_stopped_here_are_told_of_and_of_no_other() -> None:
    ledger, record = ledger_with(n=3)
    apply(ledger, entry(0, [1]), entry(0, [1], choice=1), entry(0, [1], "stop", 1, choice=2))
    stopped = record.choices[0]
    stopped.closed = stopped.ended = True
    stopped.cancelled_s = 0.0
    assert apply(ledger, entry(1, [2]), entry(1, [2], choice=1)) == [Unwanted(0), Progress(1, [2])]
    assert apply(ledger, entry(2, [3], "length", 3)) == [], "there is nothing to cancel any more"
    assert apply(ledger, entry(0, [1], choice=2)) == [], "it ended by itself"
    record.suspend("lost", "its worker is gone", 1.0)
    assert apply(ledger, entry(3, [4])) == [], "of an attempt that is over"


def test_what_is_here_already_is_dropped() -> None:
    ledger, _ = ledger_with()
    apply(ledger, entry(0, [1, 2]))
    assert apply(ledger, entry(0, [1, 2])) == []
    assert apply(ledger, entry(1, [2, 3])) == [Progress(0, [3])]
    assert ledger.dropped_entries == 1


def test_a_gap_is_a_loss() -> None:
    ledger, record = ledger_with()
    apply(ledger, entry(0, [1]))
    assert apply(ledger, entry(2, [3])) == [Lost("gap", "tokens 1 to 1 were lost on the way")]
    record.suspend("gap", "", 1.0)
    assert apply(ledger, entry(1, [2])) == [], "of an older attempt"
    assert record.choices[0].tokens.tolist() == [1]
    assert apply(ledger, entry(1, [2], attempt=1)) == [Progress(0, [2])]


def test_tokens_of_the_next_worker_wait_for_those_that_they_have_overtaken() -> None:
    ledger, record = ledger_with()
    assert apply(ledger, entry(1, [2]), worker="w1") == [], "its prompt was computed elsewhere"
    assert apply(ledger, entry(0, [1])) == [Progress(0, [1]), Progress(0, [2])]
    assert apply(ledger, entry(4, [5]), worker="w3") == [] == apply(ledger, entry(3, [4]), worker="w2")
    assert apply(ledger, entry(5, [6]), worker="w3") == []
    late = [Progress(0, [3]), Progress(0, [4]), Progress(0, [5]), Progress(0, [6])]
    assert apply(ledger, entry(2, [3]), worker="w1") == late
    assert apply(ledger, entry(6, [7], "length", 7), worker="w3") == [Progress(0, [7], "length")]
    assert record.choices[0].tokens.tolist() == [1, 2, 3, 4, 5, 6, 7] and not ledger.dropped_entries


def test_what_was_never_overtaken_is_lost_after_some_entries_or_at_the_end() -> None:
    ledger, record = ledger_with()
    apply(ledger, entry(0, [1]))
    for offset in range(2, 2 + MOST_EARLY):
        assert apply(ledger, entry(offset, [offset]), worker="w1") == []
    lost = [Lost("gap", "tokens 1 to 1 were lost on the way")]
    assert apply(ledger, entry(2 + MOST_EARLY, [9]), worker="w1") == lost
    record.suspend("gap", "", 1.0)
    assert apply(ledger, entry(1, [2])) == [], "nothing of that attempt comes back"
    assert apply(ledger, entry(1, [2], attempt=1), worker="w1") == [Progress(0, [2])]
    assert apply(ledger, entry(4, [5], attempt=1), worker="w2") == []
    end = entry(5, [6], "length", 6, attempt=1)
    assert apply(ledger, end, worker="w2") == [Lost("gap", "tokens 2 to 3 were lost on the way")]
    record.suspend("gap", "", 2.0)
    far = entry(2 + MOST_OVERTAKEN + 1, [9], attempt=2)
    assert apply(ledger, far, worker="w3") == [Lost("gap", "tokens 2 to 6 were lost on the way")]


def test_a_terminal_entry_checks_the_count() -> None:
    ledger, record = ledger_with()
    assert apply(ledger, entry(0, [1], "stop", 2)) == [Lost("gap", "1 of 2 tokens arrived")]
    assert record.choices[0].tokens.tolist() == [] and record.open
    (update,) = apply(ledger, entry(0, [1, 2], "stop", 1))
    assert isinstance(update, Broken), "nothing was lost: it makes no sense"


def test_what_somebody_else_has_cancelled_is_lost() -> None:
    ledger, record = ledger_with()
    (update,) = apply(ledger, entry(0, [1], "cancelled", 1))
    assert isinstance(update, Lost) and record.open


@pytest.mark.parametrize("end", ["failed", "nonsense"])
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
    ledger, record = ledger_with(n=2, attempt=3)
    assert ledger.live() == [("r", 0)]
    apply(ledger, entry(0, [1], "stop", 1, attempt=3))
    assert ledger.live() == [("r", 3)]
    record.suspend("lost", "", 1.0)
    assert ledger.live() == [("r", 0)], "it is being submitted"
    record.accept(EPOCH)
    assert ledger.live() == [("r", 4)]
    apply(ledger, entry(0, [1], "stop", 1, choice=1, attempt=4))
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

    def event(choice: int, attempt: int = 0, epoch: int = EPOCH, request_id: str = "r", kind: str = "failed") -> object:
        return ledger.apply_event(RequestEvent(epoch, kind, request_id, attempt, choice, "its worker died"))

    assert event(0, attempt=1) is None
    assert event(0, epoch=EPOCH - 1) is None
    assert event(0, request_id="x") is None
    assert event(2) is None
    applied = event(1)
    assert applied == (record, Broken(1, "the request was failed: its worker died"))
    assert [choice.closed for choice in record.choices] == [False, True]
    assert event(1, kind="lost") is None, "nobody waits for it"
    for kind in ("lost", "moved"):
        assert event(0, kind=kind) == (record, Lost(kind, f"the request was {kind}: its worker died"))
    assert record.open
    assert event(-1) == (record, Broken(-1, "the request was failed: its worker died"))
    assert event(-1) is None


def test_the_last_word_counts_for_an_attempt_that_may_still_run() -> None:
    """Two workers die of one request: the first one's choices are lost, and then it is convicted."""
    ledger, record = ledger_with(n=2, attempt=1)

    def event(kind: str, attempt: int) -> object:
        return ledger.apply_event(RequestEvent(EPOCH, kind, "r", attempt, 1, "it kills"))

    assert event("lost", 1) == (record, Lost("lost", "the request was lost: it kills"))
    record.suspend("lost", "", 0.0)
    assert event("lost", 1) is None and event("failed", 0) is None
    assert event("failed", 1) == (record, Broken(1, "the request was failed: it kills"))
    ledger, record = ledger_with(n=2, attempt=1)
    record.suspend("lost", "", 0.0)
    record.accept(EPOCH)
    assert event("failed", 1) is None and event("dropped", 3) is None
    assert event("failed", 2) is not None


def test_a_resume_goes_on_behind_what_is_here() -> None:
    ledger, record = ledger_with(n=3, attempt=1)
    first = record.submit
    assert record.offer() is first
    apply(ledger, entry(0, [5, 6], attempt=1), entry(0, [7], "stop", 1, choice=1, attempt=1))
    record.suspend("lost", "its worker died", 10.0)
    assert (record.attempt, record.epoch, record.interrupted_s, record.cause) == (2, 0, 10.0, "lost")
    again = record.offer()
    assert again == structs.replace(first, attempt=2, resumed=[pack_tokens([5, 6]), b"", b""], done_choices=[1]), (
        "arrival, seed, deadline and the rest are as they were"
    )
    record.accept(EPOCH)
    record.suspend("epoch", "", 12.0)
    assert (record.attempt, record.interrupted_s, record.cause, record.losses) == (3, 10.0, "lost", 2)
    apply(ledger, entry(2, [8], attempt=3), entry(0, [9], choice=2, attempt=2))
    assert record.go_on(13.5) == 3.5 and record.go_on(14.0) is None
    assert (record.interrupted_s, record.losses) == (None, 0)
    assert [choice.tokens.tolist() for choice in record.choices] == [[5, 6, 8], [7], []]
    assert record.epoch == EPOCH, "whoever sends tokens has accepted it, wherever the reply is"


def test_the_last_token_of_all_is_computed_again() -> None:
    """Only a worker says why a choice ended; one that has all its tokens and no end is not to be refused."""
    ledger, record = ledger_with(attempt=1)
    apply(ledger, entry(0, list(range(100)), attempt=1))
    record.suspend("gap", "", 0.0)
    assert record.offer().resumed == [pack_tokens(range(99))]
    assert apply(ledger, entry(99, [99], "length", 100, attempt=2)) == [Progress(0, [], "length")]


def test_a_beam_search_starts_over() -> None:
    ledger, record = wanting(n=2, beam_width=2)
    apply(ledger, entry(0, [1, 2], "length", 2))
    record.suspend("lost", "", 0.0)
    again = record.offer()
    assert (again.attempt, again.resumed, again.done_choices) == (1, [], [])
    found = [entry(0, [1, 2], "length", 2, attempt=1), entry(0, [3], "stop", 1, choice=1, attempt=1)]
    assert apply(ledger, *found) == [Progress(1, [3], "stop")]


def test_each_attempt_computes_the_prompts_log_probabilities() -> None:
    ledger, record = wanting(prompt_logprobs=1)
    apply(ledger, piece(1, -1, -2))
    record.suspend("lost", "", 0.0)
    salts = {record.submit.cache_salt, record.offer().cache_salt}
    pieces = [
        TokenEntry("r", 1, 0, 0, [], prompt_logprobs=told(-1, -2), prompt_offset=1),
        TokenEntry("r", 1, 0, 0, [4], prompt_logprobs=told(-3), prompt_offset=3),
    ]
    assert apply(ledger, *pieces) == [PromptPiece(told(-3)), Progress(0, [4])]
    record.suspend("lost", "", 0.0)
    assert len(salts | {record.offer().cache_salt}) == 3
    _, plain = wanting()
    plain.suspend("lost", "", 0.0)
    assert plain.offer().cache_salt == plain.submit.cache_salt


def test_what_may_still_run_is_cancelled() -> None:
    _, record = ledger_with(attempt=1)
    assert list(record.attempts_to_cancel()) == [1]
    record.suspend("gap", "", 0.0)
    assert list(record.attempts_to_cancel()) == [1, 2], "nobody may have heard of the second"
    record.suspend("gap", "", 0.0)
    record.accept(EPOCH)
    assert list(record.attempts_to_cancel()) == [3], "it has replaced the others"


def test_scores_add_up_and_are_never_split() -> None:
    ledger, record = wanting(want_score=True)

    def scored(offset: int, tokens: list[int], log_prob: float, attempt: int = 0) -> TokenEntry:
        return TokenEntry("r", attempt, 0, offset, tokens, log_prob=log_prob)

    assert apply(ledger, scored(0, [1], -1.0), scored(0, [1], -1.0)) == [Progress(0, [1], log_prob=-1.0)]
    assert apply(ledger, scored(1, [2, 3], -2.0)) == [Progress(0, [2, 3], log_prob=-2.0)]
    (update,) = apply(ledger, scored(2, [3, 4], -3.0))
    assert isinstance(update, Lost)
    record.suspend("gap", "", 0.0)
    assert apply(ledger, scored(3, [4], -1.5, attempt=1)) == [Progress(0, [4], log_prob=-1.5)]
    (update,) = apply(ledger, scored(4, [5], float("nan"), attempt=1))
    assert isinstance(update, Broken)


def told(*log_probs: float) -> list[TokenLogprob]:
    return [TokenLogprob(log_prob, 1, [4], [log_prob]) for log_prob in log_probs]


def wanting(n: int = 1, prompt_len: int = 4, **sampling: Any) -> tuple[Ledger[str], RequestRecord[str]]:
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
        told(-1, -2, -3), told(-1, float("nan")), told(-1, float("inf")),
        [*told(-1), TokenLogprob(-1.0, 1, [1, 2], [-1.0])], [*told(-1), TokenLogprob(-1.0, 1, [-1], [-1.0])],
        [*told(-1), TokenLogprob(-1.0, 1, [1], [float("nan")])],
    ],
)  # fmt: skip
def test_log_probabilities_that_make_no_sense_are_an_error(logprobs: list[TokenLogprob]) -> None:
    ledger, record = wanting(logprobs=1)
    (update,) = apply(ledger, TokenEntry("r", 0, 0, 0, [7, 8], logprobs=logprobs))
    assert isinstance(update, Broken)
    assert not record.open
    plain, _ = wanting()
    assert apply(plain, TokenEntry("r", 0, 0, 0, [7, 8], logprobs=logprobs)) == [Progress(0, [7, 8])]


@pytest.mark.parametrize("logprobs", [[], [TokenLogprob(-1.0, 1, [4], [-1.0])]])
def test_a_token_without_its_log_probability_is_a_loss(logprobs: list[TokenLogprob]) -> None:
    ledger, record = wanting(logprobs=1)
    (update,) = apply(ledger, TokenEntry("r", 0, 0, 0, [7, 8], logprobs=logprobs))
    assert isinstance(update, Lost)
    assert record.open and not record.choices[0].tokens


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


def test_a_hole_in_the_prompts_log_probabilities_is_a_loss_and_nonsense_ends_all_choices() -> None:
    ledger, record = wanting(n=2, prompt_logprobs=1)
    (update,) = apply(ledger, piece(2, -2, tokens=(9,)))
    assert isinstance(update, Lost)
    assert record.open and not record.prompt_logprobs
    for bad in (piece(1, float("nan")), piece(1, -1, -2, -3, -4)):
        ledger, record = wanting(n=2, prompt_logprobs=1)
        (update,) = apply(ledger, bad)
        assert isinstance(update, Broken)
        assert update.choice == -1
        assert not record.open


def test_no_token_passes_before_the_prompts_log_probabilities() -> None:
    ledger, _ = wanting(prompt_logprobs=1)
    (update,) = apply(ledger, entry(0, [1]))
    assert isinstance(update, Lost)
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
