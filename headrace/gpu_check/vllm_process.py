"""``python -m headrace.gpu_check.vllm_process REQUEST``: vLLM's engine in the closed loop that ours is measured in."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from headrace.bench.taken import Taken
from headrace.bench.workload import Shot
from headrace.gpu_check.serving_load import Load, figures


def main(argv: list[str]) -> int:
    request = json.loads(argv[0])
    deadline_s = time.monotonic() + float(request["seconds"])
    load = Load.from_dict(request["load"])
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=request["model"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=load.longest, max_num_seqs=load.concurrency, gpu_memory_utilization=request["memory_share"],
        enable_prefix_caching=False, disable_log_stats=True,
    ).llm_engine  # fmt: skip
    serve(engine, vllm.SamplingParams, load.warm_up(), load.concurrency, deadline_s)
    until_s = min(deadline_s, time.monotonic() + load.seconds)
    taken, tokens, seconds = serve(engine, vllm.SamplingParams, load.shots(), load.concurrency, until_s)
    print(json.dumps(figures(f"vLLM {vllm.__version__}", taken, tokens, seconds)), flush=True)
    return 0


def serve(
    engine: Any, sampling: Any, shots: Iterator[Shot], concurrency: int, until_s: float
) -> tuple[list[Taken], int, float]:
    """Keep ``concurrency`` requests open until the shots are through or ``until_s`` (time.monotonic) has come.

    (What the requests that ended took, tokens of all, seconds.) Then what is open is given up.
    """
    began = time.perf_counter()
    running: dict[str, Taken] = {}
    ended: list[Taken] = []
    tokens = 0

    def submit() -> None:
        shot = next(shots, None)
        if shot is None:
            return
        name = f"{began}-{len(running) + len(ended)}-{tokens}"
        now_s = time.perf_counter()
        asked = sampling(temperature=0.0, max_tokens=shot.max_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": shot.prompt}, asked)
        running[name] = Taken(shot.max_tokens, now_s, sent_s=now_s, status=200)

    for _ in range(concurrency):
        submit()
    while running and time.monotonic() < until_s:
        for output in engine.step():
            now_s = time.perf_counter()
            taken = running.get(output.request_id)
            if taken is None:
                continue
            new = len(output.outputs[0].token_ids) - taken.completion_tokens
            taken.text_s += [now_s] * new
            taken.completion_tokens += new
            tokens += new
            if output.finished:
                ended.append(running.pop(output.request_id))
                submit()
    seconds = time.perf_counter() - began
    if running:
        engine.abort_request(list(running))
    return ended, tokens, seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
