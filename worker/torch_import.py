"""Importing what runs a real model: torch and ``transformers``, as this worker needs them."""

from __future__ import annotations

import os

from kernels.cpu import library as cpu_library
from observability.startup import start_up
from shared.lifecycle import StartupError
from shared.transformers_models import import_models


def import_torch(one_process: bool = True) -> None:
    """Import them; ``one_process`` leaves out what only several that run one model need. Raises StartupError."""
    try:
        cpu_library.find()
    except cpu_library.IsaError as error:
        raise StartupError(str(error)) from None
    # Threads of a parallel region spin for a short while only. On cores shared with gateway, NATS and scheduler the
    # default, to spin for long, makes a step many times slower whenever one thread is descheduled.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Merging a model's matrices frees pieces all over the memory that it was read to. Only in segments that grow and
    # shrink can a GPU's pages of keys and values have those.
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # the newer name, whose value would be lost
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch  # noqa: F401

    start_up.ended("torch")
    if one_process:
        from worker.lean_import import import_transformers

        import_transformers()
    else:
        import_models()
