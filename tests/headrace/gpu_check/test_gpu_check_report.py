"""The goals beside the figures, and the table and the Markdown that are made of them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from headrace.gpu_check import report
from headrace.gpu_check.cards import nominal
from headrace.gpu_check.document import CUT, PASSED, Checked, Document, StageReport
from headrace.gpu_check.goals import goals
from headrace.gpu_check.plan import STAGES


def stage(name: str, rows: list[dict[str, Any]], **fields: Any) -> StageReport:
    planned = next(one for one in STAGES if one.name == name)
    return StageReport(name, planned.title, planned.correctness, **{"state": PASSED, **fields}, rows=rows)


def attention(batch: int, context: int, share: float, backend: str = "triton", ours: bool = True) -> dict[str, Any]:
    return {"kernel": "attention, decode", "backend": backend, "ours": ours, "batch": batch, "context": context,
            "copy_share": share, "us": 10.0, "floor_us": 9.0}  # fmt: skip


def test_attention_is_judged_by_its_worst_cell_and_our_best_kernel_there() -> None:
    rows = [
        attention(32, 1024, 0.7),
        attention(32, 1024, 0.85, "triton + flash-attn 3"),
        attention(64, 4096, 0.9),
        attention(64, 4096, 0.1, "SDPA", ours=False),
        attention(8, 1024, 0.2),  # the goal does not speak of it
        attention(64, 512, 0.2),
    ]
    (goal,) = goals([stage("kernels", rows)])
    assert goal.met is True
    assert goal.measured == "85% at worst (batch 32, context 1024)"
    (missed,) = goals([stage("kernels", [*rows, attention(128, 16384, 0.79)])])
    assert missed.met is False


def test_the_decode_goal_is_for_batches_up_to_64() -> None:
    rows = [
        {"model": "Llama-8B shape", "batch": 1, "context": 1024, "roofline_share": 0.72, "served": True},
        {"model": "Llama-8B shape", "batch": 128, "context": 1024, "roofline_share": 0.5, "served": True},
        {"model": "Llama-8B shape", "batch": 64, "context": 1024, "roofline_share": 0.4, "served": False},  # no graphs
    ]
    (goal,) = goals([stage("throughput", rows)])
    assert goal.met is True and "72%" in goal.measured


def test_the_gap_goal_is_met_by_a_mesh_only() -> None:
    alone = {"around": "one process", "gap_p50_us": 20.0}
    (goal,) = goals([stage("steps", [alone])])
    assert goal.met is None and "no mesh was measured" in goal.measured
    (goal,) = goals([stage("steps", [alone, {"around": "mesh", "gap_p50_us": 140.0}])])
    assert goal.met is False


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert [goal.met for goal in goals([stage(name, []) for name in ("kernels", "throughput", "steps")])] == [None] * 3
    assert goals([stage("limits", [])]) == []


@pytest.fixture
def document() -> Document:
    environment = stage("environment", [], facts={"card": "NVIDIA H200", "memory_bytes": 141 << 30,
                                                   "packages": {"torch": "2.11.0"}})  # fmt: skip
    contract = stage(
        "contract", [{"kernel": "norm", "dtype": "all", "cases": 3, "error": 0.001, "allowed": None}],
        checks=[Checked("norm", True), Checked("rotary", False, "off by 2")],
    )  # fmt: skip
    kernels = stage("kernels", [attention(32, 1024, 0.85)], state=CUT, note="its time was up before swap")
    stages = [environment, contract, kernels]
    began = datetime.datetime(2026, 5, 4, 12, 30, tzinfo=datetime.UTC)
    return Document(stages, goals(stages), 480.0, 123.4, False, began)


def test_the_table_shows_states_failures_figures_and_goals(document: Document) -> None:
    text = report.text(document)
    for line in (
        "NVIDIA H200, 2026-05-04 12:30: 123 s of 480 s",
        "  memory: 141.0 GiB",
        "  packages: torch 2.11.0",
        "  1 of 2 checks passed",
        "  FAILED rotary: off by 2",
    ):
        assert line in text.splitlines()
    assert "[cut short: its time was up before swap; 0.0 s]" in text
    assert "of copy" in text and "85%" in text
    assert "GB/s" not in text  # a column that no row fills
    assert text.splitlines()[-1].endswith("met")
    assert report.REHEARSAL not in text
    document.rehearsal = True
    assert report.REHEARSAL in report.text(document)


def test_the_markdown_stands_under_the_card_and_the_date(document: Document) -> None:
    text = report.markdown(document)
    assert text.startswith("## NVIDIA H200, 2026-05-04\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any("| attention, decode | triton | 32 | 1024 |" in row for row in rows)
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_document_has_a_version_and_everything_else(document: Document) -> None:
    found = document.as_json()
    assert (found["schema"], found["card"], found["exit_code"]) == (1, "NVIDIA H200", 1)
    assert [one["name"] for one in found["stages"]] == ["environment", "contract", "kernels"]
    assert found["stages"][1]["checks"][1] == {"name": "rotary", "passed": False, "detail": "off by 2"}
    assert found["goals"][0]["met"] is True


@pytest.mark.parametrize(
    ("name", "gib", "bandwidth"),
    [
        ("NVIDIA H200", 139.8, 4.8e12),
        ("NVIDIA H100 80GB HBM3", 79.6, 3.35e12),
        ("NVIDIA H100 PCIe", 79.6, None),
        ("NVIDIA A100-SXM4-80GB", 79.3, 2.039e12),
        ("NVIDIA A100-SXM4-40GB", 39.4, 1.555e12),
        ("NVIDIA L4", 22.2, 0.3e12),
        ("NVIDIA GeForce RTX 4090", 23.6, None),
    ],
)
def test_cards_are_known_by_their_drivers_names(name: str, gib: float, bandwidth: float | None) -> None:
    found = nominal(name, int(gib * 2**30))
    assert (found.bandwidth if found else None) == bandwidth
