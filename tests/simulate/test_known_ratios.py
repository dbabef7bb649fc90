"""Ratios that are known from theory or from papers, within bands, on small runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.simulate.figures import SECTIONS, Bench
from headrace.simulate.figures.claim import Holds, contiguous, fastest_rate, first_chunk
from headrace.simulate.figures.document import as_markdown, as_text, write
from headrace.simulate.scenario import Scenario, run
from headrace.simulate.workload import LENGTHS, prefixed, stream, uniform

BATCH_OF_16 = Scenario(max_model_len=2048).with_limits(max_num_seqs=16)


def throughput(scenario: Scenario, lengths: str, count: int, concurrency: int) -> float:
    requests = stream(uniform(64, 64) if lengths == "uniform" else LENGTHS[lengths], count, 1, longest=2048)
    return run(scenario, requests, concurrency=concurrency, drain=False).figures.tokens_per_s


def test_continuous_batching_pays_in_proportion_to_how_uneven_outputs_are() -> None:
    ratio = {
        lengths: throughput(BATCH_OF_16, lengths, 300, 32)
        / throughput(replace(BATCH_OF_16, policy="static"), lengths, 300, 32)
        for lengths in ("mixed", "uniform")
    }
    assert 3.5 <= ratio["mixed"] <= 7
    assert 0.9 <= ratio["uniform"] <= 1.1


def test_pages_waste_a_few_per_cent_and_reservations_most() -> None:
    scenario = Scenario(model="llama-2-13b", gpu="a100-40", max_model_len=2048)
    requests = stream(LENGTHS["chat"], 80, 1, longest=2048)
    paged = run(scenario, requests, concurrency=40).figures
    reserved = run(contiguous(scenario, 2048), requests, concurrency=40).figures
    assert paged.kv_waste < 0.05
    assert 0.6 <= reserved.kv_waste <= 0.9
    assert paged.tokens_per_s > 1.5 * reserved.tokens_per_s


def test_half_a_block_of_each_sequence_is_empty() -> None:
    scenario = Scenario(max_model_len=2048, block_size=128).with_limits(max_num_seqs=64)
    done = run(scenario, stream(LENGTHS["chat"], 300, 1, longest=2048), concurrency=128, drain=False)
    full = [sample for sample in done.measured.samples if sample.running == 64]
    empty = sum(one.slots_held - one.slots_filled - one.slots_awaited for one in full) / len(full)
    assert empty == pytest.approx(64 * 64, rel=0.15)


def test_shared_prefixes_are_computed_once() -> None:
    requests = stream(prefixed(2, 1600, 100, 20), 60, 1)
    scenario = Scenario(max_model_len=4096)
    on = run(scenario, requests, concurrency=8)
    off = run(scenario.with_limits(enable_prefix_caching=False), requests, concurrency=8)
    assert on.figures.prefix_hit_share > 0.7
    assert on.figures.tokens_per_s > 2 * off.figures.tokens_per_s
    assert on.core.counters.prefill_tokens < 0.3 * off.core.counters.prefill_tokens


def test_admission_that_does_not_hold_its_check_cascades() -> None:
    scenario = Scenario(gpu="a100-40", max_model_len=32_768)
    requests = stream(LENGTHS["rag"], 420, 1, 7.0, longest=32_768)
    ours = run(scenario, requests, until_s=60)
    naive = run(first_chunk(scenario), requests, until_s=60)
    assert naive.figures.recomputed_tokens > 20 * max(1, ours.figures.recomputed_tokens)
    assert naive.figures.tokens_per_s < 0.8 * ours.figures.tokens_per_s
    assert naive.figures.busy_share > 0.95  # busier than ever, and less done


def test_the_rate_search_finds_the_edge() -> None:
    assert fastest_rate(lambda rate: rate <= 3.0, 0.1, 100, steps=12) == pytest.approx(3.0, rel=0.02)
    assert fastest_rate(lambda rate: False, 0.1, 100) == 0
    assert fastest_rate(lambda rate: True, 0.1, 100) == 100


def test_a_section_has_its_rows_its_table_and_its_page(tmp_path: object) -> None:
    (section,) = SECTIONS["capacity"](Bench(0.05))
    (row,) = section.rows
    assert row.holds is Holds.YES
    assert "8.3" in row.ours and "7.2" in row.ours and "6.6" in row.ours
    assert row.claim[:20] in as_text([section])
    assert f"| {row.claim} |" in as_markdown([section], "figures")


def test_the_page_is_written_with_its_pictures(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    sections = SECTIONS["head-of-line"](Bench(0.02))
    write(sections, folder)
    assert (folder / "figures" / "head_of_line.svg").read_text("utf-8").startswith("<?xml")
    assert "figures/head_of_line.svg" in (folder / "figures.md").read_text("utf-8")
