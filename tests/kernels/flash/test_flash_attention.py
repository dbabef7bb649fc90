"""flash-attn beside a paged kernel: what goes to which call, that outputs come back in order, and that the calls are
ones that the libraries take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fake_flash import FakeFlash3
from flash_steps import CPU, MIXED, Asked, Step, library
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract import DeviceBatch, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.device_batch import on_device
from kernels.flash.attention import FlashAttention
from kernels.flash.libraries import FlashAttn3
from kernels.flash.parts import Use

LAYERS = {
    "full": LayerAttention(0.3),
    "window": LayerAttention(0.3, window=7),
    "window of one": LayerAttention(0.3, window=1),
    "softcap": LayerAttention(0.3, softcap=4.0),
    "window and softcap": LayerAttention(0.3, window=11, softcap=4.0),
    "sinks": LayerAttention(0.3, sinks=torch.linspace(-1, 3, 6)),
}

CALLS = {
    2: {Use.FRESH: "varlen", Use.ROWS: "kvcache", Use.CHUNKS: "varlen paged"},
    3: {Use.FRESH: "varlen", Use.ROWS: "kvcache", Use.CHUNKS: "kvcache varlen"},
    4: {Use.FRESH: "varlen", Use.ROWS: "rows paged", Use.CHUNKS: "varlen paged"},
}


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_each_part_of_a_mixed_step_goes_to_its_call(generation: int, name: str) -> None:
    step = Step(MIXED, Geometry(6, 2, 16, 256 if generation == 2 else 16))
    flash, fake = library(generation)
    step.check(step.kernel(flash), LAYERS[name])
    if flash.layer_refusal(LAYERS[name]):
        assert not fake.calls
        assert step.paged.tokens == step.batch.num_tokens
        return
    assert fake.tokens == {CALLS[generation][use]: step.rows_of(use) for use in Use}
    assert set(fake.calls.values()) == {1}
    assert step.paged.tokens == 3  # rows of padding


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("use", Use)
def test_what_a_library_is_not_given_stays_with_the_paged_kernel(generation: int, use: Use) -> None:
    step = Step(MIXED, Geometry(6, 2, 16, 256 if generation == 2 else 4), torch.float16)
    flash, fake = library(generation)
    step.check(step.kernel(flash, [use]), LAYERS["full"])
    assert fake.tokens == {CALLS[generation][use]: step.rows_of(use)}
    assert step.paged.tokens == step.batch.num_tokens - step.rows_of(use)


ONE = st.builds(
    lambda rows, before, padding: Asked(rows, max(1, before + rows), padding),
    st.sampled_from([0, 1, 1, 1, 2, 5, 17]),
    st.sampled_from([0, 0, 1, 3, 16, 30]),
    st.sampled_from([False, False, False, True]),
)


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(ONE, min_size=1, max_size=7).filter(lambda found: any(one.rows for one in found)),
    generation=st.sampled_from([3, 4]),
    uses=st.sets(st.sampled_from(list(Use)), min_size=1),
    shape=st.sampled_from([(6, 2, 16, 16), (4, 4, 8, 3), (8, 1, 24, 1), (3, 3, 64, 7)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    layer=st.sampled_from([layer for name, layer in LAYERS.items() if name != "sinks"]),
    seed=st.integers(0, 1000),
)
def test_any_step_is_answered_as_by_the_paged_kernel(
    asked: list[Asked],
    generation: int,
    uses: set[Use],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    layer: LayerAttention,
    seed: int,
) -> None:
    step = Step(asked, Geometry(*shape), dtype, seed=seed)
    flash, fake = library(generation)
    step.check(step.kernel(flash, sorted(uses, key=list(Use).index)), layer)
    expected = {CALLS[generation][use]: rows for use in uses if (rows := step.rows_of(use))}
    assert fake.tokens == expected
    assert step.paged.tokens == step.batch.num_tokens - sum(expected.values())


def test_a_prompt_that_writes_elsewhere_is_not_fresh() -> None:
    """Its keys could not be found by its write slots."""
    step = Step([Asked(6, 6), Asked(1, 9)])
    step.batch.write_slots[:6] = 0
    flash, fake = library(3)
    step.check(step.kernel(flash), LAYERS["full"])
    assert fake.tokens == {"kvcache": 1}
    assert step.paged.tokens == 6


@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn])
def test_fresh_prompts_are_read_from_quantised_pages_as_later_steps_read_them(storage: torch.dtype) -> None:
    step = Step(MIXED, storage=storage)
    flash, fake = library(3)
    step.check(step.kernel(flash, [Use.FRESH]), LAYERS["full"])
    assert fake.tokens == {"varlen": 53}


def test_what_lies_side_by_side_is_neither_gathered_nor_copied_back() -> None:
    seen: list[torch.Tensor] = []

    class Watched(FakeFlash3):
        def flash_attn_varlen_func(self, q: torch.Tensor, *more: Any, **named: Any) -> Any:
            seen.append(q)
            return super().flash_attn_varlen_func(q, *more, **named)

        def flash_attn_with_kvcache(self, q: torch.Tensor, *more: Any, **named: Any) -> Any:
            seen.append(q)
            return super().flash_attn_with_kvcache(q, *more, **named)

    flash = FlashAttn3("3", (9, 0), Watched())
    step = Step([Asked(1, 40), Asked(1, 3), Asked(9, 40), Asked(20, 20), Asked(7, 7)])
    step.check(step.kernel(flash), LAYERS["full"])
    assert [q.data_ptr() - step.query.data_ptr() for q in seen] == [
        row * step.query.stride(0) * step.query.element_size() for row in (11, 0, 2)
    ]
    apart = Step([Asked(9, 9), Asked(1, 3), Asked(7, 7)])
    seen.clear()
    apart.check(apart.kernel(flash, [Use.FRESH]), LAYERS["full"])
    assert seen[0].untyped_storage().data_ptr() != apart.query.untyped_storage().data_ptr()


def test_queries_may_be_a_slice_of_wider_rows() -> None:
    """As they come from a product for queries, keys and values together."""
    step = Step(MIXED)
    wide = torch.cat([step.query, torch.full_like(step.query, torch.nan)], 1)
    step.query = wide[:, : step.geometry.num_heads]
    flash, _ = library(3)
    step.check(step.kernel(flash), LAYERS["window"])


def captured(batch: RaggedBatch, rows: int, junk: int) -> DeviceBatch:
    """As a graph knows a batch: padded to ``rows`` with junk, and nothing of it on the host."""
    known = on_device(batch, CPU)
    more = rows - batch.num_tokens
    return dataclasses.replace(
        known,
        visible=torch.cat([known.visible, torch.full((more,), junk, dtype=torch.int32)]),
        write_slots=torch.cat([known.write_slots, torch.full((more,), junk, dtype=torch.int64)]),
        host=None,
    )


@pytest.mark.parametrize("generation", [2, 3, 4])
def test_a_captured_decode_needs_nothing_of_the_host(generation: int) -> None:
    """Sequences without queries lie anywhere, with junk for a table, and behind the last query is junk."""
    asked = [Asked(1, 40), Asked(0, 3), Asked(1, 17), Asked(1, 1), Asked(0, 9)]
    step = Step(asked, Geometry(6, 2, 16, 256 if generation == 2 else 16))
    step.batch.block_tables[[1, 4]] = 2**31 - 1
    flash, fake = library(generation)
    kernel = step.kernel(flash)
    batch = captured(step.batch, 5, 2**31 - 1)
    plan = kernel.plan_device(batch)
    more = torch.randn((2, *step.query.shape[1:])).to(step.query.dtype)
    kernel.write(plan, step.cache, torch.cat([step.key, more[:, :2]]), torch.cat([step.value, more[:, :2]]))
    out = kernel.read(plan, step.cache, torch.cat([step.query, more]), LAYERS["window"])
    assert out.shape[0] == 5
    assert step.paged.tokens == 0
    assert fake.tokens == {CALLS[generation][Use.ROWS]: 5}
    torch.testing.assert_close(out[:3].float(), step.wanted(LAYERS["window"]).float(), rtol=0, atol=2e-2)


def test_a_captured_step_of_several_rows_is_the_paged_kernels() -> None:
    step = Step([Asked(3, 9), Asked(1, 17)])
    flash, fake = library(3)
    kernel = step.kernel(flash)
    plan = kernel.plan_device(captured(step.batch, 4, 1))
    kernel.read(plan, step.cache, step.query, LAYERS["full"])
    assert not fake.calls
    assert step.paged.tokens == 4


class Blind:
    """A paged kernel and a library on a device without memory: whoever asks for a number there fails."""

    name = "blind"
    batch_invariant = False

    def plan_device(self, batch: DeviceBatch) -> DeviceBatch:
        return batch

    def read(self, plan: Any, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        return torch.empty_like(query)

    def flash_attn_varlen_func(self, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty_like(q)

    flash_attn_with_kvcache = flash_attn_varlen_func


@pytest.mark.parametrize("asked", [MIXED, [Asked(1, 40), Asked(1, 7)], [Asked(5, 5)]], ids=["mixed", "decode", "fresh"])
@pytest.mark.parametrize("host", [True, False])
def test_nothing_is_read_back_from_the_device(asked: list[Asked], host: bool) -> None:
    step = Step(asked)
    meta = torch.device("meta")
    kernel: Any = FlashAttention(
        step.geometry,
        torch.bfloat16,
        meta,
        Blind(),
        dict.fromkeys(Use, FlashAttn3("3", (9, 0), Blind())),  # type: ignore[arg-type]
    )
    batch = on_device(step.batch, meta)
    plan = kernel.plan_device(batch if host else dataclasses.replace(batch, host=None))
    cache = LayerCache(step.cache.key.to(meta), step.cache.value.to(meta))
    out = kernel.read(plan, cache, step.query.to(meta), LAYERS["full"])
    assert out.shape == step.query.shape


@pytest.mark.parametrize("generation", [2, 3, 4])
def test_a_sequence_gone_wrong_stays_alone(generation: int) -> None:
    step = Step([Asked(9, 9), Asked(20, 20), Asked(1, 30)], Geometry(6, 2, 16, 256 if generation == 2 else 16))
    flash, _ = library(generation)
    kernel = step.kernel(flash)
    for part in (step.query, step.key, step.value):
        part[:9] = torch.nan
    out = kernel.attend(kernel.plan(step.batch), step.cache, step.query, step.key, step.value, LAYERS["full"])
    torch.testing.assert_close(out[9:], step.wanted(LAYERS["full"])[9:], rtol=0, atol=2e-2)
