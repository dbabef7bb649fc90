"""``generate`` of ``transformers`` on static batches: first come, first served, padded on the left.

A user whose answer is complete sends the next request at once, which then waits for the end of the batch that its
neighbours keep going. A batch runs to the length of its longest answer; tokens past an answer's own length are not
counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import torch
from driving import Record, Request, Run, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

PAD = 0


class Batch(BaseStreamer):
    """Told of the prompt once, then of one new token of every row a step."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        now = time.perf_counter()
        for record in self._records:
            if len(record.tokens) < record.want:
                record.tokens.append(now)
                record.ended = now

    def end(self) -> None: ...


def perform(model: torch.nn.Module, run: Run) -> list[Record]:
    waiting: Iterator[Request] = iter(run.requests)
    queue: deque[tuple[Request, Record]] = deque()
    over: list[Record] = []
    began = time.perf_counter()
    until = run.open_until(began)

    def send(at: float) -> None:
        request = next(waiting, None) if at < until else None
        if request is not None:
            queue.append((request, Record(request.want, at)))

    for _ in range(run.concurrency):
        send(began)
    while queue:
        batch = [queue.popleft() for _ in range(min(len(queue), run.concurrency))]
        records = [record for _, record in batch]
        generate(model, [request for request, _ in batch], Batch(records))
        over += records
        for record in sorted(records, key=lambda record: record.ended):
            send(record.ended)
        run.done(len(over))
    return over


def generate(model: torch.nn.Module, requests: list[Request], streamer: Batch) -> None:
    longest = max(len(request.prompt) for request in requests)
    padding = [longest - len(request.prompt) for request in requests]
    ids = torch.tensor([[PAD] * pad + request.prompt for pad, request in zip(padding, requests, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    tokens = max(request.want for request in requests)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=PAD)
    model.generate(ids, attention_mask=mask, generation_config=greedy, streamer=streamer)  # type: ignore[operator]


def start(settings: dict[str, str]):  # type: ignore[no-untyped-def]
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # generate takes it from here where its own config has none
    return lambda run: perform(model, run)


if __name__ == "__main__":
    serve(start)
