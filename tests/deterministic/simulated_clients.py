"""Clients of a simulated mesh: what they ask, what the simulated model must answer, and whether they got just that."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from simulated_nodes import EOS, MODEL, VOCAB, gateway_metrics
from virtual_time import NodeLoop

from gateway.dispatch import Dispatch, Part
from gateway.errors import ApiError
from gateway.flight import Flight
from gateway.router import Router
from gateway.token_details import PromptReport
from shared.messages import EndReason, Sampling, Submit, TokenLogprob, pack_tokens
from worker.simulated import chain, likelihood, pick, score

if TYPE_CHECKING:
    from simulated_mesh import SimulatedMesh

CONVICTED = "has twice ended the worker"  # in the reason of a request that is failed for it
TOP = 2  # alternatives, where log-probabilities are asked for


@dataclass(frozen=True)
class Ask:
    """One request of one client."""

    name: str
    at_s: float
    gateway: int
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    ignore_eos: bool = False
    priority: int = 0
    tenant: str = ""
    stops: dict[int, int] = field(
        default_factory=dict, hash=False
    )  # choice -> tokens after which a stop string matches
    leaves_s: float = 0.0  # when the client hangs up, seconds after it came; 0: never
    beam_width: int = 0
    scored: bool = False  # cumulative log-probabilities (best_of)
    logprobs: bool = False  # of the output's tokens
    prompt_logprobs: bool = False


@dataclass
class Answer:
    """Of one choice."""

    tokens: list[int] = field(default_factory=list)
    end: str = ""
    log_prob: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)


def expected(ask: Ask, choice: int) -> Answer:
    if ask.beam_width:
        return _undisturbed(replace(ask, at_s=1.0, gateway=0, leaves_s=0.0, priority=0, tenant=""))[choice]
    state = 0
    for token in ask.prompt:
        state = chain(state, token)
    answer = Answer()
    tokens = answer.tokens
    while not answer.end:
        token = pick(state, ask.seed, 0, choice, len(ask.prompt) + len(tokens), VOCAB)
        if len(tokens) < ask.min_tokens and token == EOS:
            token += 1
        tokens.append(token)
        if ask.logprobs:
            answer.logprobs.append(likelihood(state, token, TOP, VOCAB))
        if ask.scored:
            answer.log_prob += score(state, token)
        state = chain(state, token)
        stopped = len(tokens) > ask.min_tokens and token == EOS and not ask.ignore_eos
        if stopped or len(tokens) == ask.stops.get(choice):
            answer.end = EndReason.STOP.value
        elif len(tokens) >= ask.max_tokens:
            answer.end = EndReason.LENGTH.value
    return answer


def expected_of_prompt(ask: Ask) -> list[TokenLogprob]:
    state, told = 0, []
    for token, following in zip(ask.prompt, ask.prompt[1:], strict=False):
        state = chain(state, token)
        told.append(likelihood(state, following, TOP, VOCAB))
    return told


@functools.lru_cache(maxsize=4096)
def _undisturbed(ask: Ask) -> list[Answer]:
    """What a mesh of its own, without faults, answers: the oracle of beam searches, of which there is no simpler."""
    from simulated_mesh import SimulatedMesh

    mesh = SimulatedMesh(0, num_blocks=256)
    client = mesh.ask(ask, checked=False)
    mesh.run()
    assert client.outcome == "finished", client.error
    return [Answer(text.tokens, text.finish_reason or "") for text in client.texts]


class CheckedTokens:
    """In place of a choice's text: checks each token as it comes, if there is anything to compare it with."""

    def __init__(self, client: Client, choice: int, expected: Answer | None) -> None:
        self._client = client
        self._choice = choice
        self._expected = expected
        self._stop = client.ask.stops.get(choice, 0)
        self.tokens: list[int] = []
        self.stopped_here = False
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def feed(self, tokens: list[int], end: str = "", logprobs: Sequence[TokenLogprob] = ()) -> str:
        if self._client.ask.logprobs and len(logprobs) != len(tokens):
            self._violate(f"{len(tokens)} tokens come with {len(logprobs)} log-probabilities")
        for index, token in enumerate(tokens):
            self._check(token, logprobs[index] if index < len(logprobs) else None)
            self.tokens.append(token)
            if len(self.tokens) == self._stop:
                self.stopped_here = True
                self._finish(EndReason.STOP.value)
                return "t"
        if end:
            self._finish(end)
        return "t"

    def take_details(self) -> list[Any]:
        return []

    def check_score(self, log_prob: float) -> None:
        if self._expected is not None and self._client.ask.scored and abs(log_prob - self._expected.log_prob) > 1e-6:
            self._violate(f"the log-probability is {log_prob}, not {self._expected.log_prob}")

    def _check(self, token: int, logprob: TokenLogprob | None) -> None:
        if self._expected is None:
            return
        place, right = len(self.tokens), self._expected.tokens
        if place >= len(right) or token != right[place]:
            self._violate(f"token {place} is {token}, not {right[place] if place < len(right) else 'nothing'}")
        elif logprob is not None and logprob != self._expected.logprobs[place]:
            self._violate(f"token {place} has another log-probability")

    def _finish(self, end: str) -> None:
        self.finish_reason = end
        right = self._expected
        if right is not None and (len(self.tokens) != len(right.tokens) or end != right.end):
            self._violate(f"{len(self.tokens)} tokens end as {end}, not {len(right.tokens)} as {right.end}")

    def _violate(self, text: str) -> None:
        self._client.violate(f"choice {self._choice}: {text}")


class Client:
    """One request's way through a gateway, as the HTTP side goes it. ``outcome``: how it went."""

    def __init__(self, mesh: SimulatedMesh, ask: Ask, checked: bool = True) -> None:
        self.mesh = mesh
        self.ask = ask
        self.outcome = "unborn"
        self.error = ""
        self.texts = [CheckedTokens(self, index, expected(ask, index) if checked else None) for index in range(ask.n)]

    def violate(self, text: str) -> None:
        self.mesh.violate(f"{self.ask.name}: {text}")

    def come(self) -> None:
        gateways = self.mesh.gateways
        node = gateways[self.ask.gateway % len(gateways)]
        self.outcome = "open"
        if not node.serve_client(self):
            self.end("nobody listens")

    def end(self, outcome: str) -> None:
        self.outcome = outcome
        self.mesh.open_clients -= 1

    @property
    def over(self) -> bool:
        return self.outcome not in ("unborn", "open")

    async def go(self, dispatch: Dispatch | Router, loop: NodeLoop) -> None:
        flight = Flight(self.mesh.clock.monotonic(), gateway_metrics().of(MODEL))
        report = PromptReport(self.ask.prompt) if self.ask.prompt_logprobs else None
        choices = [flight.add_choice(text) for text in self.texts]  # type: ignore[arg-type]
        if self.ask.leaves_s:
            loop.call_later(self.ask.leaves_s, flight.abandon)
        accepted = False
        record = dispatch.open(self._submit(dispatch.gateway_id), Part(flight, choices, report))
        try:
            await dispatch.offer(record)
            accepted = True
            while await flight.wait():
                pass
        except ApiError as error:
            flight.fail(error)
        finally:
            dispatch.release(record)
        if flight.client_gone:
            self.end("left")
        elif flight.error is not None:
            self.error = str(flight.error)
            self.end(self._judge(flight.error, accepted))
        else:
            self.end("finished")
            if any(text.finish_reason is None for text in self.texts):
                self.violate("it ended before all choices had")
            for choice, text in zip(choices, self.texts, strict=True):
                text.check_score(choice.log_prob)
            if report is not None and report.logprobs != expected_of_prompt(self.ask):
                self.violate("the prompt's log-probabilities are not what they must be")

    def _submit(self, gateway: str) -> Submit:
        ask = self.ask
        sampling = Sampling(
            ask.seed, ask.max_tokens, ignore_eos=ask.ignore_eos, min_tokens=ask.min_tokens, beam_width=ask.beam_width,
            want_score=ask.scored, logprobs=TOP if ask.logprobs else -1,
            prompt_logprobs=TOP if ask.prompt_logprobs else -1,
        )  # fmt: skip
        return Submit(
            ask.name, 1, gateway, MODEL, pack_tokens(ask.prompt), sampling, self.mesh.clock.time_ns(), n=ask.n,
            priority=ask.priority, tenant=ask.tenant, cache_salt=ask.name if ask.prompt_logprobs else "",
        )  # fmt: skip

    def _judge(self, error: ApiError, accepted: bool) -> str:
        """A request may be refused while the mesh has no leader or no worker, and fail only if it ends workers."""
        mesh = self.mesh
        if not accepted:
            if error.status != 429 and (error.status not in (404, 503) or mesh.undisturbed):
                self.violate(f"it was refused: {self.error}")
            return "refused"
        if CONVICTED in self.error and (self.ask.name in mesh.deadly or mesh.seeming_crashes >= 2):
            return "convicted"
        self.violate(f"it was given up: {self.error}")
        return "failed"
