"""A real model behind the :class:`~worker.runner.Runner` seam: ragged forward passes over paged KV, then sampling."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import AttentionKernel, Geometry, RaggedBatch
from kernels.cpu import library as cpu_library
from kernels.cpu.attention import CpuAttention
from kernels.cpu.decoder import CpuDecoder
from kernels.elementwise import aligned_rows
from observability.startup import start_up
from shared.beams import candidates_wanted
from shared.config import size_bytes
from shared.lifecycle import StartupError
from shared.messages import Capacity, TokenLogprob
from shared.model_name import model_name
from worker.asking import banned_tokens, begin_guides, prompt_rows, shape_of
from worker.assembly import assemble
from worker.attention import PagedPass, answering
from worker.attention_backend import attention_kernel
from worker.batch import Batch, Row, Sampled, Slot, Step
from worker.config import WorkerConfig
from worker.grammar import Grammars, load_engine_tokenizer
from worker.heap import give_back
from worker.kv_cache import (
    KVCache,
    PoolSize,
    budget_bytes,
    bytes_per_token,
    page_bytes_of,
    page_layout,
    pool_size_of_all,
    storage_dtype,
)
from worker.linear import MIN_ROWS
from worker.logprobs import describe, describe_prompt, log_probabilities
from worker.lora import AdapterRows, running
from worker.lora_names import parse_adapters
from worker.model import LoadedModel, device_of, load_model
from worker.processors import Shape
from worker.sampling import SampleRow, sample
from worker.self_check import rows_keep_their_bits
from worker.transfer.pages import Form, HostPages
from worker.two_passes import PromptRows, joined, part_of

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
            kv_dtype=self.cache.rounded_to(model.dtype),
            kv_bytes_per_token=size.bytes_per_token,
            host_blocks=host_blocks,
            adapters=list(model.adapters),
            weights=model.weights,
            adapter_weights=list(model.adapter_weights),
        )
        self._adapters = frozenset(model.adapters)
        self.module_threads = 0  # of passes module by module, where the rest of torch's work has fewer; 0: as all of it

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
        kv_cache_dtype: str = "auto",
        attention_backend: str = "auto",
        batch_invariant: bool = False,
        self_check: bool = True,
        adapters: Mapping[str, str] | None = None,
    ) -> TorchRunner:
        """Load a model and its KV cache. Raises StartupError, one line, if that can't be.

        ``kv_cache_memory`` (bytes) counts on a CPU, ``gpu_memory_utilization`` on a GPU; ``num_blocks`` overrides both.
        ``num_threads`` None leaves torch's own choice. ``adapters``: folders of LoRA adapters by name.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        on_cpu = device_of(device).type == "cpu" and attention_backend in ("auto", "cpu")
        library = cpu_library.load() if on_cpu and kv_cache_dtype == "auto" else None
        if library is not None:
            library.c.headrace_set_threads(torch.get_num_threads())
        loaded = load_model(os.fspath(model), dtype, device, library, block_size, quantize, adapters)
        start_up.ended("packing and trial pass")
        geometry = Geometry(loaded.num_heads, loaded.num_kv_heads, loaded.head_dim, block_size)
        storage = storage_dtype(kv_cache_dtype, loaded.dtype)
        size = pool_size_of_all(
            budget_bytes(loaded.device, kv_cache_memory, gpu_memory_utilization),
            bytes_per_token(len(loaded.layers), geometry, storage),
            block_size,
            loaded.max_positions,
            max_model_len,
            num_blocks,
        )
        kernel = attention_kernel(
            geometry, loaded.layers, loaded.dtype, loaded.device, attention_backend, batch_invariant, storage
        )
        folder = os.fspath(model)
        grammars = Grammars(lambda: load_engine_tokenizer(folder, loaded.vocab_size, loaded.eos_token_ids))
        runner = cls(loaded, kernel, size, served_model_name or folder, grammars, swap_space)
        start_up.ended("KV cache")
        log.info("%s", loaded.describe(kernel.name, torch.get_num_threads()))
        log.info("%s", size.describe())
        if self_check and loaded.dtype != torch.float64 and not rows_keep_their_bits(runner, loaded.adapters):
            why = "on this machine a row's bits depend on the rows beside it"
            if batch_invariant:
                raise StartupError(f"batch-invariant: {why}")
            log.warning("%s: tokens may differ between runs", why)
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
        begin_guides(step, self.grammars)
        rows = [row for row in step.rows if row.sample]
        prompts = prompt_rows(step.rows)
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

    def page_memory(self) -> HostPages | None:
        """See :class:`worker.transfer.pages.HasPages`."""
        layers = self.cache.layers
        if self.model.device.type != "cpu":
            return None
        return HostPages(Form.of(self.capacity, page_layout(layers)), page_bytes_of(layers))

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
        return shape_of(slot, self._banned(slot), self.model.vocab_size, sampled.failures, index)

    def _banned(self, slot: Slot) -> tuple[int, ...]:
        return banned_tokens(slot.sampling, slot.generated, self.model.eos_token_ids, self.model.vocab_size)

    def logits(self, batch: Batch, rows: Sequence[Row], prompts: Sequence[PromptRows] = ()) -> torch.Tensor:
        """One forward pass; the logits ``[sampling rows, vocab_size]``, in row order.

        Then those of the leading query tokens that ``prompts`` names: (index in ``rows``, row, how many).
        """
        if self.decoder is None:
            return self._by_modules(batch, rows, prompts)
        tuned = [bool(row.slot.adapter) for row in rows]
        if not any(tuned):
            return self._by_decoder(self.decoder, batch, rows, prompts)
        if all(tuned):
            return self._by_modules(batch, rows, prompts)
        plain, with_adapters = (part_of(rows, prompts, [one == which for one in tuned]) for which in (False, True))
        return joined(
            (plain, self._by_decoder(self.decoder, batch, plain.rows, plain.prompts)),
            (with_adapters, self._by_modules(batch, with_adapters.rows, with_adapters.prompts)),
        )

    def _by_decoder(
        self, decoder: CpuDecoder, batch: Batch, rows: Sequence[Row], prompts: Sequence[PromptRows]
    ) -> torch.Tensor:
        tokens, positions, ragged = assemble(batch, rows, 0, self.size.max_model_len)
        return decoder.forward(tokens, positions, ragged, _kept(ragged, rows, prompts))

    def _by_modules(self, batch: Batch, rows: Sequence[Row], prompts: Sequence[PromptRows]) -> torch.Tensor:
        count = sum(row.count for row in rows)
        with _torch_threads(self.module_threads):
            fillers = aligned_rows(count, MIN_ROWS, self.model.row_widths, torch.get_num_threads()) - count
            tokens, positions, ragged = assemble(batch, rows, fillers, self.size.max_model_len)
            with running(AdapterRows.of(rows, count + fillers, self._adapters, self.model.device)):
                return self._run(tokens, positions, ragged, _kept(ragged, rows, prompts))

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
        kv_cache_dtype=config.kv_cache_dtype,
        attention_backend=config.attention_backend,
        batch_invariant=config.batch_invariant,
        adapters=parse_adapters(config.lora),
    )
    runner.grammars.warm()
    if runner.decoder is not None:
        runner.module_threads = torch.get_num_threads()  # rows with adapters need a whole pass of torch's
        torch.set_num_threads(1)  # the library has threads of its own, and what torch still does is not worth a second
    return runner


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Compute with so many threads; 0: with those that there are."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


def _kept(ragged: RaggedBatch, rows: Sequence[Row], prompts: Sequence[PromptRows]) -> npt.NDArray[np.int64]:
    """The tokens whose logits are wanted: those that are sampled from, then those of prompts."""
    starts = ragged.query_start
    keep = starts[1 : len(rows) + 1][[row.sample for row in rows]] - 1
    if prompts:
        keep = np.concatenate([keep, *(starts[index] + np.arange(wanted) for index, _, wanted in prompts)])
    return keep


def _describe_prompts(
    logits: torch.Tensor, prompts: Sequence[PromptRows]
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
