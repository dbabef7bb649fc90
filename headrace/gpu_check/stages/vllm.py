"""vLLM on the same shape with random weights and the same workload, in a process of its own, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.gpu_check.rig import CannotRun, Rig
from headrace.gpu_check.serving_load import Load, load_for

START_S = 20.0
"""Less than that is not worth a start."""

END_S = 5.0
NOTE_CHARACTERS = 200


def run(rig: Rig) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise CannotRun("vLLM is not installed")
    if rig.rehearsal:
        raise CannotRun("vLLM has no rehearsal")
    if rig.left_s < START_S:
        raise CannotRun(f"{rig.left_s:.0f} s are too few to start it")
    load = load_for(rig)
    with tempfile.TemporaryDirectory() as folder:
        config = load.shape.config()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        _run(rig, load, Path(folder))


def _run(rig: Rig, load: Load, folder: Path) -> None:
    """Its output is its own affair; the last line on its stdout that is JSON has the figures."""
    request = {
        "model": str(folder),
        "load": load.as_dict(),
        "seconds": rig.left_s - END_S,
        "memory_share": round(0.9 * rig.free_bytes() / rig.total_bytes(), 3),
    }
    environ = {name: value for name, value in os.environ.items() if name != "PYTORCH_CUDA_ALLOC_CONF"}
    command = [sys.executable, "-m", "headrace.gpu_check.vllm_process", json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, rig.left_s), env=environ)
    except subprocess.TimeoutExpired:
        rig.cut = "vLLM was not through in time"
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"policy"')]
    if done.returncode or not lines:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no word")
        rig.row(policy="vLLM", note=f"failed ({done.returncode}): {last.strip()[:NOTE_CHARACTERS]}")
        return
    rig.row(**json.loads(lines[-1]))
