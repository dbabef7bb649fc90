"""Figures of offered load, from what clients took and what the mesh said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.bench.goodput import LoadFigures, Window, load_figures, load_table, of_the_peak
from headrace.bench.probe import Sample, read_metrics
from headrace.bench.taken import Taken


def whole(since_s: float, text_s: list[float], tokens: int | None = None) -> Taken:
    tokens = len(text_s) if tokens is None else tokens
    return Taken(tokens, since_s, since_s, 200, text_s=text_s, ended_s=text_s[-1], completion_tokens=tokens)


def refused(status: int, since_s: float, ended_s: float, retry_after: bool) -> Taken:
    return Taken(9, since_s, since_s, status, retry_after, ended_s=ended_s, error=f"HTTP {status}")


def sample(at_s: float, waiting: float = 0.0, rss_mib: int = 100, **metrics: float) -> Sample:
    named = {f"headrace_{name}": value for name, value in metrics.items()} | {"vllm:num_requests_waiting": waiting}
    return Sample(at_s, named, {"client": at_s / 2, "gateway": at_s / 4}, rss_mib << 20)


def figures(*taken: Taken, samples: tuple[Sample, ...] = (sample(10.0), sample(20.0))) -> LoadFigures:
    return load_figures(Window(2.0, 1.0, taken, sample(8.0, rss_mib=90), samples))


def test_counts_what_happened_inside_the_measured_part_whenever_it_was_sent() -> None:
    found = figures(whole(5.0, [9.0, 11.0, 12.0]), whole(15.0, [16.0, 19.0, 21.0]), whole(1.0, [2.0]))
    assert found.tokens_per_s == found.goodput_per_s == pytest.approx(0.4)  # 11, 12, 16 and 19
    assert found.finished_per_s == pytest.approx(0.1)
    assert found.ttft_p50_ms == pytest.approx(1000.0)  # the other first tokens came before
    assert found.itl_p99_ms == pytest.approx(3000.0)
    assert found.sent == 1


def test_text_that_holds_several_tokens_counts_them_all() -> None:
    given_up = Taken(50, 11.0, 11.0, 200, text_s=[13.0])  # counted as the whole answers were
    found = figures(whole(10.0, [11.0, 12.0], tokens=6), given_up)
    assert found.tokens_per_s == pytest.approx(0.9)
    assert found.failed == 0


def test_tokens_of_a_request_that_failed_are_no_goodput() -> None:
    broken = Taken(5, 11.0, 11.0, 200, text_s=[12.0, 13.0], ended_s=14.0, error="the connection ended")
    found = figures(whole(10.0, [11.0, 12.0]), broken)
    assert (found.tokens_per_s, found.goodput_per_s) == (pytest.approx(0.4), pytest.approx(0.2))
    assert (found.failed, found.errors) == (1, ["the connection ended"])


def test_refusals_are_no_failures_and_show_how_fast_and_how_they_came() -> None:
    found = figures(
        refused(429, 11.0, 11.002, True), refused(429, 12.0, 12.001, False), refused(503, 13.0, 13.004, True),
        refused(429, 1.0, 1.5, False),
    )  # fmt: skip
    assert (found.refused_429, found.refused_503, found.failed) == (2, 1, 0)
    assert found.refusal_p99_ms == pytest.approx(4.0)
    assert found.retry_after_share == pytest.approx(2 / 3)


def test_the_mesh_s_own_counts_are_differences_and_its_queue_the_worst_seen() -> None:
    preempted = {"vllm:num_preemptions_total": 7.0, "headrace_num_requests_preempted": 1.0}
    recomputed = 'headrace_step_tokens_total{kind="recompute"}'
    first = sample(10.0, waiting=4, step_seconds_sum=1.0, step_seconds_count=10)
    first = replace(first, metrics={**first.metrics, recomputed: 100.0})
    last = sample(20.0, waiting=3, rss_mib=120, step_seconds_sum=6.0, step_seconds_count=110)
    last = replace(last, metrics={**last.metrics, **preempted, recomputed: 160.0})
    found = figures(samples=(first, sample(15.0, waiting=9), last))
    assert (found.preemptions, found.restarts, found.recomputed_tokens, found.most_waiting) == (7, 6, 60, 9)
    assert (found.busy_share, found.step_mean_ms) == (pytest.approx(0.5), pytest.approx(50.0))
    assert (found.gateway_rss_before_mib, found.gateway_rss_after_mib) == (90, 120)
    assert found.client_cpu == pytest.approx(0.5)


def test_a_window_without_any_answer_has_figures_too() -> None:
    found = figures()
    assert found.goodput_per_s == 0.0
    assert "0%" in of_the_peak([found])


def test_the_last_line_sets_each_goodput_beside_the_best() -> None:
    best = figures(whole(10.0, [11.0, 12.0, 13.0, 14.0]))
    worse = replace(figures(whole(10.0, [11.0, 12.0, 13.0])), load=3.0)
    assert of_the_peak([best, worse]) == "goodput: 2x: 100%, 3x: 75% of the peak, 0.4 tok/s"
    assert load_table([best, worse]).splitlines()[2].startswith("3x ")


def test_metrics_are_summed_over_processes_and_kept_by_label() -> None:
    page = (
        "# HELP steps_total Steps\n"
        'steps_total{kind="prefill"} 3.0\nsteps_total{kind="decode"} 4.0\n'
        'seconds_bucket{le="0.1"} 9.0\nseconds_sum 2.5\n'
    )
    found = read_metrics([page, "seconds_sum 0.5\n"])
    assert found == {
        "steps_total": 7.0, 'steps_total{kind="prefill"}': 3.0, 'steps_total{kind="decode"}': 4.0, "seconds_sum": 3.0,
    }  # fmt: skip
