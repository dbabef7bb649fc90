"""The runner of a real model that a worker's options ask for: one on a GPU, or one whose steps torch runs in turn."""

from __future__ import annotations

import importlib.util

from worker.config import WorkerConfig
from worker.model import device_of
from worker.runner import Runner


def load_model_runner(config: WorkerConfig) -> Runner:
    """Raises StartupError, one line, if it can't be had."""
    asynchronous = config.attention_backend != "torch" and importlib.util.find_spec("triton") is not None
    if device_of(config.device).type == "cuda" and asynchronous:
        from worker.device.load import load_device_runner

        return load_device_runner(config)
    from worker.torch_runner import load_torch_runner

    return load_torch_runner(config)
