"""The figures of prefill and decode apart: their arithmetic, and small runs of the whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.simulate.figures import dynamic, split
from headrace.simulate.figures.claim import Bench, Holds
from headrace.simulate.figures.document import as_markdown, write
from headrace.simulate.report import Slo
from headrace.simulate.scenario import Scenario

MESH = Scenario(workers=16, slo=Slo(1000, 18))


def test_what_a_prompt_and_its_decodes_need() -> None:
    """A100-80 and 8B: 86 us of arithmetic for a token, 10.5 ms to read the weights, 86 ns to read a KV entry."""
    prompt_s, decode_s = split.needs(MESH, 1000, 250)
    assert prompt_s == pytest.approx(0.002 + 0.086 + 0.0014, rel=0.02)
    rows = (18 - 2 - 10.5) / (1125 * 86e-6)
    assert decode_s == pytest.approx(250 * 0.018 / rows, rel=0.05)


def test_the_batch_bounds_what_decodes_can_share() -> None:
    _, decode_s = split.needs(MESH.with_limits(max_num_seqs=8), 128, 256)
    assert decode_s == pytest.approx(256 * 0.0127 / 8, rel=0.02)


@pytest.mark.parametrize(("kind", "roles"), [((4000, 100), 12), ((1000, 250), 8), ((128, 256), 5)])
def test_roles_stand_to_each_other_as_the_needs(kind: tuple[int, int], roles: int) -> None:
    assert split.by_arithmetic(MESH, *kind) == f"prefill={roles},decode={16 - roles}"


def test_lengths_vary_by_half() -> None:
    rng = random.Random(1)
    drawn = [split.varied(100, 40).draw(rng) for _ in range(300)]
    prompts, outputs = [segments[0][1] for segments, _, _ in drawn], [output for *_, output in drawn]
    assert (min(prompts), max(prompts)) == pytest.approx((50, 150), abs=3)
    assert (min(outputs), max(outputs)) == pytest.approx((20, 60), abs=2)
    assert all(most == 60 for _, most, _ in drawn)


def test_the_highest_rate_that_keeps_the_slo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(split, "WORKERS", 2)
    monkeypatch.setattr(split, "_KINDS", ((1000, 20),))
    monkeypatch.setattr(split, "_SLOS", (Slo(1000, 30), Slo(1, 1)))
    monkeypatch.setattr(split, "_RATES", (0.3, 2.0))
    (section,) = split.apart(Bench(0.1))
    assert [row.holds for row in section.rows] == [Holds.NO, Holds.NO], "a tie is no win, and neither is nothing"
    kept, never = section.table[1:]
    assert kept[2] == kept[3] != "0.0" and kept[4] == "1 + 1"
    assert never[2:4] == ["0.0", "0.0"] and never[5:] == ["-", "- / -", "- / -", "-"]
    write([section], tmp_path)
    assert (tmp_path / "figures" / "split.svg").exists()


def test_a_load_that_shifts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dynamic, "WORKERS", 4)
    monkeypatch.setattr(dynamic, "_PREFILL", (1,))
    monkeypatch.setattr(dynamic, "_PHASES", ((2000, 5, 20.0), (50, 40, 5.0), (2000, 5, 20.0)))
    (section,) = dynamic.following(Bench(0.01))
    (row,) = section.rows
    fixed, planned = section.table[1:]
    assert row.holds is Holds.YES, "one worker for prompts is too few in two of three phases"
    assert float(planned[2].rstrip("%")) > float(fixed[2].rstrip("%"))
    assert row.ours in as_markdown([section], "figures")
    write([section], tmp_path)
    assert (tmp_path / "figures" / "dynamic.svg").exists()
