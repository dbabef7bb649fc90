"""Which attention kernel serves a model on this machine: what can, by rules; of that what is quickest, by a short
measurement at start. ``--attention-backend`` asks for one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from kernels.contract import AttentionKernel, DeviceKernel, Geometry, LayerAttention
from kernels.cpu import attention as cpu_attention
from kernels.cpu import library as cpu_library
from kernels.flash.attention import FlashAttention
from kernels.flash.libraries import GENERATIONS, Compute, Library, installed
from kernels.flash.parts import Use
from kernels.measure import Scene, Shape, Timer, device_timer, difference, medians
from kernels.reference import ReferenceAttention

log = logging.getLogger("headrace.kernels.choice")

BACKENDS = ("triton", "flash", "torch", "cpu")

MEASURING_S = 1.5
"""No round of measurements begins later. The first, which compiles what serving would have to, runs in any case."""

MARGIN = 0.97
"""Of the paged kernel's time: a library that gains less isn't worth a second kernel."""

SHAPES = {
    Use.FRESH: Shape(sequences=4, queries=512, keys=512),
    Use.ROWS: Shape(sequences=16, queries=1, keys=1024),
    Use.CHUNKS: Shape(sequences=2, queries=512, keys=1536),
}
"""What is measured: pages of more than a GPU's cache holds, for the usual models."""

MEASURED_BYTES = 256 << 20
"""Of pages that are measured on, at most (or one sequence)."""

TRIALS = {
    Use.FRESH: [Shape(1, 70, 70), Shape(2, 23, 23)],
    Use.ROWS: [Shape(2, 1, 75), Shape(1, 1, 9)],
    Use.CHUNKS: [Shape(1, 20, 81), Shape(2, 3, 12)],
}
"""What a library must answer as the paged kernel does, before it is believed: some are built without parts."""

TRIAL_WINDOW = 16
"""Of layers with a window, in trials: so that it hides something."""


class Refused(ValueError):
    """The kernel that was asked for can't serve this model here; the message is one line."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be served."""

    geometry: Geometry
    layers: Sequence[LayerAttention]
    dtype: torch.dtype
    storage: torch.dtype  # of what pages hold
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to serve it with."""

    device: str  # cpu or cuda
    compute: Compute = (0, 0)
    triton: str = ""  # version; empty: not installed
    flash: Mapping[int, str] = field(default_factory=dict)  # generation -> version
    no_library: str = ""  # why there are no C++ kernels; empty if there are


def this_machine(device: torch.device) -> Machine:
    if device.type == "cpu":
        return Machine("cpu", no_library=_no_library())
    compute = torch.cuda.get_device_capability(device)
    return Machine(device.type, compute, triton_version(), dict(installed()))


def _no_library() -> str:
    if cpu_library.load() is not None:
        return ""
    found = cpu_library.find()
    return found.reason if isinstance(found, cpu_library.Missing) else "it is turned off"


def triton_version() -> str:
    """Empty where it is not installed. It is not imported."""
    if importlib.util.find_spec("triton") is None:
        return ""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


# --- by rules --------------------------------------------------------------------------------------------------------


def refusal(backend: str, task: Task, machine: Machine) -> str:
    """Why a backend can't serve a task on a machine; empty if it can."""
    if backend == "cpu":
        if machine.device != "cpu":
            return "it runs on a CPU"
        if task.storage != task.dtype:
            return f"its pages hold what it computes in, not {_name(task.storage)}"
        return machine.no_library or cpu_attention.refusal(task.geometry, task.dtype, torch.device("cpu"))
    if backend == "torch":
        return "" if machine.device == "cpu" else "it plans on the host, and steps on a GPU do not wait for that"
    if machine.device == "cpu":
        return "it runs on a GPU"
    if backend == "triton":
        return _triton_refusal(task, machine)
    if task.batch_invariant:
        return "its bits depend on where a prompt is cut, and what it is batched with"
    if reason := _triton_refusal(task, machine):
        return f"beside it Triton has to serve, which can't: {reason}"
    if not machine.flash:
        return "flash-attn is not installed (pip install 'headrace[gpu]')"
    refused = {library.name: library_refusal(library, Use.FRESH, task) for library in libraries(machine)}
    return "" if not all(refused.values()) else "; ".join(f"{name}: {reason}" for name, reason in refused.items())


def _triton_refusal(task: Task, machine: Machine) -> str:
    if not machine.triton:
        return "triton is not installed"
    from kernels.triton.attention import refusal as triton_refusal  # imports triton

    return triton_refusal(task.geometry, task.dtype, task.storage, machine.compute)


def libraries(machine: Machine) -> list[Library]:
    """The installed generations of flash-attn, the one made for this card first."""
    made_for = 3 if machine.compute[0] == 9 else 4 if machine.compute[0] > 9 else 2
    order = sorted(machine.flash, key=lambda number: (number != made_for, number))
    return [GENERATIONS[number](machine.flash[number], machine.compute) for number in order]


def library_refusal(library: Library, use: Use, task: Task) -> str:
    """Why a library can't serve a use in all of the task's layers; empty if it can."""
    refused = [library.refusal(use, task.geometry, task.dtype, task.storage)]
    refused += [library.layer_refusal(layer) for layer in task.layers]
    return next(filter(None, refused), "")


# --- the choice ------------------------------------------------------------------------------------------------------


def choose(
    geometry: Geometry,
    layers: Sequence[LayerAttention],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    requested: str = "auto",
    batch_invariant: bool = False,
    measure: bool = True,
) -> AttentionKernel:
    """The kernel that serves. Raises :class:`Refused` if the one that was asked for, or every one, can't.

    ``kv_dtype``: of what pages hold. On a GPU it is a :class:`~kernels.contract.DeviceKernel`.
    """
    task = Task(geometry, layers, dtype, kv_dtype, batch_invariant)
    machine = this_machine(device)
    backend = _backend(task, machine, requested)
    kernel: AttentionKernel
    if backend == "cpu":
        kernel, why = cpu_attention.CpuAttention(_library(), geometry, dtype), ""
    elif backend == "torch":
        kernel, why = ReferenceAttention(geometry, dtype, device, kv_dtype), ""
    else:
        kernel, why = _on_a_gpu(task, machine, device, backend, requested, measure)
    if batch_invariant and not kernel.batch_invariant:
        raise Refused(f"batch-invariant: with the {kernel.name} kernel bits depend on the batch here")
    if batch_invariant:
        why = "batch-invariant" + (", as it always is on a CPU" if machine.device == "cpu" else "")
    if machine.device != "cpu" or requested != "auto" or why:
        log.info("attention by %s%s", kernel.name, f": {why}" if why else "")
    return kernel


def _backend(task: Task, machine: Machine, requested: str) -> str:
    if requested != "auto":
        if reason := refusal(requested, task, machine):
            raise Refused(f"attention-backend {requested}: {reason}")
        return requested
    wanted = ("cpu", "torch") if machine.device == "cpu" else ("triton",)
    refused = {backend: refusal(backend, task, machine) for backend in wanted}
    for backend, reason in refused.items():
        if not reason:
            return backend
    raise Refused("no attention kernel serves this model here: " + "; ".join(f"{b}: {r}" for b, r in refused.items()))


def _library() -> cpu_library.Library:
    found = cpu_library.load()
    assert found is not None
    return found


def _on_a_gpu(
    task: Task, machine: Machine, device: torch.device, backend: str, requested: str, measure: bool
) -> tuple[DeviceKernel, str]:
    """(the kernel, why)."""
    from kernels.triton.attention import TritonAttention

    paged = TritonAttention(
        task.geometry,
        task.dtype,
        device,
        storage=task.storage,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        batch_invariant=task.batch_invariant,
    )
    if requested == "triton" or not machine.flash or task.batch_invariant:
        return paged, ""
    kernel, why = beside(
        paged,
        task,
        device,
        libraries(machine),
        everything=backend == "flash",
        timer=device_timer(device) if measure else None,
    )
    torch.cuda.empty_cache()  # what was measured on; the rest of the start counts what is free
    return kernel, why


def beside(
    paged: DeviceKernel,
    task: Task,
    device: torch.device,
    candidates: Sequence[Library],
    *,
    everything: bool,
    timer: Timer | None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[DeviceKernel, str]:
    """(``paged`` with the libraries that serve a use right and quicker, why).

    ``everything``: whatever a library can serve, the first that can does, measured or not; Refused if there is nothing.
    ``timer`` None, or no memory to measure in: the first that can is believed to be quicker for fresh prompts alone.
    """
    start = clock()
    chosen: dict[Use, Library] = {}
    words = []
    for number, use in enumerate(Use, 1):
        refused, usable = _tried(paged, task, device, candidates, use)
        times: dict[str, float] = {}
        if usable and not everything and timer is not None:
            deadline = start + MEASURING_S * number / len(Use)
            try:
                times = _measured(paged, task, device, usable, use, timer, deadline, clock)
            except torch.OutOfMemoryError:
                refused["measured"] = "the device has no room for it"
        if usable and times:
            best = min(usable, key=lambda library: times[library.name])
            if times[best.name] < MARGIN * times[paged.name]:
                chosen[use] = best
        elif usable and (everything or use is Use.FRESH):
            chosen[use] = usable[0]
        words.append(_words(use, chosen[use].name if use in chosen else paged.name, times, refused))
    why = "; ".join(words)
    if not chosen and everything:
        raise Refused(f"attention-backend flash: {why}")
    return (FlashAttention(task.geometry, task.dtype, device, paged, chosen) if chosen else paged), why


def _words(use: Use, name: str, times: Mapping[str, float], refused: Mapping[str, str]) -> str:
    beside = [f"{other} {seconds * 1e3:.3f} ms" for other, seconds in sorted(times.items(), key=lambda one: one[1])]
    beside += [f"not {other}: {reason}" for other, reason in refused.items()]
    return f"{use.value} by {name}" + (f" ({', '.join(beside)})" if beside else "")


def usefulness(library: Library, block_size: int = 16) -> str:
    """What a library could be used for on its card with a usual model, in words."""
    usual = Geometry(32, 8, 128, block_size)
    refused = {use: library.refusal(use, usual, torch.bfloat16, torch.bfloat16) for use in Use}
    served = [use.value for use in Use if not refused[use]]
    return "; ".join([f"serves {', '.join(served)}"] * bool(served) + sorted(set(filter(None, refused.values()))))


def _tried(
    paged: DeviceKernel, task: Task, device: torch.device, candidates: Sequence[Library], use: Use
) -> tuple[dict[str, str], list[Library]]:
    """(who can't serve a use, and why; who can, and has answered as the paged kernel does)."""
    refused: dict[str, str] = {}
    usable = []
    for library in candidates:
        reason = library_refusal(library, use, task)
        if not reason:
            try:
                reason = _trial(paged, task, device, library, use)
            except Exception as error:  # noqa: BLE001  whatever a foreign library raises, it is not to be called
                reason = f"it fails: {_one_line(error)}"
        if reason:
            refused[library.name] = reason
        else:
            usable.append(library)
    return refused, usable


def _trial(paged: DeviceKernel, task: Task, device: torch.device, library: Library, use: Use) -> str:
    scene = Scene(paged, task.geometry, task.dtype, device, TRIALS[use])
    kernel = FlashAttention(task.geometry, task.dtype, device, paged, {use: library})
    for layer in _sorts(task.layers):
        narrow = layer if layer.window is None else replace(layer, window=min(layer.window, TRIAL_WINDOW))
        if reason := difference(paged, kernel, scene, narrow):
            return reason
    return ""


def _measured(
    paged: DeviceKernel,
    task: Task,
    device: torch.device,
    usable: Sequence[Library],
    use: Use,
    timer: Timer,
    deadline: float,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Seconds of each kernel's read in the commonest layer, by name."""
    shape = SHAPES[use]
    token_bytes = 2 * task.geometry.num_kv_heads * task.geometry.head_dim * task.storage.itemsize
    fitting = max(1, min(shape.sequences, MEASURED_BYTES // (token_bytes * shape.keys)))
    scene = Scene(paged, task.geometry, task.dtype, device, [replace(shape, sequences=fitting)])
    layer = next(iter(_sorts(task.layers)))
    kernels = {
        library.name: FlashAttention(task.geometry, task.dtype, device, paged, {use: library}) for library in usable
    }
    work = {name: scene.read(kernel, layer) for name, kernel in {paged.name: paged, **kernels}.items()}
    return medians(work, timer, deadline, clock)


def _sorts(layers: Iterable[LayerAttention]) -> list[LayerAttention]:
    """One layer of each sort, the commonest sort first."""
    sorts: dict[object, list[LayerAttention]] = {}
    for layer in layers:
        sorts.setdefault((layer.scaling, layer.window, layer.softcap, layer.sinks is None), []).append(layer)
    return [same[0] for same in sorted(sorts.values(), key=len, reverse=True)]


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
