"""The simulated runner: the same process and messages with a step-time model instead of a model.

It computes no language, but it does keep a KV cache: the entry of each position is a hash of the entry before it and
of the token there, read and written through the block tables. So its tokens are right only if every plan was: a page
given to two sequences, a wrong table or a lost chunk changes what comes out. Tokens are a function of the tokens
before them, the seed, the choice and the position, whatever the batching. Log-probabilities are made up the same way;
a LoRA adapter is its name, penalties and biases change nothing, and a grammar is refused: there is no tokenizer that
knows its tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from shared.beams import candidates_wanted
from shared.messages import Capacity, TokenLogprob
from worker.batch import SCRATCH_PAGE, Batch, Row, Sampled, Slot, Step
from worker.transfer.pages import Form, HostPages

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood; OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def chain(state: int, token: int) -> int:
    """The KV entry of ``token`` after a position whose entry is ``state``."""
    return _mix((state + 0x9E3779B97F4A7C15 + token) & _MASK)


def pick(state: int, seed: int, prompt_index: int, choice: int, position: int, vocab_size: int) -> int:
    """The token sampled after a position whose KV entry is ``state``."""
    return _mix(state ^ _mix((seed * 31 + prompt_index * 1009 + choice * 65537 + position) & _MASK)) % vocab_size


def continuations(state: int, count: int, vocab_size: int) -> tuple[list[int], list[float]]:
    """The ``count`` best continuations of a beam whose last KV entry is ``state``, and their log-probabilities."""
    first = _mix(state)
    tokens = [(first + 7919 * rank) % vocab_size for rank in range(count)]
    if len(set(tokens)) < count:
        tokens = [(first + rank) % vocab_size for rank in range(count)]
    log_prob = 0.0
    log_probs = []
    for token in tokens:
        log_prob -= 0.05 + (_mix(state ^ token) % 1000) / 2000
        log_probs.append(log_prob)
    return tokens, log_probs


def likelihood(state: int, token: int, top: int, vocab_size: int) -> TokenLogprob:
    """A made-up log-probability of ``token`` after a position whose KV entry is ``state``, and ``top`` alternatives."""
    top_ids, top_log_probs = continuations(state, min(top, vocab_size), vocab_size)
    if token in top_ids:
        place = top_ids.index(token)
        return TokenLogprob(top_log_probs[place], place + 1, top_ids, top_log_probs)
    rank = min(top + 1 + _mix(state ^ token) % 50, vocab_size)
    return TokenLogprob(-10 - (_mix(state ^ token) % 1000) / 100, rank, top_ids, top_log_probs)


def score(state: int, token: int) -> float:
    """A made-up log-probability of ``token`` where only the sum over an output is asked for."""
    return -(_mix(state ^ token) % 1000) / 100


def first_state(adapter: str) -> int:
    """What stands before the first position: a LoRA adapter changes every entry."""
    state = 0
    for byte in adapter.encode():
        state = chain(state, byte)
    return state


def expected_tokens(
    prompt: list[int], seed: int, count: int, vocab_size: int, choice: int = 0, adapter: str = ""
) -> list[int]:
    """What the simulated worker generates for a prompt: the oracle of the tests."""
    state = first_state(adapter)
    for token in prompt:
        state = chain(state, token)
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        token = pick(state, seed, 0, choice, position, vocab_size)
        tokens.append(token)
        state = chain(state, token)
    return tokens


@dataclass(frozen=True)
class StepTime:
    """Duration of a step: ``base_us + token_us * rows``, padding included."""

    base_us: float = 0.0
    token_us: float = 0.0

    def seconds(self, rows: int) -> float:
        return (self.base_us + self.token_us * rows) / 1e6


class SimulatedRunner:
    def __init__(self, capacity: Capacity, step_time: StepTime) -> None:
        self.capacity = capacity
        self.kv_bytes_copied = 0
        self.swap_us = 0
        self._step_time = step_time
        self._kv = np.zeros((capacity.num_blocks + 1, capacity.block_size), dtype=np.uint64)
        self._host = np.zeros((capacity.host_blocks, capacity.block_size), dtype=np.uint64)

    def forward(self, batch: Batch, step: Step) -> Sampled:
        began = time.monotonic()
        for page, place in step.swap_outs:
            self._host[place] = self._kv[page]
        self.swap_us = len(step.swap_outs) + len(step.swap_ins)
        for source, target in step.copies:
            self._kv[target] = self._kv[source]
            self.kv_bytes_copied += self._kv[target].nbytes
        for place, page in step.swap_ins:
            self._kv[page] = self._host[place]
        sampled = Sampled([])
        ends: dict[int, int] = {}
        for row in step.rows:
            if row.padding:
                self._kv[SCRATCH_PAGE, 0] = 0
                continue
            if row.slot.sampling.prompt_logprobs >= 0:
                sampled.prompt_logprobs += self._prompt(batch, row)
            state = self._write(batch, row.slot, row.start, row.count)
            if row.sample:
                self._sample(batch, row.slot, state, row.start + row.count, sampled)
                ends[row.slot.index] = state
        for row, slot in step.forks:
            self._sample(batch, slot, ends[row.slot.index], row.start + row.count, sampled)
        left = self._step_time.seconds(step.num_tokens) - (time.monotonic() - began)
        if left > 0:
            time.sleep(left)  # this is the model: the step takes as long as the device would
        return sampled

    def page_memory(self) -> HostPages:
        """See :class:`worker.transfer.pages.HasPages`."""
        return HostPages(Form.of(self.capacity, "simulated"), [self._kv.view(np.uint8)])

    def _sample(self, batch: Batch, slot: Slot, state: int, position: int, sampled: Sampled) -> None:
        vocab_size = self.capacity.vocab_size
        place = len(sampled.tokens)
        if slot.sampling.beam_width:
            wanted = candidates_wanted(slot.sampling, batch.eos_token_ids)
            sampled.candidates[place] = continuations(state, min(wanted, vocab_size), vocab_size)
            sampled.tokens.append(0)
            return
        token = pick(state, slot.sampling.seed, slot.prompt_index, slot.choice, position, vocab_size)
        if slot.generated < slot.sampling.min_tokens:
            banned = batch.eos_token_ids.union(slot.sampling.stop_token_ids)
            while token in banned and len(banned) < vocab_size:
                token = (token + 1) % vocab_size
        sampled.tokens.append(token)
        if slot.sampling.grammar:
            sampled.failures[place] = "a simulated worker has no tokenizer, so no grammars"
        if slot.sampling.logprobs >= 0:
            sampled.logprobs[place] = likelihood(state, token, slot.sampling.logprobs, vocab_size)
        if slot.sampling.want_score:
            sampled.log_probs[place] = score(state, token)

    def _prompt(self, batch: Batch, row: Row) -> list[tuple[Slot, int, list[TokenLogprob]]]:
        slot = row.slot
        wanted = slot.prompt_rows(row.start, row.count)
        described = []
        for position in range(row.start, row.start + wanted):
            state = self._write(batch, slot, position, 1)
            described.append(
                likelihood(state, slot.tokens[position + 1], slot.sampling.prompt_logprobs, self.capacity.vocab_size)
            )
        return [(slot, row.start + 1, described)] if described else []

    def _write(self, batch: Batch, slot: Slot, start: int, count: int) -> int:
        size = batch.block_size
        table = batch.tables[slot.index]
        state = first_state(slot.adapter)
        if start:
            state = int(self._kv[table[(start - 1) // size], (start - 1) % size])
        for position in range(start, start + count):
            state = chain(state, slot.tokens[position])
            self._kv[table[position // size], position % size] = state
        return state
