"""Which attention kernel serves: by rules over a described machine, then by trial and time, with neither a GPU nor
flash-attn here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_flash import FakeFlash3
from torch_pages import TorchPages

from kernels import choice
from kernels.choice import Machine, Refused, Task, beside, choose, refusal
from kernels.contract import Geometry, LayerAttention
from kernels.cpu import library as cpu_library
from kernels.flash import libraries
from kernels.flash.attention import FlashAttention
from kernels.flash.libraries import FlashAttn2, FlashAttn3, FlashAttn4, Library
from kernels.flash.parts import Use
from kernels.measure import ROUNDS, medians
from kernels.reference import ReferenceAttention

CPU = torch.device("cpu")
BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
LLAMA = Geometry(32, 8, 128, 16)
FULL = [LayerAttention(0.1)]
GEMMA = [LayerAttention(0.1, softcap=50.0), LayerAttention(0.1, window=4096, softcap=50.0)]
GPT_OSS = [LayerAttention(0.1, window=128, sinks=torch.zeros(32)), LayerAttention(0.1, sinks=torch.zeros(32))]

A100 = Machine("cuda", (8, 0), "3.6", {2: "2.8.3"})
H200 = Machine("cuda", (9, 0), "3.6", {2: "2.8.3", 3: "3.0", 4: "4.0"})
B200 = Machine("cuda", (10, 0), "3.6", {4: "4.0"})
RTX = Machine("cuda", (12, 0), "3.6", {4: "4.0"})
T4 = Machine("cuda", (7, 5), "3.6", {2: "2.8.3"})
BARE = Machine("cuda", (9, 0))
NO_FLASH = Machine("cuda", (9, 0), "3.6")
HERE = Machine("cpu")
NO_CPP = Machine("cpu", no_library="it is not built")


def task(
    geometry: Geometry = LLAMA,
    layers: list[LayerAttention] = FULL,
    dtype: torch.dtype = BF16,
    storage: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Task:
    return Task(geometry, layers, dtype, storage or dtype, batch_invariant)


RULES = [
    ("cpu", task(), HERE, ""),
    ("cpu", task(), H200, "runs on a CPU"),
    ("cpu", task(), NO_CPP, "it is not built"),
    ("cpu", task(Geometry(4, 4, 20, 16)), HERE, "multiple of 16"),
    ("torch", task(), HERE, ""),
    ("torch", task(batch_invariant=True), HERE, ""),
    ("torch", task(storage=INT8), HERE, ""),
    ("torch", task(), H200, "plans on the host"),
    ("cpu", task(storage=INT8), HERE, "not int8"),
    ("triton", task(), A100, ""),
    ("triton", task(dtype=F32), A100, ""),
    ("triton", task(batch_invariant=True), H200, ""),
    ("triton", task(layers=GPT_OSS, storage=INT8), A100, ""),
    ("triton", task(storage=torch.float8_e4m3fn), A100, "from compute capability 8.9"),
    ("triton", task(), HERE, "runs on a GPU"),
    ("triton", task(), BARE, "triton is not installed"),
    ("triton", task(Geometry(4, 4, 20, 16)), H200, "multiple of 16"),
    ("flash", task(), A100, ""),
    ("flash", task(layers=GEMMA), A100, ""),
    ("flash", task(storage=INT8), H200, ""),
    ("flash", task(), HERE, "runs on a GPU"),
    ("flash", task(), BARE, "triton is not installed"),
    ("flash", task(), NO_FLASH, "not installed"),
    ("flash", task(), T4, "flash-attn 2.8.3: it needs compute capability 8.0"),
    ("flash", task(dtype=F32), A100, "not in float32"),
    ("flash", task(layers=GPT_OSS), A100, "flash-attn 2.8.3: it knows no attention sinks"),
    ("flash", task(layers=GPT_OSS), H200, ""),
    ("flash", task(layers=GPT_OSS), RTX, "no attention sinks on compute capability 8.x and 12.x"),
    ("flash", task(Geometry(4, 4, 192, 16)), B200, "no heads of 192"),
    ("flash", task(Geometry(4, 4, 256, 16)), B200, ""),
    ("flash", task(Geometry(4, 4, 256, 16)), RTX, "no heads of 256"),
    ("flash", task(batch_invariant=True), H200, "where a prompt is cut"),
]


@pytest.mark.parametrize(("backend", "what", "machine", "reason"), RULES)
def test_rules(backend: str, what: Task, machine: Machine, reason: str) -> None:
    found = refusal(backend, what, machine)
    assert reason in found
    assert bool(reason) == bool(found)


PAGING = [
    (FlashAttn2("2", (8, 0)), 16, BF16, "multiple of 256 tokens, not 16"),
    (FlashAttn2("2", (9, 0)), 256, BF16, ""),
    (FlashAttn2("2", (9, 0)), 512, BF16, ""),
    (FlashAttn2("2", (9, 0)), 256, INT8, "no pages in int8"),
    (FlashAttn3("3", (9, 0)), 16, BF16, ""),
    (FlashAttn3("3", (9, 0)), 7, BF16, ""),
    (FlashAttn3("3", (8, 0)), 16, BF16, "compute capability 9.0"),
    (FlashAttn3("3", (10, 0)), 16, BF16, "compute capability 9.0"),
    (FlashAttn4("4", (9, 0)), 16, BF16, ""),
    (FlashAttn4("4", (10, 3)), 16, BF16, ""),
    (FlashAttn4("4", (8, 9)), 16, BF16, "no pages on compute capability 8.x"),
    (FlashAttn4("4", (12, 0)), 16, BF16, "no pages on compute capability 8.x and 12.x"),
    (FlashAttn4("4", (7, 5)), 16, BF16, "needs compute capability"),
]


@pytest.mark.parametrize(("library", "block_size", "storage", "reason"), PAGING)
def test_which_pages_a_library_reads(library: Library, block_size: int, storage: torch.dtype, reason: str) -> None:
    for use in (Use.ROWS, Use.CHUNKS):
        found = library.refusal(use, Geometry(8, 2, 128, block_size), BF16, storage)
        assert reason in found
        assert bool(reason) == bool(found)
    if "pages" in reason:
        assert not library.refusal(Use.FRESH, Geometry(8, 2, 128, block_size), BF16, storage)


def test_the_generation_made_for_the_card_comes_first() -> None:
    assert [type(one) for one in choice.libraries(H200)] == [FlashAttn3, FlashAttn2, FlashAttn4]
    assert [type(one) for one in choice.libraries(A100)] == [FlashAttn2]
    both = Machine("cuda", (10, 0), "3.6", {2: "2.8.3", 4: "4.0"})
    assert [one.name for one in choice.libraries(both)] == ["flash-attn 4.0", "flash-attn 2.8.3"]


def test_installed_generations_are_told_apart_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"flash-attn": "2.8.3", "flash-attn-4": "4.0.0b36"}
    monkeypatch.setattr(libraries, "_version", lambda name: there.get(name, ""))
    modules = {"flash_attn_2_cuda"}
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: name if name in modules else None)
    assert list(libraries.installed()) == [(2, "2.8.3"), (4, "4.0.0b36")]
    modules.add("flash_attn_interface")  # built from source, under whatever name
    assert list(libraries.installed()) == [(2, "2.8.3"), (3, "3"), (4, "4.0.0b36")]
    modules.remove("flash_attn_2_cuda")  # the distribution without its extension
    assert list(libraries.installed()) == [(3, "3"), (4, "4.0.0b36")]


SMALL = Geometry(4, 2, 16, 16)


class Times:
    """A timer that runs nothing, and takes turns as the measurement does: so many seconds for each kernel."""

    def __init__(self, **seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.calls = 0

    def __call__(self, launch: Callable[[], object]) -> float:
        self.calls += 1
        cells: Any = launch.__closure__  # type: ignore[attr-defined]
        kernel = next(cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "plan_device"))
        if not isinstance(kernel, FlashAttention):
            return 1.0
        ((use, library),) = kernel.libraries.items()
        return self.seconds[library.name][use.name]


def flash3(version: str = "3", **more: Any) -> FlashAttn3:
    return FlashAttn3(version, (9, 0), FakeFlash3(**more))


def compose(*candidates: Library, layers: list[LayerAttention] = FULL, **more: Any) -> tuple[dict[str, str], str]:
    """(use -> library, why)."""
    paged = TorchPages(SMALL, BF16)
    more = {"everything": False, "timer": None, "clock": lambda: 0.0, **more}
    kernel, why = beside(paged, task(SMALL, layers), CPU, candidates, **more)
    if kernel is paged:
        return {}, why
    assert isinstance(kernel, FlashAttention)
    return {use.name: library.name for use, library in kernel.libraries.items()}, why


def test_each_use_goes_to_the_quickest() -> None:
    timer = Times(
        **{
            "flash-attn 3a": {"FRESH": 0.5, "ROWS": 0.99, "CHUNKS": 2.0},
            "flash-attn 3b": {"FRESH": 0.6, "ROWS": 2.0, "CHUNKS": 0.9},
        }
    )
    chosen, why = compose(flash3("3a"), flash3("3b"), timer=timer)
    assert chosen == {"FRESH": "flash-attn 3a", "CHUNKS": "flash-attn 3b"}  # decode gains less than the margin
    assert why == (
        "fresh prompts by flash-attn 3a (flash-attn 3a 500.000 ms, flash-attn 3b 600.000 ms, paged 1000.000 ms); "
        "decode by paged (flash-attn 3a 990.000 ms, paged 1000.000 ms, flash-attn 3b 2000.000 ms); "
        "chunks by flash-attn 3b (flash-attn 3b 900.000 ms, paged 1000.000 ms, flash-attn 3a 2000.000 ms)"
    )


def test_a_library_that_gains_nothing_leaves_the_paged_kernel_alone() -> None:
    chosen, why = compose(flash3(), timer=Times(**{"flash-attn 3": dict.fromkeys(("FRESH", "ROWS", "CHUNKS"), 1.0)}))
    assert not chosen
    assert "decode by paged" in why


def test_what_was_asked_for_serves_all_that_it_can_unmeasured() -> None:
    timer = Times()
    assert compose(flash3(), everything=True, timer=timer)[0] == dict.fromkeys(
        ("FRESH", "ROWS", "CHUNKS"), "flash-attn 3"
    )
    assert not timer.calls


def test_unmeasured_only_fresh_prompts_leave_the_paged_kernel() -> None:
    assert compose(flash3())[0] == {"FRESH": "flash-attn 3"}


def test_a_library_built_without_pages_is_found_out() -> None:
    chosen, why = compose(flash3(paging=False), everything=True)
    assert chosen == {"FRESH": "flash-attn 3"}
    assert "not flash-attn 3: it fails: RuntimeError: This flash attention build does not support paged KV" in why


class Wrong(FakeFlash3):
    """Forgets the window."""

    def flash_attn_varlen_func(self, *given: Any, **named: Any) -> Any:
        return super().flash_attn_varlen_func(*given, **{**named, "window_size": (-1, -1)})


def test_a_library_with_wrong_answers_is_found_out() -> None:
    windowed = [LayerAttention(0.3), LayerAttention(0.3, window=4096)]
    wrong = FlashAttn3("3", (9, 0), Wrong())
    chosen, why = compose(wrong, flash3("3b"), layers=windowed, everything=True)
    assert chosen == {"FRESH": "flash-attn 3b", "ROWS": "flash-attn 3", "CHUNKS": "flash-attn 3"}
    assert "not flash-attn 3: its answers differ by" in why
    assert compose(wrong, layers=[LayerAttention(0.3)], everything=True)[0]["FRESH"] == "flash-attn 3"


def test_what_cannot_be_imported_is_not_called() -> None:
    absent = FlashAttn3("3", (9, 0))
    chosen, why = compose(absent)
    assert not chosen
    assert "it fails: ModuleNotFoundError" in why
    with pytest.raises(Refused, match=r"^attention-backend flash: .*ModuleNotFoundError"):
        compose(absent, everything=True)


def test_without_memory_to_measure_in_there_is_a_choice_all_the_same() -> None:
    def timer(launch: Callable[[], object]) -> float:
        raise torch.OutOfMemoryError

    chosen, why = compose(flash3(), timer=timer)
    assert chosen == {"FRESH": "flash-attn 3"}
    assert "decode by paged (not measured: the device has no room for it)" in why


def test_what_a_library_is_of_use_for_is_told_in_words() -> None:
    assert choice.usefulness(FlashAttn3("3", (9, 0))) == "serves fresh prompts, decode, chunks"
    assert choice.usefulness(FlashAttn2("2", (9, 0))) == (
        "serves fresh prompts; its pages hold a multiple of 256 tokens, not 16"
    )
    assert choice.usefulness(FlashAttn2("2", (9, 0)), 256) == "serves fresh prompts, decode, chunks"
    assert choice.usefulness(FlashAttn2("2", (7, 5))) == "it needs compute capability 8.0"


def test_time_is_bounded_and_medians_are_taken_in_turns() -> None:
    order: list[str] = []
    passed = [0.0]
    samples = {"a": iter([9, 3, 1, 2, 9, 9, 9, 9]), "b": iter([9, 1, 1, 1, 1, 1, 1, 1])}

    def timer(launch: Callable[[], object]) -> float:
        name = str(launch())
        order.append(name)
        passed[0] += 1
        return float(next(samples[name]))

    work = {"a": lambda: "a", "b": lambda: "b"}
    assert medians(work, timer, 7.0, lambda: passed[0]) == {"a": 2.0, "b": 1.0}
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b"]  # each first once in vain; no round from the 7th on
    order.clear()
    samples = {name: iter([1] * 99) for name in "ab"}
    medians(work, timer, 1e9, lambda: passed[0])
    assert len(order) == 2 * (ROUNDS + 1)
    order.clear()
    medians(work, timer, 0.0, lambda: passed[0])
    assert order == ["a", "a", "b", "b"]


def test_a_slow_measurement_stops_at_its_deadline() -> None:
    now = [0.0]

    class Slow(Times):
        def __call__(self, launch: Callable[[], object]) -> float:
            now[0] += 1.0
            return super().__call__(launch)

    timer = Slow(**{"flash-attn 3": {"FRESH": 0.5, "ROWS": 0.5, "CHUNKS": 0.5}})
    compose(flash3(), timer=timer, clock=lambda: now[0])
    assert timer.calls == 3 * 4  # of each use one round, with a launch before it


# --- on this machine -------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_library_serves_what_it_can(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.kernels.choice")
    kernel = choose(SMALL, FULL, F32, F32, CPU)
    assert kernel.name.startswith("cpu" if isinstance(cpu_library.find(), cpu_library.Library) else "torch")
    odd = choose(Geometry(4, 2, 20, 16), FULL, F32, F32, CPU)
    assert isinstance(odd, ReferenceAttention)
    assert not caplog.records
    assert isinstance(choose(SMALL, FULL, F32, F32, CPU, requested="torch"), ReferenceAttention)
    assert caplog.messages == ["attention by torch"]


def test_batch_invariance_holds_on_a_cpu_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.kernels.choice")
    kernel = choose(SMALL, FULL, F32, F32, CPU, batch_invariant=True)
    assert kernel.batch_invariant
    assert caplog.messages == [f"attention by {kernel.name}: batch-invariant, as it always is on a CPU"]
    with pytest.raises(Refused, match="batch-invariant: with the torch kernel"):
        choose(SMALL, FULL, torch.float64, torch.float64, CPU, batch_invariant=True)


@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_what_a_cpu_cannot_run_is_refused(backend: str) -> None:
    with pytest.raises(Refused, match=f"attention-backend {backend}: it runs on a GPU"):
        choose(SMALL, FULL, F32, F32, CPU, requested=backend)


def test_where_nothing_serves_there_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "this_machine", lambda device: BARE)
    with pytest.raises(Refused, match=r"^no attention kernel serves this model here: triton: triton is not installed$"):
        choose(SMALL, FULL, F32, F32, CPU)
