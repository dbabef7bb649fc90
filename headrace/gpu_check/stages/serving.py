"""Continuous against static batching on the workload ``chat``: the scheduler's core and the runner in one process."""

from __future__ import annotations

from contextlib import closing

from headrace.gpu_check.one_process import OneProcess
from headrace.gpu_check.rig import Rig
from headrace.gpu_check.runners import Made, made
from headrace.gpu_check.serving_load import Load, figures, load_for
from scheduler.core.limits import Limits

POLICIES = ("continuous", "static")
RESERVE_S = 3.0


def run(rig: Rig) -> None:
    load = load_for(rig)
    rig.facts(load=load.as_dict())
    rig.progress(f"making weights of the {load.shape.name}")
    with made(rig, load.shape, max_model_len=load.longest) as model:
        for number, policy in enumerate(POLICIES):
            seconds = min(load.seconds, (rig.left_s - RESERVE_S) / (len(POLICIES) - number))
            if seconds <= 0:
                rig.more(f"{policy} batching")
                return
            rig.progress(f"{policy} batching, {seconds:.0f} s")
            _measure(rig, model, load.lasting(seconds), policy)


def _measure(rig: Rig, model: Made, load: Load, policy: str) -> None:
    limits = Limits(max_num_seqs=load.concurrency, max_num_batched_tokens=max(1024, load.concurrency))
    with closing(OneProcess(model.runner, limits, policy)) as serving:
        serving.serve(load.warm_up(), load.concurrency)
        serving.forget()
        taken, seconds = serving.serve(load.shots(), load.concurrency, lasting_s=load.seconds)
        seen = serving.seen
        row = figures(policy, taken, seen.new_tokens, seconds)
        row["busy_share"] = sum(seen.forward_us) / 1e6 / seconds
        note = f"{load.model}, closed loop of {load.concurrency}"
        rig.row(**row, note=note if policy == "continuous" else f"{note}; steps with padding run without graphs")
