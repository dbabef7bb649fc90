"""One HTTP request in flight: its choices, what of their text is waiting to be sent, and how it ends.

Token batches come in through plain calls, which only append text; whoever writes the response takes all that has
gathered. So a slow reader never queues messages: its pending text merges, and is bounded by the answer itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.choice_text import ChoiceText
from gateway.errors import ApiError, interrupted
from gateway.metrics import ModelMetrics
from gateway.steps import Steps
from gateway.token_details import PromptReport, TokenDetail
from shared.messages import TokenLogprob


@dataclass(slots=True, eq=False)
class Choice:
    """One choice; ``index`` is its place in the reply (prompt i, choice j of n: i * n + j)."""

    index: int
    text: ChoiceText
    pending: str = ""  # text that was not handed out yet
    waiting: bool = False  # in line to be handed out
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    log_prob: float = 0.0  # of its tokens so far, where it was asked for
    prompt: PromptReport | None = None  # where the client wants to know something about its prompt
    steps: Steps | None = None  # of a stream that is written token by token

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, once its last text is handed out."""
        return self.text.finish_reason if self.steps is None else self.steps.finish_reason

    def take_details(self) -> list[TokenDetail]:
        """Of the tokens whose text was handed out since the last call."""
        return (self.text if self.steps is None else self.steps).take_details()


class Flight:
    """``wait`` hands out progress until every choice has ended, or the flight as a whole has failed."""

    def __init__(self, arrival_s: float, metrics: ModelMetrics) -> None:
        """``arrival_s``: monotonic seconds. ``metrics``: of its model."""
        self.arrival_s = arrival_s
        self.metrics = metrics
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0  # of the prompts, held by the prefix cache
        self.error: ApiError | None = None
        self.client_gone = False
        self.on_gone: dict[str, Callable[[], None]] = {}  # by request: what to do at once when the client leaves
        self.first_token_s = 0.0
        self._dirty: list[Choice] = []
        self._open = 0
        self._left_out_tokens = 0
        self._waiter: asyncio.Future[None] | None = None

    def add_choice(self, text: ChoiceText, prompt: PromptReport | None = None, stepwise: bool = False) -> Choice:
        """``stepwise``: its ``steps`` keep what each token gave; the text that ``wait`` hands out only says so."""
        echo = prompt.echo if prompt is not None else ""
        steps = Steps(text, echo) if stepwise else None
        choice = Choice(len(self.choices), text, echo, prompt=prompt, steps=steps)
        self.choices.append(choice)
        self._open += 1
        return choice

    @property
    def completion_tokens(self) -> int:
        return self._left_out_tokens + sum(choice.text.num_tokens for choice in self.choices)

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self._open == 0 or self.error is not None or self.client_gone

    def feed(
        self, choice: Choice, tokens: list[int], end: str, now_s: float, log_prob: float = 0.0,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:  # fmt: skip
        """New tokens of a choice that has not ended; ``log_prob``: of these, together."""
        if choice.text.finish_reason is not None:
            return
        if tokens:
            self._book_latency(choice, len(tokens), now_s)
        choice.log_prob += log_prob
        before = choice.text.num_tokens
        text = (choice.text if choice.steps is None else choice.steps).feed(tokens, end, logprobs)
        self.metrics.generation_tokens.value += choice.text.num_tokens - before
        finished = choice.text.finish_reason is not None
        if finished:
            self._open -= 1
            decode_s = choice.last_token_s - choice.first_token_s
            self.metrics.choice_finished(choice.text.finish_reason or "", choice.text.num_tokens, decode_s)
        if not text and not finished:
            return
        if not choice.waiting:
            choice.waiting = True
            self._dirty.append(choice)
        choice.pending += text
        self._wake()

    def keep_best(self, samples: int, n: int) -> list[int]:
        """Of each prompt's ``samples`` choices keep the ``n`` with the highest log-probability per token, best first.

        Returns the places that the kept ones had. Every token made is counted in the usage, as OpenAI does.
        """
        if samples == n:
            return list(range(len(self.choices)))
        kept: list[Choice] = []
        for first in range(0, len(self.choices), samples):
            ranked = sorted(
                self.choices[first : first + samples],
                key=lambda choice: (-choice.log_prob / max(1, choice.text.num_tokens), choice.index),
            )
            kept += ranked[:n]
            self._left_out_tokens += sum(choice.text.num_tokens for choice in ranked[n:])
        places = [choice.index for choice in kept]
        self.choices = kept
        for index, choice in enumerate(kept):
            choice.index = index
        return places

    def fail(self, error: ApiError) -> None:
        """End the whole flight with ``error``, unless it is over."""
        if not self.over:
            self.error = error
            self._wake()

    def abandon(self) -> None:
        """The client is gone."""
        self.client_gone = True
        for release in list(self.on_gone.values()):
            release()
        self._wake()

    def fail_interrupted(self, reason: str) -> None:
        self.fail(interrupted(reason))

    async def wait(self) -> list[tuple[Choice, str]]:
        """Wait for progress: the choices that moved since the last call, each with its new text (maybe empty).

        A choice that has ended comes once with its ``finish_reason`` set. Empty once the flight is over and everything
        was handed out; then ``error`` and ``client_gone`` tell how. One task may wait at a time.
        """
        while not self._dirty and not self.over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        progress = [(choice, choice.pending) for choice in self._dirty]
        for choice in self._dirty:
            choice.pending = ""
            choice.waiting = False
        self._dirty.clear()
        return progress

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _book_latency(self, choice: Choice, count: int, now_s: float) -> None:
        if not self.first_token_s:
            self.first_token_s = now_s
            self.metrics.time_to_first_token.observe(now_s - self.arrival_s)
        if choice.last_token_s:
            self.metrics.inter_token_latency.observe((now_s - choice.last_token_s) / count)
        else:
            choice.first_token_s = now_s
        choice.last_token_s = now_s
