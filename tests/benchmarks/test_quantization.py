"""What benchmarks/quantization.py says of distributions that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks import quantization


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_what_is_compared_with_itself_differs_in_nothing() -> None:
    same = logs([0.5, 0.25, 0.25], [0.1, 0.1, 0.8])
    compared = quantization.compare(same, same, np.array([0, 1]))
    assert compared.divergence.tolist() == [0.0, 0.0]
    assert compared.agrees.tolist() == [True, True]
    assert compared.loss.tolist() == pytest.approx([math.log(4)])


def test_divergence_is_from_the_reference_to_the_other() -> None:
    reference, other = logs([0.5, 0.5], [0.9, 0.1]), logs([0.25, 0.75], [0.2, 0.8])
    compared = quantization.compare(reference, other, np.array([1, 0]))
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)
    assert compared.divergence.tolist() == pytest.approx([first, second])
    assert compared.agrees[1].item() is False
    assert compared.loss.tolist() == pytest.approx([math.log(4)])


def test_a_row_says_the_means_over_all_windows() -> None:
    reference, other = logs([0.5, 0.5, 1e-9], [0.25, 0.75, 1e-9]), logs([0.75, 0.25, 1e-9], [0.25, 0.75, 1e-9])
    tokens = np.array([0, 1])
    exact = quantization.compare(reference, reference, tokens)
    moved = quantization.compare(reference, other, tokens)
    lines = quantization.rows([[exact, exact], [moved, exact], [exact, exact], [exact, exact]])
    assert [line[0] for line in lines] == ["float32", "float32, int8", "bfloat16", "bfloat16, int8"]
    assert lines[0][1:4] == ["-", "-", "-"]
    assert lines[1][1] == f"{moved.divergence.sum().item() / 4:.5f}"
    assert lines[1][4:] == [f"{math.sqrt(2 * 4):.3f}", f"{math.sqrt(2):.4f}"]
    assert lines[2][1:] == ["0.00000", "0.0000", "100.00 %", "2.000", "1.0000"]


def test_windows_reach_from_the_first_token_to_the_last() -> None:
    tokens = np.arange(100)
    windows = quantization.cut(tokens, 3, 20)
    assert [window[0] for window in windows] == [0, 40, 80]
    assert windows[-1][-1] == 99
    assert {len(window) for window in windows} == {20}


def test_pythons_reference_is_there() -> None:
    text = quantization.language_reference()
    assert len(text) > 100_000
    assert 'The "assert" statement' in text
