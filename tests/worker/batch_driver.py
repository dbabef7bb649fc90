"""Drives a runner through Batch and StepPlan as a scheduler would, with the test in charge of every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import Sampling, SlotStart, StepPlan, TokenEntry, TokenLogprob, pack_tokens
from worker.batch import Batch
from worker.torch_runner import TorchRunner


@dataclass(eq=False)
class Sequence:
    slot: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)  # generated
    ended: str = ""
    to_run: int = 0  # tokens whose KV is not computed yet
    length: int = 0
    pages: list[int] = field(default_factory=list)


class BatchDriver:
    """Hands out slots and pages (lowest free first), plans steps as told, and keeps each sequence's tokens."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        capacity = runner.capacity
        self.batch = Batch(capacity.block_size, capacity.num_blocks, capacity.max_model_len,
                           frozenset(capacity.eos_token_ids))  # fmt: skip
        self.free = list(range(1, capacity.num_blocks + 1))
        self.live: dict[int, Sequence] = {}
        self.steps = 0
        self.entries: list[TokenEntry] = []
        self.logprobs: dict[int, list[TokenLogprob]] = {}  # by slot
        self.prompt_logprobs: dict[int, dict[int, TokenLogprob]] = {}  # by slot and index in the prompt
        self._starts: list[SlotStart] = []
        self._drops: list[int] = []

    def start(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        generated: list[int] | None = None,
        prompt_index: int = 0,
        choice: int = 0,
        adapter: str = "",
    ) -> Sequence:
        """A sequence joins at the next step; with ``generated`` it resumes after those tokens."""
        slot = next(number for number in range(len(self.live) + 1) if number not in self.live)
        tokens = prompt + (generated or [])
        sequence = Sequence(slot, prompt, list(generated or []), to_run=len(tokens), length=len(tokens))
        self.live[slot] = sequence
        self._starts.append(
            SlotStart(slot, f"request-{slot}", 0, choice, "gateway", pack_tokens(tokens), len(prompt), [], sampling,
                      prompt_index, adapter=adapter)
        )  # fmt: skip
        return sequence

    def drop(self, sequence: Sequence) -> None:
        """A sequence leaves before it has ended."""
        self._drops.append(sequence.slot)
        self._leave(sequence)

    def step(self, run: dict[int, int], *, copies: list[tuple[int, int]] | None = None,
             padding: list[tuple[int, int]] | None = None) -> None:  # fmt: skip
        """One forward pass: ``run[slot]`` tokens of each named slot."""
        self.steps += 1
        pages = []
        for slot, count in run.items():
            sequence = self.live[slot]
            needed = -(-(sequence.length - sequence.to_run + count) // self.runner.capacity.block_size)
            new = [self.free.pop(0) for _ in range(needed - len(sequence.pages))]
            if new:
                pages.append((slot, new))
                sequence.pages += new
        decodes = [slot for slot, count in run.items() if count == 1 and self.live[slot].tokens]
        chunks = [(slot, count) for slot, count in run.items() if slot not in decodes]
        plan = StepPlan(0, "worker", 0, self.steps, drops=self._drops, starts=self._starts, pages=pages,
                        decodes=decodes, chunks=chunks, copies=copies or [], padding=padding or [])  # fmt: skip
        self._starts, self._drops = [], []
        step = self.batch.stage(plan)
        settled = self.batch.settle(step, self.runner.forward(self.batch, step))
        results, ended = settled.tokens, settled.ended
        for owner, entry in settled.entries:
            self._keep(owner.index, entry)
        for slot, count in run.items():
            self.live[slot].to_run -= count
        samplers = [slot for slot in [*decodes, *(slot for slot, _ in chunks)] if self.live[slot].to_run == 0]
        for slot, token in zip(samplers, results, strict=True):
            sequence = self.live[slot]
            sequence.tokens.append(token)
            sequence.length += 1
            sequence.to_run += 1
        for slot, reason in ended:
            self.live[slot].ended = reason
            self._leave(self.live[slot])

    def run_to_end(self, chunk: int = 512) -> None:
        """Step all live sequences until none is left."""
        while self.live:
            self.step({slot: min(sequence.to_run, chunk) for slot, sequence in self.live.items()})

    def _keep(self, slot: int, entry: TokenEntry) -> None:
        self.entries.append(entry)
        if entry.logprobs:
            self.logprobs.setdefault(slot, []).extend(entry.logprobs)
        for index, one in enumerate(entry.prompt_logprobs, entry.prompt_offset):
            known = self.prompt_logprobs.setdefault(slot, {})
            assert index not in known, f"the prompt's token {index} twice"
            known[index] = one

    def _leave(self, sequence: Sequence) -> None:
        self.free = sorted(self.free + sequence.pages)
        del self.live[sequence.slot]
