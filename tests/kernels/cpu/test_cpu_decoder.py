"""The C++ decoder by itself: which rows come back, and what a caller may get wrong without ending the process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_attention import usable_isas
from small_decoder import VOCABULARY, make_decoder, run

from kernels.contract import RaggedBatch
from kernels.cpu.decoder import STAGES
from kernels.cpu.library import Library

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", usable_isas())
def test_rows_come_back_in_the_order_asked_for_and_as_often(library: Library, isa: str, dtype: torch.dtype) -> None:
    library.select(isa)
    decoder = make_decoder(library, dtype)
    every = run(decoder, [20, 1, 5], list(range(26)))
    assert every.shape == (26, VOCABULARY) and every.dtype == dtype and torch.isfinite(every).all()
    for keep in ([25], [3, 3, 3], [25, 0, 13, 13, 2], list(range(25, -1, -1)), [*range(26), *range(26)]):
        assert torch.equal(run(decoder, [20, 1, 5], keep), every[keep])


def test_a_pass_that_keeps_no_row_fills_the_cache(library: Library) -> None:
    decoder, other = make_decoder(library), make_decoder(library)
    wanted = run(decoder, [20], [19])
    assert run(other, [20], []).shape == (0, VOCABULARY)
    batch = RaggedBatch(np.array([0, 1]), np.array([20]), np.array([[1, 2]]), np.array([2 * 16 + 3]))
    last = other.forward(np.array([(5 + 7 * 19) % VOCABULARY]), np.array([19]), batch, np.array([0]))
    assert torch.equal(last, wanted)


@pytest.mark.parametrize("counts", [[], [0], [0, 0]], ids=str)
def test_no_sequences_and_no_tokens_are_an_empty_answer(library: Library, counts: list[int]) -> None:
    decoder = make_decoder(library)
    assert run(decoder, counts, []).shape == (0, VOCABULARY)
    assert run(decoder, [3], [2]).shape == (1, VOCABULARY)


def test_a_sequence_of_no_tokens_among_others_changes_nothing(library: Library) -> None:
    decoder = make_decoder(library)
    assert torch.equal(run(decoder, [0, 7, 0, 4, 0], [6, 10]), run(decoder, [7, 4], [6, 10]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_that_there_are_none_of_are_the_nearest(library: Library, dtype: torch.dtype) -> None:
    decoder = make_decoder(library, dtype)
    far = run(decoder, [5], [4], [-(2**62), -1, VOCABULARY, 10**9, 2**62])
    assert torch.equal(far, run(decoder, [5], [4], [0, 0, *[VOCABULARY - 1] * 3]))


@pytest.mark.parametrize(("far", "near"), [(10**12, 200), (-(10**12), -200), (150, 99)])
def test_positions_beyond_the_table_are_the_nearest(library: Library, far: int, near: int) -> None:
    decoder = make_decoder(library)
    assert torch.equal(run(decoder, [1], [0], first_position=far), run(decoder, [1], [0], first_position=near))
    assert torch.isfinite(run(decoder, [30], [29], first_position=far)).all()


@pytest.mark.parametrize("keep", [[5], [-1], [0, 2**40]], ids=str)
def test_rows_that_there_are_none_of_are_refused(library: Library, keep: list[int]) -> None:
    with pytest.raises(ValueError, match="are wanted of 5"):
        run(make_decoder(library), [5], keep)


def test_arrays_that_do_not_fit_one_another_are_refused(library: Library) -> None:
    decoder = make_decoder(library)
    place, table = np.arange(3), np.array([[1]])
    good = RaggedBatch(np.array([0, 3]), place + 1, table, place + 16)
    wrong = [
        (place[:2], place, good),
        (place, place[:2], good),
        (place, place, RaggedBatch(np.array([0, 2]), place + 1, table, place + 16)),
        (place, place, RaggedBatch(np.array([0, 3]), place + 1, table, place[:1] + 16)),
    ]
    for tokens, positions, batch in wrong:
        with pytest.raises(ValueError, match="positions for"):
            decoder.forward(tokens, positions, batch, np.array([2]))


def test_arrays_of_other_types_and_strides_are_read_as_they_are_meant(library: Library) -> None:
    decoder = make_decoder(library)
    wanted = run(decoder, [4], [0, 3])
    place = np.arange(8, dtype=np.int16)[::2] // 2
    batch = RaggedBatch(
        np.array([0, 4], dtype=np.int32),
        place + 1,
        np.array([[9, 1]], dtype=np.int64)[:, 1:],
        place.astype(np.int32) + 16,
    )
    tokens = np.array([[(5 + 7 * i) % VOCABULARY, 0] for i in range(4)], dtype=np.int32)[:, 0]
    assert torch.equal(decoder.forward(tokens, place, batch, np.array([0, 3], dtype=np.int8)), wanted)


def test_where_the_time_went_is_told_once(library: Library) -> None:
    decoder = make_decoder(library)
    run(decoder, [20], [19])
    seconds = decoder.stage_seconds()
    assert list(seconds) == list(STAGES) and all(value > 0 for value in seconds.values())
    assert not any(decoder.stage_seconds().values())
