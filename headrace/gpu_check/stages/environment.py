"""The card, the driver and the packages: what the figures are figures of."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys

import torch

from headrace.gpu_check.cards import nominal
from headrace.gpu_check.rig import Rig

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-4", "torchao", "vllm", "numpy")

QUERIES = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "most_sm_clock": "clocks.max.sm",
    "most_memory_clock": "clocks.max.mem",
    "power_limit": "power.limit",
    "temperature_c": "temperature.gpu",
    "utilization_before": "utilization.gpu",
}
"""What nvidia-smi is asked for."""


def run(rig: Rig) -> None:
    versions = {name: found for name in PACKAGES if (found := _version(name))}
    rig.facts(python=platform.python_version(), platform=platform.platform(), packages=versions)
    if rig.rehearsal:
        rig.facts(card="none (rehearsal on the CPU)")
        return
    properties = torch.cuda.get_device_properties(rig.device)
    free, total = torch.cuda.mem_get_info(rig.device)
    rig.facts(
        card=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=total,
        free_bytes=free,
        multiprocessors=properties.multi_processor_count,
        l2_bytes=rig.timer.l2_bytes,
        cards=torch.cuda.device_count(),
        cuda=torch.version.cuda,
        **_nvidia_smi(f"GPU-{properties.uuid}"),  # by number it may be another: see CUDA_VISIBLE_DEVICES
    )
    known = nominal(properties.name, total)
    if known is not None:
        rig.facts(nominal_bytes_s=known.bandwidth, nominal_flops=known.flops)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nvidia_smi(card: str) -> dict[str, str]:
    """What is read off the card before anything runs; empty where there is no nvidia-smi. Nothing is set."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader", f"--id={card}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return {name: value for name, value in zip(QUERIES, values, strict=False) if not value.startswith("[")}
