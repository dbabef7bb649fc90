"""Trace contexts, which steps get a span, and log lines that name the request and its trace."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest

from observability.context import is_sampled, trace_id
from observability.logs import _JsonFormatter, _TextFormatter, about
from observability.loop_lag import watch_loop_lag
from observability.tracing import SLOW, STEPS_PER_TRACED_REQUEST, StepSampler, Tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("traceparent", "trace", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", TRACE, True),
        (f"00-{TRACE}-{SPAN}-00", TRACE, False),
        (f"00-{TRACE}-{SPAN}-03", TRACE, True),  # flags of level 2 beside the sampled one
        (f"cc-{TRACE}-{SPAN}-01-what-is-to-come", TRACE, True),
        (f"00-{TRACE}-{SPAN}-01-more", "", False),
        (f"ff-{TRACE}-{SPAN}-01", "", False),
        (f"00-{'0' * 32}-{SPAN}-01", "", False),
        (f"00-{TRACE}-{'0' * 16}-01", "", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", "", False),
        (f"00-{TRACE}-{SPAN}-01\n", "", False),
        ("", "", False),
    ],
)
def test_trace_contexts_are_read_as_w3c_says(traceparent: str, trace: str, sampled: bool) -> None:
    assert (trace_id(traceparent), is_sampled(traceparent)) == (trace, sampled)


@pytest.mark.parametrize(
    ("came", "goes_on"),
    [
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"cc-{TRACE}-{SPAN}-03-what-is-to-come", f"00-{TRACE}-{SPAN}-03"),
        (f"00-{TRACE}-{SPAN}-01-more", ""),
        ("", ""),
    ],
)
def test_without_an_endpoint_a_context_is_passed_on_and_nothing_recorded(came: str, goes_on: str) -> None:
    tracing = Tracing("gateway", "g", "", 1.0)
    span = tracing.start("request", 1, came, {"a": 1}, server=True)
    assert span.traceparent == goes_on
    span.rename("other")
    span.set({"b": 2})
    span.end(2, "error")
    tracing.record("queue", 1, 2, came)
    tracing.record_linked("step", 1, 2, [came], {})
    tracing.shutdown()


def test_every_nth_step_is_kept() -> None:
    sampler = StepSampler(0.5)
    kept = [sampler.look(1000, False)[0] for _ in range(4 * STEPS_PER_TRACED_REQUEST)]
    assert [index + 1 for index, keep in enumerate(kept) if keep] == [200, 400]


def test_a_slow_step_is_always_kept_and_each_kind_has_its_own_usual() -> None:
    sampler = StepSampler(1e-6)
    for _ in range(50):
        assert sampler.look(1000, False)[0] is False
        assert sampler.look(50_000, True)[0] is False  # beside decode-only steps it would be slow
    assert sampler.look(int(SLOW * 1000) - 1, False)[:2] == (False, False)
    keep, slow, usual_us = sampler.look(20_000, False)
    assert keep and slow and 900 < usual_us < 1300
    assert sampler.look(100_000, True)[:2] == (False, False)


def test_what_is_usual_follows_the_load() -> None:
    sampler = StepSampler(1e-6)
    for _ in range(30):
        sampler.look(1000, False)
    slow = [sampler.look(10_000, False)[1] for _ in range(200)]
    assert slow[0] and not slow[-1]


def test_without_request_sampling_no_step_is_kept() -> None:
    sampler = StepSampler(0.0)
    assert not any(sampler.look(1000 if index < 50 else 100_000, False)[0] for index in range(60))


def record(**extra: str) -> logging.LogRecord:
    made = logging.LogRecord("headrace.gateway", logging.INFO, "", 0, "done in %d ms", (3,), None)
    made.__dict__.update(extra)
    return made


def test_a_line_about_a_request_carries_its_id_and_its_traces() -> None:
    line = json.loads(_JsonFormatter("gateway").format(record(**about("r1", f"00-{TRACE}-{SPAN}-00"))))
    assert (line["message"], line["request_id"], line["trace_id"]) == ("done in 3 ms", "r1", TRACE)
    assert "trace_id" not in json.loads(_JsonFormatter("gateway").format(record(**about("r1"))))
    assert "request_id" not in json.loads(_JsonFormatter("gateway").format(record()))
    text = _TextFormatter("%(message)s")
    assert text.format(record(**about("r1"))) == "done in 3 ms [request_id=r1]"
    assert text.format(record()) == "done in 3 ms"


def test_a_loop_that_is_held_up_shows_as_lag() -> None:
    seen: list[float] = []
    woke = asyncio.Event()
    held_s = 0.05

    def observe(late_s: float) -> None:
        seen.append(late_s)
        woke.set()

    async def body() -> None:
        watch = asyncio.create_task(watch_loop_lag(observe, every_s=0.001))
        await woke.wait()
        woke.clear()
        until = time.monotonic() + held_s
        while time.monotonic() < until:
            pass
        await woke.wait()
        watch.cancel()

    asyncio.run(body())
    assert seen[-1] >= held_s - 0.002
