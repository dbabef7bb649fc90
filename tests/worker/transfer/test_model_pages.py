"""Pages of real models: a sequence goes on at another worker with the tokens that it would have had."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from transfer_pair import End, content

from kernels.cpu.attention import CpuAttention
from kernels.reference import ReferenceAttention
from shared.messages import Sampling, SlotStart, StepPlan, pack_tokens
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.kv_cache import KVCache
from worker.torch_runner import TorchRunner, load_torch_runner

MakeModel = Callable[..., Path]

PROMPT = [(7 * i) % 60 + 2 for i in range(85)]
SAMPLING = Sampling(3, 40, ignore_eos=True)
KINDS = {
    "C++ float32": ({"dtype": "float32"}, CpuAttention),
    "C++ bfloat16": ({"dtype": "bfloat16"}, CpuAttention),
    "torch float32": ({"dtype": "float32", "attention_backend": "torch"}, ReferenceAttention),
    "torch int8": ({"dtype": "float32", "kv_cache_dtype": "int8"}, ReferenceAttention),
    "torch fp8": ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, ReferenceAttention),
}


class Runs:
    """A runner whose only sequence lies in slot 0."""

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        config = WorkerConfig(model=str(folder), device="cpu", block_size=16, kv_cache_memory="1MiB", **options)  # type: ignore[arg-type]
        self.runner: TorchRunner = load_torch_runner(config)
        capacity = self.runner.capacity
        self.batch = Batch(16, capacity.num_blocks, capacity.max_model_len, frozenset())
        self.steps = 0

    def start(self, tokens: list[int], pages: list[int], computed: int = 0) -> list[int]:
        start = SlotStart(
            0, "r", 1, 0, "g", pack_tokens(tokens), len(PROMPT), pages, SAMPLING, computed=computed
        )  # fmt: skip
        return self._run(starts=[start], chunks=[(0, len(tokens) - computed)])

    def decode(self, count: int) -> list[int]:
        return [token for _ in range(count) for token in self._run(decodes=[0])]

    def _run(self, **fields: object) -> list[int]:
        self.steps += 1
        step = self.batch.stage(StepPlan(1, "w", 1, self.steps, **fields))  # type: ignore[arg-type]
        return self.batch.settle(step, self.runner.forward(self.batch, step)).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_goes_on_elsewhere_with_the_same_tokens(kind: str, tiny_model: MakeModel) -> None:
    options, kernel = KINDS[kind]
    there, here = (Runs(tiny_model("llama"), options) for _ in range(2))
    if kernel is CpuAttention and not isinstance(there.runner.kernel, CpuAttention):
        pytest.skip("the C++ kernels are not built, or not for this type")
    assert isinstance(there.runner.kernel, kernel)
    source, target = (
        End(name, one.runner.page_memory(), by="tcp") for name, one in (("a", there), ("b", here))
    )  # fmt: skip
    assert source.memory is not None and target.memory is not None
    assert source.memory.page_bytes == 16 * there.runner.capacity.kv_bytes_per_token
    first = there.start(PROMPT, [3, 4, 5, 9, 8, 7, 20, 21])
    before = content(target.memory, range(target.memory.num_blocks + 1))
    target.fetch(source, [(3, 9), (4, 2), (5, 3), (9, 4), (8, 6), (7, 5)])
    assert target.answer().reason == ""
    assert content(target.memory, [9, 2, 3, 4, 6, 5]) == content(source.memory, [3, 4, 5, 9, 8, 7])
    rest = [page for page in range(len(before)) if page not in range(2, 10) or page in (7, 8)]
    assert content(target.memory, rest) == [before[page] for page in rest]
    went_on = here.start([*PROMPT, *first], [9, 2, 3, 4, 6, 5, 30, 31], computed=len(PROMPT))
    assert [*went_on, *here.decode(6)] == there.decode(7)
    source.close()
    target.close()


def test_workers_of_other_kinds_refuse_one_another(tiny_model: MakeModel) -> None:
    ends = {}
    for kind, (options, kernel) in KINDS.items():
        runner = Runs(tiny_model("llama"), options).runner
        if isinstance(runner.kernel, kernel):
            ends[kind] = End(kind, runner.page_memory())
    forms = {kind: end.memory.form for kind, end in ends.items() if end.memory is not None}
    for number, (one, other) in enumerate(product(ends, ends)):
        if forms[one] == forms[other]:
            assert one == other, "pages of the same form lie in different ways"
            continue
        ends[one].fetch(ends[other], [(1, 1)], number)
        assert ends[one].answer().reason.startswith("its KV blocks are of another form: ")
    for end in ends.values():
        end.close()


def test_pages_are_named_by_layer_once(tiny_model: MakeModel) -> None:
    """Two layers of one kind, and each piece of memory once though keys and values share it."""
    runner = Runs(tiny_model("llama"), {"dtype": "float32"}).runner
    memory = runner.page_memory()
    assert memory is not None and isinstance(runner.cache, KVCache)
    assert memory.form.layout.startswith("2 x float32 ")
    total = sum(x.numel() * x.element_size() for layer in runner.cache.layers for x in layer.tensors())
    assert sum(region.nbytes for region in memory.regions()) == total
