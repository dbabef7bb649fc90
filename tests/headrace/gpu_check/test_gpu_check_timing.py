"""Inputs that are rotated outgrow the cache, as far as there is room."""

from __future__ import annotations

import pytest
import torch

from headrace.gpu_check.measured_attention import Cell, against_floor
from headrace.gpu_check.rig import Rig
from headrace.gpu_check.shapes import LLAMA_1B, LLAMA_8B, fits, largest
from headrace.gpu_check.timing import L2_FACTOR, MOST_SETS, HostTimer, sets_for

MIB = 1 << 20


@pytest.mark.parametrize("data", [1 * MIB, 7 * MIB, 60 * MIB, 3000 * MIB])
def test_sets_outgrow_the_cache(data: int) -> None:
    count = sets_for(data, 50 * MIB, 1 << 40)
    assert count * data >= L2_FACTOR * 50 * MIB or count == MOST_SETS
    assert 2 <= count <= MOST_SETS


def test_sets_keep_to_the_room_that_there_is() -> None:
    assert sets_for(10 * MIB, 50 * MIB, 35 * MIB) == 3
    assert sets_for(10 * MIB, 50 * MIB, 5 * MIB) == 1
    assert sets_for(0, 50 * MIB, 1 << 40) == MOST_SETS


def test_the_hosts_timer_runs_what_it_times() -> None:
    ran: list[int] = []
    timer = HostTimer(torch.device("cpu"))
    assert timer.seconds([lambda: ran.append(1), lambda: ran.append(2), lambda: ran.append(3)], 1) >= 0
    assert ran == [1]


def rig(limits: dict[str, float], seconds: float = 1.0) -> Rig:
    return Rig({"seconds": seconds, "rehearsal": True, "known": {"limits": limits}}, lambda event: None)


def test_a_floor_is_the_larger_of_bytes_and_products() -> None:
    measured = rig({"copy_bytes_s": 1e12, "gemm_flops": 1e14})
    by_bytes = against_floor(measured, 2e-6, moved=1e6, flops=1e6)
    assert (by_bytes["bound"], by_bytes["floor_us"]) == ("bytes", pytest.approx(1.0))
    assert by_bytes["copy_share"] == by_bytes["floor_share"] == pytest.approx(0.5)
    by_products = against_floor(measured, 4e-6, moved=1e6, flops=2e8)
    assert (by_products["bound"], by_products["floor_share"]) == ("products", pytest.approx(0.5))
    assert by_products["copy_share"] == pytest.approx(0.25)
    assert "floor_us" not in against_floor(rig({}), 4e-6, moved=1e6, flops=2e8)


def test_a_chunk_sees_the_keys_up_to_each_of_its_queries() -> None:
    assert Cell(1, 4, 4).keys_seen == 1 + 2 + 3 + 4
    assert Cell(2, 2, 10).keys_seen == 2 * (9 + 10)
    assert Cell(3, 1, 7).keys_seen == 21


def test_an_unfinished_stage_names_what_it_lacks_once() -> None:
    stage = rig({}, seconds=0.0)
    assert not stage.more("batch 8 was measured")
    assert not stage.more("batch 64 was measured")
    assert stage.cut == "its time was up before batch 8 was measured"
    assert rig({}, seconds=50).more("anything") and not rig({}, seconds=5).more("a mesh", needs_s=20)


def test_shapes_are_those_of_the_models_that_they_are_named_for() -> None:
    assert LLAMA_8B.sizes.params == pytest.approx(8.03e9, rel=1e-2)
    assert LLAMA_1B.sizes.params == pytest.approx(1.236e9, rel=1e-2)
    assert LLAMA_8B.kv_bytes_per_token(torch.bfloat16) == 131072
    embedding = 128256 * 4096 * 2
    read = LLAMA_8B.read_bytes(torch.bfloat16, batch=32, context=1000)
    assert read == LLAMA_8B.weight_bytes(torch.bfloat16) - embedding + 32 * 1000 * 131072
    assert LLAMA_1B.read_bytes(torch.bfloat16, 0, 0) == LLAMA_1B.weight_bytes(torch.bfloat16)  # its head is tied


def test_the_largest_shape_that_fits_is_taken() -> None:
    shapes = (LLAMA_8B, LLAMA_1B)
    assert largest(shapes, torch.bfloat16, 139 << 30) is LLAMA_8B
    assert largest(shapes, torch.bfloat16, 16 << 30) is LLAMA_1B
    assert largest(shapes, torch.bfloat16, 2 << 30) is None
    assert fits(LLAMA_8B, torch.bfloat16, 24 << 30)
