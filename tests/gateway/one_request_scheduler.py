"""A scheduler by the core's rules, and a worker, for one request of several choices whose tokens a test can foresee."""

from __future__ import annotations

from typing import Any

from shared.messages import Cancel, Outcome, Submit, SubmitReply, TokenEntry, unpack_tokens

CHOICES = 3
MAX_TOKENS = 12


class NumbersAsText:
    def feed(self, tokens: Any) -> str:
        return "".join(f"<{token}>" for token in tokens)

    def finish(self) -> str:
        return ""


def token(choice: int, position: int) -> int:
    return 100 * (choice + 1) + position


class Scheduler:
    """What the core does with a request, and a worker that runs it."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.attempt = 0
        self.running: dict[int, int] = {}  # choice -> tokens that it has
        self.tombstones: set[int] = set()

    def submit(self, submit: Submit) -> SubmitReply:
        if submit.attempt <= self.attempt:
            return SubmitReply(Outcome.DUPLICATE, self.epoch)
        self.attempt = submit.attempt
        resumed = [unpack_tokens(packed) for packed in submit.resumed] or [[] for _ in range(CHOICES)]
        for choice, tokens in enumerate(resumed):
            assert tokens == [token(choice, position) for position in range(len(tokens))]
        self.running = {choice: len(resumed[choice]) for choice in range(CHOICES) if choice not in submit.done_choices}
        if submit.attempt in self.tombstones:
            self.running.clear()
        return SubmitReply(Outcome.ACCEPTED, self.epoch)

    def cancel(self, cancel: Cancel) -> None:
        if cancel.attempt > self.attempt:
            if cancel.choice == -1:
                self.tombstones.add(cancel.attempt)
        elif cancel.attempt == self.attempt:
            for choice in range(CHOICES):
                if cancel.choice in (-1, choice):
                    self.running.pop(choice, None)

    def step(self, choice: int) -> TokenEntry:
        offset = self.running[choice]
        self.running[choice] += 1
        ends = self.running[choice] == MAX_TOKENS
        if ends:
            del self.running[choice]
        return TokenEntry(
            "r", self.attempt, choice, offset, [token(choice, offset)], "length" if ends else "",
            MAX_TOKENS if ends else 0,
        )  # fmt: skip
