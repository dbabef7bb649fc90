"""What a stage is given: the device, a timer, its time, and where to put what it finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.gpu_check.timing import EventTimer, HostTimer, Timer


class CannotRun(Exception):
    """Why a stage can't be asked for on this machine: it is skipped, which is no failure."""


class Rig:
    def __init__(
        self, request: dict[str, Any], say: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._say = say
        self._clock = clock
        self._deadline = clock() + float(request["seconds"])
        self.known: dict[str, dict[str, Any]] = request.get("known", {})  # facts of earlier stages
        self.rehearsal = bool(request.get("rehearsal"))
        self.nats = bool(request.get("nats"))
        self.device = torch.device("cpu") if self.rehearsal else torch.device("cuda", torch.cuda.current_device())
        self.timer: Timer = HostTimer(self.device) if self.rehearsal else EventTimer(self.device)
        self.cut = ""  # why it stopped before it was through

    # --- time ---------------------------------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        return self._deadline - self._clock()

    def more(self, left_out: str, needs_s: float = 0.0) -> bool:
        """Whether there is time for ``needs_s`` more; if not, ``left_out`` is what the stage says it lacks."""
        if self.left_s > needs_s:
            return True
        if not self.cut:
            self.cut = f"its time was up before {left_out}"
        return False

    # --- findings -----------------------------------------------------------------------------------------------------

    def row(self, **values: Any) -> None:
        """A number that is not finite is left out: JSON has none."""
        kept = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._say({"row": kept})

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self._say({"check": {"name": name, "passed": bool(passed), "detail": detail}})

    def facts(self, **values: Any) -> None:
        self._say({"facts": values})

    def progress(self, text: str) -> None:
        self._say({"progress": text})

    # --- the device ---------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """What kernels are checked in first: what is served in."""
        return torch.float32 if self.rehearsal else torch.bfloat16

    @property
    def served_dtype(self) -> torch.dtype:
        """Of models. Triton's interpreter is slow and knows no float64: a rehearsal's models run by kernels' twins."""
        return torch.float64 if self.rehearsal else torch.bfloat16

    @property
    def copy_bytes_s(self) -> float:
        """Measured by the stage ``limits``, else the card's nominal bandwidth, else 0: not known."""
        limits, environment = self.known.get("limits", {}), self.known.get("environment", {})
        return float(limits.get("copy_bytes_s") or environment.get("nominal_bytes_s") or 0.0)

    @property
    def gemm_flops(self) -> float:
        limits, environment = self.known.get("limits", {}), self.known.get("environment", {})
        return float(limits.get("gemm_flops") or environment.get("nominal_flops") or 0.0)

    def free_bytes(self) -> int:
        """Memory that is there to be had; what torch keeps for itself is given back first."""
        if self.rehearsal:
            return 64 << 20
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def total_bytes(self) -> int:
        return 64 << 20 if self.rehearsal else int(torch.cuda.mem_get_info(self.device)[1])

    def usable_after(self, error: BaseException) -> bool:
        """Whether this process may run another stage after ``error``."""
        if self.rehearsal or isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        try:
            self.timer.sync()
        except RuntimeError:
            return False
        return "CUDA error" not in str(error)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)
