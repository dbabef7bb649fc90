"""OpenVINO GenAI's ContinuousBatchingPipeline, stepped by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import openvino as ov
import openvino_genai as genai
from driving import Request, serve, stepped

CACHE_GB = 3
MAX_NUM_SEQS = 64


class Pipeline:
    def __init__(self, settings: dict[str, str]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = MAX_NUM_SEQS
        scheduler.max_num_batched_tokens = int(settings["budget_tokens"])
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        plugin = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        }
        self._pipeline = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", plugin, {})
        self._open: dict[int, genai.GenerationHandle] = {}
        self._added = 0

    def add(self, request: Request) -> None:
        config = genai.GenerationConfig(max_new_tokens=request.want, ignore_eos=True, do_sample=False)
        ids = ov.Tensor(np.array([request.prompt], dtype=np.int64))
        self._added += 1
        self._open[request.number] = self._pipeline.add_request(self._added, ids, config)

    def step(self) -> Iterable[tuple[int, int, bool]]:
        self._pipeline.step()
        for number, handle in list(self._open.items()):
            new_tokens = 0
            while handle.can_read():
                new_tokens += sum(len(output.generated_ids) for output in handle.read().values())
            over = handle.get_status() != genai.GenerationStatus.RUNNING
            if over:
                del self._open[number]
            if new_tokens or over:
                yield number, new_tokens, over


if __name__ == "__main__":
    serve(stepped(Pipeline))
