"""Whatever is lost, repeated, late or of another attempt: a client's tokens are the right ones, and in the end all."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ledger import Broken, Ledger, Lost, Progress, PromptPiece, RequestRecord, Update
from shared.messages import (
    RequestEvent,
    Sampling,
    Submit,
    TokenBatch,
    TokenEntry,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)

PROMPT = [3, 1, 4, 1]
LENGTHS = (7, 1, 5)  # of the three choices; the first is ended by max_tokens
EPOCH = 4


def token(choice: int, position: int) -> int:
    return 100 * (1 + choice) + position


def told(value: int) -> TokenLogprob:
    return TokenLogprob(-float(value), 1, [value], [-float(value)])


@dataclass
class Attempt:
    """A worker that runs one submission, a piece at a time."""

    submit: Submit
    offsets: list[int] = field(default_factory=list)
    prompt_told: bool = False

    def __post_init__(self) -> None:
        resumed = [unpack_tokens(packed) for packed in self.submit.resumed] or [[] for _ in LENGTHS]
        for choice, tokens in enumerate(resumed):
            assert tokens == [token(choice, position) for position in range(len(tokens))]
        self.offsets = [len(tokens) for tokens in resumed]
        for choice in self.submit.done_choices:
            self.offsets[choice] = LENGTHS[choice]

    @property
    def done(self) -> bool:
        return self.offsets == list(LENGTHS)

    def run(self, choice: int, count: int) -> list[TokenEntry]:
        request_id, attempt, sampling = self.submit.request_id, self.submit.attempt, self.submit.sampling
        entries = []
        if sampling.prompt_logprobs >= 0 and not self.prompt_told:
            self.prompt_told = True
            entries = [
                TokenEntry(request_id, attempt, 0, 0, [], prompt_logprobs=[told(place)], prompt_offset=place)
                for place in range(1, len(PROMPT))
            ]
        offset = self.offsets[choice]
        tokens = [token(choice, offset + index) for index in range(min(count, LENGTHS[choice] - offset))]
        if not tokens:
            return entries
        self.offsets[choice] += len(tokens)
        ends = self.offsets[choice] == LENGTHS[choice]
        end = ("length" if choice == 0 else "stop") if ends else ""
        entries.append(
            TokenEntry(
                request_id, attempt, choice, offset, tokens, end, LENGTHS[choice] if end else 0,
                float(-len(tokens)) if sampling.want_score else 0.0,
                [told(one) for one in tokens] if sampling.logprobs >= 0 else [],
            )
        )  # fmt: skip
        return entries


class World:
    """A ledger, the attempts that run somewhere, and the entries that are on their way, in no order."""

    def __init__(self, sampling: Sampling) -> None:
        self.ledger: Ledger[None] = Ledger()
        self.ledger.epoch = EPOCH
        submit = Submit("r", 1, "g", "m", pack_tokens(PROMPT), sampling, 0, n=len(LENGTHS), cache_salt="s")
        self.record: RequestRecord[None] = self.ledger.open(submit, None)
        self.running = [Attempt(submit)]
        self.on_the_way: list[TokenEntry] = []
        self.got: list[list[int]] = [[] for _ in LENGTHS]
        self.scores = [0.0 for _ in LENGTHS]
        self.ended = ["" for _ in LENGTHS]
        self.told: list[TokenLogprob] = []

    def deliver(self, entries: list[TokenEntry], epoch: int = EPOCH) -> None:
        for record, update in self.ledger.apply_tokens(TokenBatch(epoch, "w", 1, 1, entries)):
            self.take(record, update)
        self.ledger.check()

    def take(self, record: RequestRecord[None], update: Update) -> None:
        assert not isinstance(update, Broken), update.reason
        if isinstance(update, Lost):
            self.lose(update.cause)
        elif isinstance(update, PromptPiece):
            self.told += update.logprobs
        else:
            assert isinstance(update, Progress) and not self.ended[update.choice]
            record.go_on(0.0)
            self.got[update.choice] += update.tokens
            self.scores[update.choice] += update.log_prob
            self.ended[update.choice] = update.end
            if record.submit.sampling.logprobs >= 0:
                assert list(update.logprobs) == [told(one) for one in update.tokens]

    def lose(self, cause: str) -> None:
        self.record.suspend(cause, "", 0.0)
        self.running.append(Attempt(self.record.offer()))

    def event(self, attempt: int) -> None:
        applied = self.ledger.apply_event(RequestEvent(EPOCH, "lost", "r", attempt, -1, ""))
        assert (applied is not None) == (attempt == self.record.attempt and self.record.open)
        if applied is not None:
            self.take(*applied)


index = st.integers(0, 1 << 16)
action = st.one_of(
    st.tuples(st.just("run"), index, index, st.integers(1, 3)),
    st.tuples(st.sampled_from(["deliver", "repeat", "drop", "stale"]), index, st.just(0), st.just(0)),
    st.tuples(st.just("event"), index, st.just(0), st.just(0)),
)
samplings = st.sampled_from([
    Sampling(0, LENGTHS[0]), Sampling(0, LENGTHS[0], logprobs=1), Sampling(0, LENGTHS[0], want_score=True),
    Sampling(0, LENGTHS[0], prompt_logprobs=1),
])  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(samplings, st.lists(action, max_size=60))
def test_nothing_that_happens_on_the_way_gives_a_wrong_token(
    sampling: Sampling, actions: list[tuple[str, int, int, int]]
) -> None:
    world = World(sampling)
    for name, first, second, count in actions:
        if name == "run":
            attempt = world.running[first % len(world.running)]
            world.on_the_way += attempt.run(second % len(LENGTHS), count)
        elif name == "event":
            world.event(1 + first % world.record.attempt)
        elif world.on_the_way:
            place = first % len(world.on_the_way)
            entry = world.on_the_way[place] if name == "repeat" else world.on_the_way.pop(place)
            if name != "drop":
                world.deliver([entry], EPOCH - 1 if name == "stale" else EPOCH)
        for choice, tokens in enumerate(world.got):
            assert tokens == [token(choice, position) for position in range(len(tokens))]
    for _ in range(2):  # nothing is lost any more: what is on its way may still be too little, and then it is resumed
        world.deliver(world.on_the_way)
        world.on_the_way.clear()
        if world.record.open:
            world.lose("lost")
            last = world.running[-1]
            while not last.done:
                for choice in range(len(LENGTHS)):
                    world.deliver(last.run(choice, 2))
    assert world.got == [[token(choice, at) for at in range(length)] for choice, length in enumerate(LENGTHS)]
    assert world.ended == ["length", "stop", "stop"]
    assert not world.record.open and not world.ledger.live()
    if sampling.want_score:
        assert world.scores == [-float(length) for length in LENGTHS]
    if sampling.prompt_logprobs >= 0:
        assert world.told == [told(place) for place in range(1, len(PROMPT))]
