"""What a poll of the dashboard tells, and that it costs by what is new."""

from __future__ import annotations

import types
from typing import Any

from mesh_in_a_box import request
from recorded_box import RecordedBox

from observability.dashboard import FILM_STEPS, Dashboard, dashboard_page
from scheduler.core.limits import Limits
from scheduler.look import LiveState, look
from shared.flight_record import StepTrace

SECOND = 1_000_000_000


def step(number: int, result_s: float, *, worker: str = "w", us: int = 10_000, decodes: int = 2, chunks: int = 0,
         recompute: int = 0, preempted: int = 0, tokens: int = 2) -> StepTrace:  # fmt: skip
    result = int(result_s * SECOND)
    return StepTrace(
        worker, number, result - us * 1000, decodes, [("p", 0, chunks)] if chunks else [], [],
        [("v", "no_free_block", "b")] * preempted, 0, 0, "", "", result, us, 0, recompute, tokens,
    )  # fmt: skip


def test_rates_and_percentiles_are_those_of_whole_seconds() -> None:
    board = Dashboard()
    steps = [step(i, 100 + i / 10, us=20_000, preempted=i % 50 == 0) for i in range(1, 200)]  # ten a second
    board.take(steps, len(steps))
    now = 120 * SECOND
    told = board.figures([(now - SECOND, 30_000_000), (now - 2 * SECOND, 50_000_000), (1, 9**12)], now)
    assert told["tokens_per_s"] == 20.0
    assert board.busy("w", now) == 0.2
    assert told["preemptions_per_min"] == 3
    assert told["percentiles"]["ttft"] == {"count": 2, "p50": 30.0, "p90": 50.0, "p99": 50.0}
    itl = told["percentiles"]["itl"]
    assert itl["count"] == 2 * 198, "each gap once for each sequence that decoded"
    assert abs(itl["p50"] - 100) < 1 and abs(told["percentiles"]["step"]["p99"] - 20) < 0.2
    assert sum(told["seconds"]["new_tokens"]) == 2 * 199 and len(told["seconds"]["new_tokens"]) == 60
    board.keep(["w"], 200 * SECOND)
    later = board.figures([], 200 * SECOND)
    assert later["percentiles"]["itl"] == {"count": 0} and later["tokens_per_s"] == 0


def test_a_film_has_what_came_since_and_not_more_than_it_shows() -> None:
    board = Dashboard()
    board.take([step(i, i) for i in range(1, 301)], 300)
    frames = board.film("w", 0)
    assert [frame["step"] for frame in frames] == list(range(301 - FILM_STEPS, 301))
    board.take([step(301, 301, chunks=50, recompute=20, decodes=0)], 301)
    (frame,) = board.film("w", 300)
    assert (frame["prefill"], frame["recompute"], frame["decodes"]) == (30, 20, 0)
    board.keep([], 301 * SECOND)
    assert board.film("w", 0) == []


def service(box: RecordedBox) -> Any:
    return types.SimpleNamespace(name="s", core=box.core, recorder=box.recorder)


def box(**limits: Any) -> RecordedBox:
    base: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "admission_watermark": 0.0, "run_ahead": 1}
    return RecordedBox(Limits(**base | limits), num_blocks=60, max_model_len=400)


def test_the_state_of_a_scheduler_under_load() -> None:
    one = box()
    for index in range(7):
        one.submit(request(f"r{index}", prompt_len=20, max_tokens=30, priority=index % 2, arrival_ns=index))
    for _ in range(8):
        one.step()
    live = LiveState()
    told = live.tell(look(service(one), live.taken), 0)
    (worker,) = told["workers"]
    blocks = worker["blocks"]
    assert sum(blocks[kind] for kind in ("own", "shared", "cached", "free")) == blocks["total"] == 60
    assert worker["running"] == told["num_running"] == 4 and told["num_waiting"] == 3
    assert len(worker["film"]) == told["settled"] == one.recorder.num_settled
    (queue,) = told["queues"]
    assert queue["waiting"] == 3 == sum(line["waiting"] for line in queue["lines"])
    assert queue["head"]["lack"] == "every place in the batch is taken"
    assert [row["stage"] for row in told["running"]].count("decode") >= 1
    assert {row["request"] for row in told["running"]} == {s.request_id for s in one.core.workers["w0"].running}
    again = live.tell(look(service(one), live.taken), told["settled"])
    assert again["workers"][0]["film"] == [], "a page is told a step once"
    one.run()
    live = LiveState()
    told = live.tell(look(service(one), live.taken), 0)
    assert len(told["slowest"]) == 7 and told["running"] == [] and told["queues"][0]["head"] is None


def test_an_older_look_takes_nothing_in_twice() -> None:
    one = box()
    one.submit(request("r", max_tokens=10))
    one.run()
    live = LiveState()
    first, second = look(service(one), 0), look(service(one), 0)
    live.tell(first, 0)
    told = live.tell(second, 0)
    assert len(told["workers"][0]["film"]) == one.recorder.num_settled


def test_the_first_token_of_each_choice_is_noted() -> None:
    one = box()
    one.submit(request("long", prompt_len=100, max_tokens=5, arrival_ns=0))
    one.submit(request("single", prompt_len=1, max_tokens=5, arrival_ns=1))
    one.submit(request("three", prompt_len=20, max_tokens=5, n=3, arrival_ns=2))
    one.run()
    assert len(one.recorder.first_tokens) == 5
    for name in ("long", "single", "three"):
        record = one.report(name).request
        assert record is not None
        for choice in record.choices.values():
            assert record.submitted_ns < choice.first_token_ns <= choice.ended_ns


def test_recomputed_prompt_tokens_are_those_that_the_core_counts() -> None:
    one = RecordedBox(
        Limits(max_num_seqs=4, max_num_batched_tokens=32, admission_watermark=0.0, growth_aware_admission=False,
               run_ahead=1, enable_prefix_caching=False), num_blocks=14, max_model_len=400,
    )  # fmt: skip
    for index, name in enumerate("abcd"):
        one.submit(request(name, prompt_len=6, max_tokens=24, arrival_ns=index))
    one.run()
    assert one.core.counters.recomputed_tokens > 0
    assert sum(step.recompute for step in one.recorder.steps) == one.core.counters.recomputed_tokens
    assert sum(step.new_tokens for step in one.recorder.steps) == one.core.counters.new_tokens


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = dashboard_page().decode()
    assert "/*STYLE*/" not in page and "prefers-color-scheme: dark" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
