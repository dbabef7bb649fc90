"""From raw times to figures, and to the tables."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.peers.figures import Figures, figures, full_load_rate
from benchmarks.peers.processes import Spent, Usage, kind_of, spent
from benchmarks.peers.report import best_peer, cell, cpu_table, ratio, report
from headrace.bench.taken import Taken

NOTHING = Spent(10.0, {"engine": 2.0, "front": 0.5}, 0.4, 0.3, 0.1)


def answer(since_s: float, *text_s: float, tokens: int = 0, want: int = 0, error: str = "") -> Taken:
    """An answer whose pieces came at these moments; one token a piece unless ``tokens`` says otherwise."""
    tokens = tokens or len(text_s)
    return Taken(want or tokens, since_s, since_s, 200, False, list(text_s), text_s[-1], tokens, error)


def run(engine: str, load: str, tokens_per_s: float = 100.0, **changes: object) -> Figures:
    made = figures(engine, load, [answer(0.0, 0.05, 0.06), answer(0.0, 0.07, 0.1)], NOTHING)
    return dataclasses.replace(made, tokens_per_s=tokens_per_s, **changes)  # type: ignore[arg-type]


def test_times_become_milliseconds_and_rates() -> None:
    found = figures("e", "l", [answer(1.0, 1.1, 1.15, 1.25), answer(1.2, 1.4, 1.5)], NOTHING)
    assert (found.requests, found.failed, found.output_tokens) == (2, 0, 5)
    assert found.seconds == pytest.approx(0.5)
    assert found.tokens_per_s_whole == pytest.approx(10.0)
    assert (found.ttft_p50, found.ttft_p99) == (pytest.approx(200.0), pytest.approx(200.0))
    assert (found.itl_p50, found.itl_p99) == (pytest.approx(100.0), pytest.approx(100.0))
    assert found.cpu_s_per_1000 == pytest.approx(500.0)
    assert found.cpu_s_per_1000_by_process == {"engine": pytest.approx(400.0), "front": pytest.approx(100.0)}
    assert found.client_cpu_s_per_1000 == pytest.approx(80.0)
    assert (found.others_share, found.steal_share) == (pytest.approx(0.03), pytest.approx(0.01))


def test_the_rate_is_of_the_time_in_which_all_users_were_there() -> None:
    full = [answer(0.0, 0.5, 1.0), answer(1.0, 1.5, 2.0), answer(2.0, 3.0, 9.0)]
    found = figures("e", "l", full, NOTHING)
    assert found.tokens_per_s == pytest.approx(4 / 2.0)
    assert found.tokens_per_s_whole == pytest.approx(6 / 9.0)


def test_a_piece_of_several_tokens_counts_for_its_share() -> None:
    taken = [answer(0.0, 1.0, 2.0, tokens=8), answer(2.0, 3.0, tokens=4)]
    assert full_load_rate(taken, 0.0, 2.0) == pytest.approx(4.0)
    assert figures("e", "l", taken, NOTHING).pieces_per_token == pytest.approx(3 / 12)


def test_one_wave_of_requests_has_no_full_load_but_its_whole() -> None:
    found = figures("e", "l", [answer(0.0, 1.0, 2.0), answer(0.0, 1.0, 4.0)], NOTHING)
    assert found.tokens_per_s == found.tokens_per_s_whole == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (answer(0.0, 1.0, 2.0, want=3), "2 tokens instead of 3"),
        (answer(0.0, 1.0, 2.0, tokens=1), "2 pieces of text for 1 tokens"),
        (Taken(3, 0.0, 0.0, 200, False, [], 1.0, 3), "nothing was seen to arrive"),
        (answer(0.0, 1.0, error="HTTP 500"), "HTTP 500"),
    ],
)
def test_a_count_that_is_not_what_was_asked_for_is_a_failure_that_is_shown(wrong: Taken, said: str) -> None:
    found = figures("e", "l", [wrong, answer(0.0, 1.0)], NOTHING)
    assert (found.requests, found.failed, found.output_tokens) == (2, 1, 1)
    assert said in found.errors[0]
    assert cell(found) == "1 of 2 FAILED"
    assert f"e, l: FAILED: {found.errors[0]}" in report(["e"], ["l"], {("e", "l"): found}, {})


def test_ratios_are_ours_over_theirs_and_the_best_is_the_quickest_peer() -> None:
    runs = {
        ("headrace", "a"): run("headrace", "a", 150.0),
        ("x", "a"): run("x", "a", 100.0),
        ("y", "a"): run("y", "a", 120.0),
        ("y", "b"): run("y", "b", 10.0),
    }
    engines = ["headrace", "x", "y", "z"]
    assert (ratio(runs, "x", "a"), ratio(runs, "y", "a"), ratio(runs, "y", "b")) == ("1.50", "1.25", "-")
    assert (best_peer(engines, "a", runs), best_peer(engines, "c", runs)) == ("y", "")
    text = report(engines, ["a", "b"], runs, {"z": "not installed"})
    assert "z: not installed" in text
    assert "1.25 (y)" in text


def test_a_run_with_failures_is_never_the_best_nor_has_a_ratio() -> None:
    runs = {("headrace", "a"): run("headrace", "a"), ("x", "a"): run("x", "a", 900.0, failed=1)}
    assert (best_peer(["headrace", "x"], "a", runs), ratio(runs, "x", "a")) == ("", "-")


def test_a_cell_has_rate_ttft_and_itl() -> None:
    shown = run("x", "a", 533.4, ttft_p50=71.2, ttft_p99=371.0, itl_p50=22.0, itl_p99=66.0)
    assert cell(shown) == "533; 71/371; 22/66"
    assert cell(None) == "-"


def test_the_services_of_our_mesh_have_a_line_of_cpu_each() -> None:
    runs = {("headrace", "a"): run("headrace", "a"), ("x", "a"): run("x", "a")}
    lines = cpu_table(["headrace", "x", "absent"], ["a"], runs).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["headrace", "engine", "front", "x"]


def test_a_disturbed_run_and_answers_in_lumps_are_named() -> None:
    text = report(["x"], ["a"], {("x", "a"): run("x", "a", others_share=0.5, pieces_per_token=0.4)}, {})
    assert "x, a: other processes took 50% of one CPU" in text
    assert "0.40 pieces of text for a token" in text


def test_cpu_between_two_looks_is_the_difference_also_for_processes_that_began_meanwhile() -> None:
    before = Usage(1.0, {"worker": 1.0}, 0.1, 10.0, 0.5)
    after = Usage(3.0, {"worker": 2.0, "late": 0.25}, 0.2, 12.0, 0.6)
    found = spent(before, after)
    assert found.engine == {"worker": 1.0, "late": 0.25}
    assert (found.seconds, found.client) == (2.0, pytest.approx(0.1))
    assert (found.others, found.steal) == (pytest.approx(0.65), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/v/bin/python -m scheduler --nats x", "scheduler"),
        ("/v/bin/python /b/drivers/openvino_batching.py", "openvino_batching"),
        ("/v/bin/nats-server -c x", "nats-server"),
        ("VLLM::EngineCore", "VLLM::EngineCore"),
        ("", "?"),
    ],
)
def test_processes_are_named_by_what_they_run(command: str, kind: str) -> None:
    assert kind_of(command.split(" ")) == kind
