"""What makers say of their cards: what is measured stands beside it."""

from __future__ import annotations

from headrace.simulate.hardware import GIB, GPUS, Gpu

_OTHERS = (
    Gpu("a10", 125e12, 0.6e12, 22.5 * GIB, 24),
    Gpu("l4", 121e12, 0.3e12, 22.5 * GIB, 24),
    Gpu("l40s", 362e12, 0.864e12, 44.5 * GIB, 48),
)


def nominal(device_name: str, memory_bytes: int) -> Gpu | None:
    """The card that a driver calls ``device_name`` ("NVIDIA H100 80GB HBM3"); None where it is not in the table.

    Variants of a name with slower memory (PCIe, NVL) are not taken for the one that the table has.
    """
    words = device_name.lower().replace("-", " ").split()
    if any(word in words for word in ("pcie", "nvl", "mig")):
        return None
    for gpu in (*GPUS.values(), *_OTHERS):
        if gpu.name.split("-")[0] in words and 0.85 < gpu.memory / max(1, memory_bytes) < 1.15:
            return gpu
    return None
