"""Ceilings that the other figures are held against: memory, products, launches, and the way to the host and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.gpu_check.rig import Rig

COPY_BYTES = 1 << 30
GEMM_SIZE = 8192
LINK_BYTES = 256 << 20
LAUNCHES = 100


def run(rig: Rig) -> None:
    _copy(rig)
    _gemm(rig)
    _launches(rig)
    _link(rig)


def _copy(rig: Rig) -> None:
    """Bytes read plus bytes written over the time, as the field counts a copy."""
    size = 1 << 20 if rig.rehearsal else min(COPY_BYTES, rig.free_bytes() // 8 >> 20 << 20)
    source = torch.randint(-100, 100, (size,), dtype=torch.int8, device=rig.device).view(torch.float32)
    target = torch.empty_like(source)
    copied_s = rig.timer.seconds([lambda: target.copy_(source)], 2 * size)
    read_s = rig.timer.seconds([lambda: torch.amax(source)], size)
    nominal = float(rig.known.get("environment", {}).get("nominal_bytes_s", 0))
    rate = 2 * size / copied_s
    rig.facts(copy_bytes_s=rate, read_bytes_s=size / read_s)
    rig.row(what="copy on the device, read + written", value=rate / 1e9, unit="GB/s", **_nominal(rate, nominal))
    rig.row(what="read on the device (torch.amax)", value=size / read_s / 1e9, unit="GB/s",
            **_nominal(size / read_s, nominal))  # fmt: skip


def _gemm(rig: Rig) -> None:
    size = 64 if rig.rehearsal else GEMM_SIZE
    generator = rig.generator(1)
    a, b = (torch.randn((size, size), generator=generator, device=rig.device, dtype=rig.dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = rig.timer.seconds([lambda: torch.mm(a, b, out=out)], 3 * a.nbytes)
    rate = 2.0 * size**3 / seconds
    rig.facts(gemm_flops=rate)
    nominal = float(rig.known.get("environment", {}).get("nominal_flops", 0))
    name = str(rig.dtype).removeprefix("torch.")
    rig.row(what=f"product in {name}, {size}³, random", value=rate / 1e12, unit="TFLOP/s", **_nominal(rate, nominal))


def _launches(rig: Rig) -> None:
    one = torch.zeros(1, device=rig.device)
    host_us = rig.timer.host_seconds(lambda: one.add_(1)) * 1e6

    def many() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    device_us = rig.timer.seconds([many], 1 << 62) * 1e6 / LAUNCHES
    rig.facts(launch_host_us=host_us, launch_graph_us=device_us)
    rig.row(what="launch of a torch op, host's share", value=host_us, unit="µs")
    rig.row(what="tiny kernel within a CUDA graph", value=device_us, unit="µs")
    if not rig.rehearsal:
        graph_us = rig.timer.seconds([lambda: one.add_(1)], 1 << 62) * 1e6
        rig.facts(graph_of_one_us=graph_us)
        rig.row(what="graph of one tiny kernel, between two events", value=graph_us, unit="µs")


def _link(rig: Rig) -> None:
    """Pinned memory, as the runner's copies use it."""
    size = 1 << 16 if rig.rehearsal else LINK_BYTES
    host = torch.zeros(size, dtype=torch.int8, pin_memory=not rig.rehearsal)
    device = torch.zeros(size, dtype=torch.int8, device=rig.device)
    ways: dict[str, Callable[[], object]] = {
        "h2d": lambda: device.copy_(host, non_blocking=True),
        "d2h": lambda: host.copy_(device, non_blocking=True),
    }
    for name, copy in ways.items():
        rate = size / rig.timer.seconds([copy], 1 << 62)
        rig.facts(**{f"{name}_bytes_s": rate})
        way = "to the device" if name == "h2d" else "to the host"
        rig.row(what=f"pinned memory {way}", value=rate / 1e9, unit="GB/s")


def _nominal(rate: float, nominal: float) -> dict[str, float]:
    return {"nominal_share": rate / nominal} if nominal else {}
