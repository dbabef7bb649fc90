"""A real model behind the :class:`~worker.runner.Runner` seam: ragged forward passes over paged KV, then sampling."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import AttentionKernel, Geometry, RaggedBatch
from kernels.cpu import library as cpu_library
from kernels.cpu.attention import CpuAttention, refusal
from kernels.cpu.decoder import CpuDecoder
from kernels.elementwise import aligned_rows
from kernels.reference import ReferenceAttention
from observability.startup import start_up
from shared.beams import candidates_wanted
from shared.config import size_bytes
from shared.grammar import GrammarError
from shared.messages import Capacity, TokenLogprob
from shared.model_name import model_name
from worker.attention import PagedPass, answering
from worker.batch import SCRATCH_PAGE, Batch, Row, Sampled, Slot, Step
from worker.config import WorkerConfig
from worker.grammar import Grammars, Guide, load_engine_tokenizer
from worker.heap import give_back
from worker.kv_cache import KVCache, PoolSize, budget_bytes, bytes_per_token, pool_size
from worker.linear import MIN_ROWS
from worker.logprobs import describe, describe_prompt, log_probabilities
from worker.model import LoadedModel, device_of, load_model
from worker.processors import Shape, asks_for_counts, bias_of
from worker.sampling import SampleRow, sample
from worker.self_check import rows_keep_their_bits
from worker.token_counts import TokenCounts

log = logging.getLogger("headrace.worker.torch_runner")

DEFAULT_KV_CACHE_MEMORY = 1 << 30

PROMPT_PIECE = 256
"""Log-probabilities of a prompt's tokens in one entry: at 20 alternatives each some 80 kB."""


class TorchRunner:
    """Implements :class:`~worker.runner.Runner`. Not thread-safe; torch's thread count is the process's."""

    def __init__(
        self, model: LoadedModel, kernel: AttentionKernel, size: PoolSize, served_name: str, grammars: Grammars,
        swap_space: int = 0,
    ) -> None:  # fmt: skip
        self.model = model
        self.grammars = grammars
        self.kernel = kernel
        self.size = size
        host_blocks = swap_space // (size.bytes_per_token * size.block_size)
        self.cache = KVCache(kernel, len(model.layers), size.num_blocks, host_blocks)
        self.decoder = self._decoder()
        self._sampling_s = 0.0
        self.kv_bytes_copied = 0
        self.swap_us = 0
        self.capacity = Capacity(
            model=served_name,
            max_model_len=size.max_model_len,
            block_size=size.block_size,
            num_blocks=size.num_blocks,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            kv_bytes_per_token=size.bytes_per_token,
            host_blocks=host_blocks,
        )

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        block_size: int = 16,
        kv_cache_memory: int = DEFAULT_KV_CACHE_MEMORY,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        num_blocks: int | None = None,
        served_model_name: str | None = None,
        num_threads: int | None = None,
        swap_space: int = 0,
        quantize: str = "none",
        self_check: bool = True,
    ) -> TorchRunner:
        """Load a model and its KV cache. Raises StartupError, one line, if that can't be.

        ``kv_cache_memory`` (bytes) counts on a CPU, ``gpu_memory_utilization`` on a GPU; ``num_blocks`` overrides both.
        ``num_threads`` None leaves torch's own choice.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        library = cpu_library.load() if device_of(device).type == "cpu" else None
        if library is not None:
            library.c.headrace_set_threads(torch.get_num_threads())
        loaded = load_model(os.fspath(model), dtype, device, library, block_size, quantize)
        start_up.ended("packing and trial pass")
        geometry = Geometry(loaded.num_heads, loaded.num_kv_heads, loaded.head_dim, block_size)
        size = pool_size(
            budget_bytes(loaded.device, kv_cache_memory, gpu_memory_utilization),
            bytes_per_token(len(loaded.layers), geometry, loaded.dtype),
            block_size,
            loaded.max_positions,
            max_model_len,
            num_blocks,
        )
        kernel: AttentionKernel
        if library is None or refusal(geometry, loaded.dtype, loaded.device):
            kernel = ReferenceAttention(geometry, loaded.dtype, loaded.device)
        else:
            kernel = CpuAttention(library, geometry, loaded.dtype)
        folder = os.fspath(model)
        grammars = Grammars(lambda: load_engine_tokenizer(folder, loaded.vocab_size, loaded.eos_token_ids))
        runner = cls(loaded, kernel, size, served_model_name or folder, grammars, swap_space)
        start_up.ended("KV cache")
        log.info("%s", loaded.describe(kernel.name, torch.get_num_threads()))
        log.info("%s", size.describe())
        if self_check and loaded.dtype != torch.float64 and not rows_keep_their_bits(runner):
            log.warning("on this machine a row's bits depend on the rows beside it: tokens may differ between runs")
        give_back()
        start_up.ended("self-check")
        return runner

    def _decoder(self) -> CpuDecoder | None:
        """Where the C++ library knows the model's shape: a whole pass in one call."""
        native = self.model.native
        if native is None or not isinstance(self.kernel, CpuAttention):
            return None
        rotations = native.rotations(self.size.max_model_len)
        return CpuDecoder(
            self.kernel.library, native.weights, self.kernel.geometry, self.model.layers, self.cache.layers, *rotations
        )

    def forward(self, batch: Batch, step: Step) -> Sampled:
        """See :meth:`worker.runner.Runner.forward`."""
        began = time.perf_counter_ns()
        self.cache.swap_out(step.swap_outs)
        self.swap_us = (time.perf_counter_ns() - began) // 1000
        self.kv_bytes_copied += self.cache.copy(step.copies)
        began = time.perf_counter_ns()
        self.cache.swap_in(step.swap_ins)
        self.swap_us += (time.perf_counter_ns() - began) // 1000
        if not step.rows:
            return Sampled([])
        self._begin_guides(step)
        rows = [row for row in step.rows if row.sample]
        prompts = _prompt_rows(step.rows)
        logits = self.logits(batch, step.rows, prompts)
        sampled = Sampled([])
        if prompts:
            sampled.prompt_logprobs = _describe_prompts(logits[len(rows) :], prompts)
            logits = logits[: len(rows)]
        if rows:
            began = time.perf_counter_ns()
            self._sample(logits, rows, step.forks, sampled)
            self._sampling_s += (time.perf_counter_ns() - began) / 1e9
        return sampled

    def phase_times(self) -> dict[str, float] | None:
        """Seconds of each phase of the passes since this was last asked; None where transformers' modules run."""
        if self.decoder is None:
            return None
        times = {**self.decoder.stage_seconds(), "sample": self._sampling_s}
        self._sampling_s = 0.0
        return times

    def _sample(
        self, logits: torch.Tensor, rows: Sequence[Row], forks: Sequence[tuple[Row, Slot]], sampled: Sampled
    ) -> None:
        """Fill ``sampled`` from the logits of ``rows``, then of ``forks``."""
        slots = [row.slot for row in rows] + [slot for _, slot in forks]
        positions = [row.start + row.count for row in rows] + [row.start + row.count for row, _ in forks]
        if forks:
            place = {id(row): index for index, row in enumerate(rows)}
            more = torch.tensor([place[id(row)] for row, _ in forks], device=logits.device)
            logits = torch.cat([logits, logits.index_select(0, more)])
        # What speaks of the model is taken before the sampler changes the logits.
        asking = [index for index, slot in enumerate(slots) if slot.sampling.logprobs >= 0]
        if asking:
            log_probs = log_probabilities(logits if len(asking) == len(slots) else logits[asking])
        scores = self._scores(logits, slots, sampled)
        wanted = [
            SampleRow(slot.sampling, slot.prompt_index, slot.choice, position, self._shape(slot, index, sampled))
            for index, (slot, position) in enumerate(zip(slots, positions, strict=True))
        ]
        sampled.tokens = sample(logits, wanted)
        for index, score in scores.items():
            sampled.log_probs[index] = float(score[sampled.tokens[index]])
        if asking:
            tokens = [sampled.tokens[index] for index in asking]
            described = describe(log_probs, tokens, [slots[index].sampling.logprobs for index in asking])
            sampled.logprobs = dict(zip(asking, described, strict=True))

    def _scores(self, logits: torch.Tensor, slots: Sequence[Slot], sampled: Sampled) -> dict[int, torch.Tensor]:
        """The few rows that are ranked: candidates of beams, and log-probabilities of choices that want a score."""
        scores = {}
        for index, slot in enumerate(slots):
            if slot.sampling.beam_width:
                count = min(candidates_wanted(slot.sampling, self.model.eos_token_ids), self.model.vocab_size)
                log_probs = torch.log_softmax(logits[index].double(), dim=-1)
                banned = self._banned(slot)
                if banned:
                    log_probs[list(banned)] = -math.inf
                best = log_probs.topk(count)
                finite = best.values > -math.inf
                sampled.candidates[index] = (best.indices[finite].tolist(), best.values[finite].tolist())
            elif slot.sampling.want_score:
                scores[index] = torch.log_softmax(logits[index].double(), dim=-1)
        return scores

    def _shape(self, slot: Slot, index: int, sampled: Sampled) -> Shape | None:
        """What changes the slot's logits; None for most. A grammar that fails goes into ``sampled.failures``."""
        sampling = slot.sampling
        banned = self._banned(slot)
        allowed = None
        if isinstance(slot.guide, Guide):
            try:
                allowed = slot.guide.mask()
            except GrammarError as error:
                sampled.failures[index] = str(error)
        if asks_for_counts(sampling):
            if slot.counts is None:
                slot.counts = TokenCounts(slot.prompt_len, with_prompt=sampling.repetition_penalty != 1)
            slot.counts.follow(slot.tokens)
        if sampling.logit_bias and slot.bias is None:
            slot.bias = bias_of(sampling, self.model.vocab_size)
        if slot.counts is None and slot.bias is None and allowed is None and not banned:
            return None
        return Shape(sampling, banned, slot.counts, allowed, slot.bias)

    def _begin_guides(self, step: Step) -> None:
        """Have the grammars of sequences that have just joined compiled beside the forward pass."""
        for slot in [row.slot for row in step.rows] + [slot for _, slot in step.forks]:
            if slot.sampling.grammar and slot.guide is None and not slot.sampling.beam_width:
                self.grammars.begin_step()
                slot.guide = self.grammars.guide(slot.sampling.grammar, slot.tokens[slot.prompt_len :])

    def logits(self, batch: Batch, rows: Sequence[Row], prompts: Sequence[tuple[int, Row, int]] = ()) -> torch.Tensor:
        """One forward pass; the logits ``[sampling rows, vocab_size]``, in row order.

        Then those of the leading query tokens that ``prompts`` names: (index in ``rows``, row, how many).
        """
        fillers = 0
        if self.decoder is None:
            count = sum(row.count for row in rows)
            fillers = aligned_rows(count, MIN_ROWS, self.model.row_widths, torch.get_num_threads()) - count
        tokens, positions, ragged = _assemble(batch, rows, fillers, self.size)
        keep = ragged.query_start[1 : len(rows) + 1][[row.sample for row in rows]] - 1
        if prompts:
            starts = ragged.query_start
            keep = np.concatenate([keep, *(starts[index] + np.arange(wanted) for index, _, wanted in prompts)])
        if self.decoder is not None:
            return self.decoder.forward(tokens, positions, ragged, keep)
        return self._run(tokens, positions, ragged, keep)

    def _run(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        ragged: RaggedBatch,
        keep: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        model = self.model
        count = len(keep)
        token_ids = torch.from_numpy(tokens).to(model.device)
        position_ids = torch.from_numpy(positions).to(model.device)
        with torch.inference_mode():
            calls = PagedPass(self.kernel, self.kernel.plan(ragged), model.layers, self.cache.layers)
            with answering(calls):
                if not count:
                    model.hidden(token_ids, position_ids)
                    return torch.empty((0, model.vocab_size), dtype=model.dtype, device=model.device)
                widths = [model.vocab_size] if model.logits_capped else []
                filled = aligned_rows(count, MIN_ROWS, widths, torch.get_num_threads())
                wanted = np.concatenate([keep, np.repeat(keep[-1:], filled - count)])
                return model.logits(token_ids, position_ids, torch.from_numpy(wanted).to(model.device))[:count]

    def _banned(self, slot: Slot) -> tuple[int, ...]:
        """Tokens that would end the sequence before it has its min_tokens (its grammar, if it ignores EOS)."""
        if slot.generated >= slot.sampling.min_tokens:
            return tuple(self.model.eos_token_ids) if slot.sampling.ignore_eos and slot.sampling.grammar else ()
        ends = () if slot.sampling.ignore_eos and not slot.sampling.grammar else self.model.eos_token_ids
        return tuple(t for t in {*ends, *slot.sampling.stop_token_ids} if 0 <= t < self.model.vocab_size)


def load_torch_runner(config: WorkerConfig) -> TorchRunner:
    """The runner that a worker's options ask for. Raises StartupError, one line, if it can't be had."""
    runner = TorchRunner.load(
        config.model,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        kv_cache_memory=size_bytes(config.kv_cache_memory),
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_model_len=config.max_model_len,
        served_model_name=model_name(config.model, config.served_model_name),
        num_threads=config.threads or None,
        swap_space=size_bytes(config.swap_space),
        quantize=config.quantize,
    )
    runner.grammars.warm()
    if runner.decoder is not None:
        torch.set_num_threads(1)  # the library has threads of its own, and what torch still does is not worth a second
    return runner


def _prompt_rows(rows: Sequence[Row]) -> list[tuple[int, Row, int]]:
    """(index in ``rows``, row, leading query tokens) whose logits are wanted for the prompt's log-probabilities."""
    asking = [
        (index, row, row.slot.prompt_rows(row.start, row.count))
        for index, row in enumerate(rows)
        if row.slot.sampling.prompt_logprobs >= 0 and not row.padding
    ]
    return [one for one in asking if one[2]]


def _describe_prompts(
    logits: torch.Tensor, prompts: Sequence[tuple[int, Row, int]]
) -> list[tuple[Slot, int, list[TokenLogprob]]]:
    """The pieces for gateways, each small enough for a message."""
    pieces = []
    done = 0
    for _, row, wanted in prompts:
        slot = row.slot
        for first in range(0, wanted, PROMPT_PIECE):
            count = min(PROMPT_PIECE, wanted - first)
            offset = row.start + first + 1
            described = describe_prompt(
                logits[done : done + count], slot.tokens[offset : offset + count], slot.sampling.prompt_logprobs
            )
            pieces.append((slot, offset, described))
            done += count
    return pieces


def _assemble(
    batch: Batch, rows: Sequence[Row], fillers: int, size: PoolSize
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], RaggedBatch]:
    """(token ids, positions, what attention needs) of ``rows`` and of ``fillers``.

    A filler is a sequence of its own: one token at position 0, with its KV in the scratch page.
    """
    count = np.array([row.count for row in rows], dtype=np.int64)
    query_start = np.concatenate([[0], np.cumsum(np.concatenate([count, np.ones(fillers, dtype=np.int64)]))])
    num_tokens = int(query_start[-1])
    tokens = np.zeros(num_tokens, dtype=np.int64)
    for row, start in zip(rows, query_start.tolist(), strict=False):
        if row.padding:
            continue
        if row.count == 1:
            tokens[start] = row.slot.tokens[row.start]
        else:
            tokens[start : start + row.count] = row.slot.tokens[row.start : row.start + row.count]
    sequence = np.repeat(np.arange(len(count) + fillers), np.diff(query_start))
    first = np.array([row.start for row in rows] + [0] * fillers, dtype=np.int64)
    padding = np.array([row.padding for row in rows] + [True] * fillers)
    positions = first[sequence] + np.arange(num_tokens) - query_start[sequence]
    is_padding = padding[sequence]
    visible = np.where(is_padding, np.maximum(first, 1)[sequence], positions + 1)
    used = -(-int(visible.max()) // size.block_size)
    tables = np.zeros((len(count) + fillers, used), dtype=np.int32)
    tables[: len(count)] = batch.tables[[row.slot.index for row in rows], :used]
    page = tables[sequence, np.minimum(positions // size.block_size, used - 1)].astype(np.int64)
    write_slots = np.where(is_padding, SCRATCH_PAGE, page * size.block_size + positions % size.block_size)
    # padding may stand for tokens past the longest sequence; a learned position embedding has no row for those
    positions = np.minimum(positions, size.max_model_len - 1)
    return tokens, positions, RaggedBatch(query_start, visible, tables, write_slots)
