"""The continuous batching of ``transformers``, through its manager."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from driving import Request, serve, stepped
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE_TOKENS = 16
CACHE_TOKENS = 64 * 1024
BUDGET_TOKENS = 512
MAX_NUM_SEQS = 64


class Manager:
    def __init__(self, settings: dict[str, str]) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        # Sized by hand: it sizes itself by the memory of a GPU.
        batching = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=CACHE_TOKENS // PAGE_TOKENS,
            max_batch_tokens=BUDGET_TOKENS,
            max_requests_per_batch=MAX_NUM_SEQS,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(greedy, batching)
        self._manager.start()
        self._seen: dict[str, int] = {}

    def add(self, request: Request) -> None:
        name = str(request.number)
        self._seen[name] = 0
        self._manager.add_request(
            request.prompt, request_id=name, max_new_tokens=request.want, streaming=True, eos_token_id=-1
        )

    def step(self) -> Iterable[tuple[int, int, bool]]:
        """What has come meanwhile: its own thread steps."""
        timeout: float | None = 1.0
        while (output := self._manager.get_result(timeout=timeout)) is not None:
            timeout = 0.0  # wait for the first only
            if output.error:
                raise RuntimeError(output.error)
            new_tokens = len(output.generated_tokens) - self._seen[output.request_id]
            self._seen[output.request_id] += new_tokens
            yield int(output.request_id), new_tokens, output.is_finished()
        if not self._manager.is_running():
            raise RuntimeError("the generation thread has ended")


if __name__ == "__main__":
    serve(stepped(Manager))
    os._exit(0)  # the manager's thread would keep the process alive
