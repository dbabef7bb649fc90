"""One trace for one request across gateway, scheduler and worker, over OTLP to a real receiver, however it ends."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from otlp_receiver import Receiver, attributes, otlp_receiver
from whole_mesh import VOCAB_SIZE, Mesh, at_once, eventually, running_mesh

from observability import conventions as names

pytestmark = pytest.mark.mesh

CALLER = "b7ad6b7169203331"
SLACK_NS = 250_000_000  # each process takes its own times, and a busy machine lets one of them wait


@dataclass
class Traced:
    mesh: Mesh
    receiver: Receiver

    def of(self, trace_id: str) -> list[Any]:
        return sorted(
            (span for span in self.receiver.spans if span.trace_id.hex() == trace_id),
            key=lambda span: span.start_time_unix_nano,
        )

    def whole(self, trace_id: str, *wanted: str) -> list[Any]:
        """The request's spans once all ``wanted`` ones are in; closed, and nested under its server span."""
        eventually(
            lambda: set(wanted) | {"text_completion m"} <= {span.name for span in self.of(trace_id)},
            f"spans {wanted}, got {[span.name for span in self.of(trace_id)]}",
        )
        spans = self.of(trace_id)
        (server,) = [span for span in spans if span.parent_span_id.hex() == CALLER]
        assert server.name == "text_completion m"
        for span in spans:
            assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano, span
            if span is not server:
                assert span.parent_span_id == server.span_id, span.name
                assert server.start_time_unix_nano <= span.start_time_unix_nano + SLACK_NS, span.name
                assert span.end_time_unix_nano <= server.end_time_unix_nano + SLACK_NS, span.name
        return spans

    def only(self, spans: list[Any], name: str) -> Any:
        (found,) = [span for span in spans if span.name == name]
        return found


def new_trace() -> tuple[str, dict[str, str]]:
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{CALLER}-01"}


@pytest.fixture(scope="module")
def traced(tiny: Path) -> Iterator[Traced]:
    """A pool of 8 blocks, which two requests of 100 tokens outgrow."""
    with otlp_receiver() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        every = ("--otlp-endpoint", receiver.url, "--trace-sampling", "0.5")
        worker = ("--simulate", "--simulate-vocab-size", str(VOCAB_SIZE), "--simulate-blocks", "8")
        with running_mesh(
            tiny,
            scheduler=(*every, "--no-growth-aware-admission"),
            worker=(*every, *worker), gateway=(*every, "--resume-timeout-s", "2"),
        ) as mesh:  # fmt: skip
            yield Traced(mesh, receiver)


def complete(mesh: Mesh, headers: dict[str, str], **body: Any) -> httpx.Response:
    return mesh.http.post("/v1/completions", json={"model": "m", "ignore_eos": True, **body}, headers=headers)


def test_every_stage_of_a_request_is_in_its_trace(traced: Traced) -> None:
    trace_id, headers = new_trace()
    assert complete(traced.mesh, headers, prompt="hello", max_tokens=9).status_code == 200
    stages = [names.RECEIVE, names.TOKENIZE, names.QUEUE, names.PREFILL, names.DECODE, names.STREAM]
    spans = traced.whole(trace_id, *stages)
    assert sorted(span.name for span in spans) == sorted([*stages, "text_completion m"])
    services = {span.name: traced.receiver.services[span.span_id] for span in spans}
    assert services[names.RECEIVE] == services[names.STREAM] == services["text_completion m"] == "headrace-gateway"
    assert services[names.QUEUE] == "headrace-scheduler"
    assert services[names.PREFILL] == services[names.DECODE] == "headrace-worker"
    server = attributes(traced.only(spans, "text_completion m"))
    assert (server[names.OPERATION_NAME], server[names.OUTPUT_TOKENS]) == ("text_completion", 9)
    prefill = traced.only(spans, names.PREFILL)
    (chunk,) = prefill.events
    assert chunk.name == names.CHUNK
    assert attributes(chunk)[names.TOKENS] == attributes(prefill)[names.INPUT_TOKENS] == server[names.INPUT_TOKENS]
    assert attributes(traced.only(spans, names.DECODE))[names.OUTPUT_TOKENS] == 9


def test_a_preemption_is_told_with_its_cause(traced: Traced) -> None:
    traces = [new_trace() for _ in range(2)]
    replies = at_once([
        lambda headers=headers, index=index: complete(traced.mesh, headers, prompt=f"p{index}", max_tokens=100)
        for index, (_, headers) in enumerate(traces)
    ])  # fmt: skip
    assert [reply.status_code for reply in replies] == [200, 200]
    both = [traced.whole(trace_id, names.STREAM, names.QUEUE, names.DECODE) for trace_id, _ in traces]
    victims = [spans for spans in both if any(span.name == names.PREEMPTED for span in spans)]
    assert victims, "nobody was preempted"
    spans = victims[0]
    other = next(spans for spans in both if spans is not victims[0])
    preempted = next(span for span in spans if span.name == names.PREEMPTED)
    told = attributes(preempted)
    assert told[names.CAUSE] == "no_free_block"
    assert told[names.PREEMPTED_BY] == attributes(traced.only(other, names.QUEUE))[names.REQUEST_ID]
    eventually(
        lambda: sum(span.name == names.DECODE for span in traced.of(preempted.trace_id.hex())) >= 2, "both decodes"
    )
    spans = traced.of(preempted.trace_id.hex())
    decodes = [span for span in spans if span.name == names.DECODE]
    assert attributes(decodes[0])[names.END_REASON] == "left"
    assert attributes(decodes[-1])[names.END_REASON] == "length"
    again = [span for span in spans if span.name == names.PREFILL][1]
    assert attributes(again)[names.RECOMPUTES] is True
    assert decodes[0].end_time_unix_nano <= again.start_time_unix_nano


def test_what_a_request_waits_behind_is_told(traced: Traced) -> None:
    """The first one's prompt fills most of the pool, so the second waits for blocks."""
    traces = [new_trace() for _ in range(2)]
    with streaming(traced.mesh, traces[0][1], prompt="a" * 90, max_tokens=30) as lines:
        next(lines)
        assert complete(traced.mesh, traces[1][1], prompt="b" * 90, max_tokens=3).status_code == 200
        list(lines)
    queue = traced.only(traced.whole(traces[1][0], names.QUEUE), names.QUEUE)
    waits = [attributes(event) for event in queue.events]
    assert "blocks" in [one[names.LACK] for one in waits], waits
    assert all(queue.start_time_unix_nano <= event.time_unix_nano <= queue.end_time_unix_nano for event in queue.events)


def test_a_refusal_closes_its_trace(traced: Traced) -> None:
    trace_id, headers = new_trace()
    assert complete(traced.mesh, headers, prompt="hello", max_tokens=100_000).status_code == 400
    spans = traced.whole(trace_id, names.RECEIVE)
    server = traced.only(spans, "text_completion m")
    assert server.status.code == server.status.STATUS_CODE_ERROR
    assert attributes(server)[names.ERROR_TYPE] == "invalid"
    assert not {names.QUEUE, names.PREFILL, names.STREAM} & {span.name for span in spans}


@contextlib.contextmanager
def streaming(mesh: Mesh, headers: dict[str, str], **body: Any) -> Iterator[Iterator[str]]:
    asked = {"model": "m", "ignore_eos": True, "stream": True, **body}
    with mesh.http.stream("POST", "/v1/completions", json=asked, headers=headers) as response:
        assert response.status_code == 200
        yield response.iter_lines()


def test_a_client_that_leaves_closes_its_trace(traced: Traced) -> None:
    trace_id, headers = new_trace()
    with streaming(traced.mesh, headers, prompt="hello", max_tokens=100) as lines:
        next(lines)
    # The worker tells of it when the next plan takes the sequence out of the batch.
    traced.mesh.answer(prompt="next", max_tokens=2)
    spans = traced.whole(trace_id, names.STREAM, names.QUEUE, names.DECODE)
    for name in ("text_completion m", names.STREAM):
        assert attributes(traced.only(spans, name))[names.ERROR_TYPE] == "aborted"
    logged = [json.loads(line) for line in traced.mesh.gateway.output().splitlines() if trace_id in line]
    assert [line["message"].split(":")[0] for line in logged] == ["completions aborted"]
    assert logged[0]["request_id"] and logged[0]["trace_id"] == trace_id
    assert attributes(traced.only(spans, names.QUEUE))[names.END_REASON] == "cancelled"
    assert attributes(traced.only(spans, names.DECODE))[names.END_REASON] == "left"


def test_iterations_are_sampled_and_linked_to_their_requests(traced: Traced) -> None:
    """One step in 200, at a sampling of 0.5."""
    traces = [new_trace() for _ in range(3)]
    for _, headers in traces:
        assert complete(traced.mesh, headers, prompt="hello", max_tokens=100).status_code == 200
    eventually(lambda: any(span.name == names.STEP for span in traced.receiver.spans), "a step's span")
    step = next(span for span in traced.receiver.spans if span.name == names.STEP)
    assert not step.parent_span_id
    assert attributes(step)[names.DECODES] + attributes(step)[names.PREFILL_TOKENS] > 0

    def linked() -> set[bytes]:
        links = {link.trace_id for span in traced.receiver.spans if span.name == names.STEP for link in span.links}
        return links & {span.trace_id for span in traced.receiver.spans if span.name == "text_completion m"}

    eventually(linked, "a step that is linked to a request")


def test_a_killed_worker_leaves_no_open_trace(traced: Traced) -> None:
    """Last: the mesh has no worker afterwards."""
    trace_id, headers = new_trace()
    with streaming(traced.mesh, headers, prompt="hello", max_tokens=100) as lines:
        next(lines)
        traced.mesh.workers[0].kill()
        assert any(line.startswith('data: {"error"') for line in lines)
    spans = traced.whole(trace_id, names.STREAM, names.QUEUE, names.LOST)
    lost = traced.only(spans, names.LOST)
    assert traced.receiver.services[lost.span_id] == "headrace-scheduler"
    for name in (names.LOST, names.STREAM, "text_completion m"):
        span = traced.only(spans, name)
        assert span.status.code == span.status.STATUS_CODE_ERROR, name
    logged = traced.mesh.gateway.output()
    assert f'"trace_id": "{trace_id}"' in logged


def test_without_a_collector_everything_else_works_and_is_said_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    every = ("--otlp-endpoint", "http://127.0.0.1:9", "--trace-sampling", "1")
    worker = ("--simulate", "--simulate-vocab-size", str(VOCAB_SIZE), *every)
    with running_mesh(tiny, scheduler=every, worker=worker, gateway=every) as mesh:
        for index in range(3):
            assert mesh.text(prompt=f"p{index}", max_tokens=20, ignore_eos=True)
            eventually(lambda: "no collector at" in mesh.gateway.output(), "a word about it")
        for process in (mesh.gateway, *mesh.workers, mesh.scheduler):
            assert process.stop(timeout_s=20) == 0
            assert process.output().count("no collector at") <= 1
            assert "Traceback" not in process.output()
