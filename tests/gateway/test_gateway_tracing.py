"""One trace per request: the caller's context in, spans out over OTLP, and the context that the mesh goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_mesh import RunningGateway
from loopback_http import HTTP
from otlp_receiver import Receiver, attributes, otlp_receiver

from observability.tracing import Tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT}-01"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


def test_the_callers_trace_goes_through_and_errors_end_it_too(tokenizer_folder: Path, receiver: Receiver) -> None:
    tracing = Tracing("gateway", "gw", receiver.url, sampling=0.0)
    with RunningGateway(tokenizer_folder, tracing) as gw:
        headers = {"traceparent": TRACEPARENT}
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0.5}
        HTTP.post(f"{gw.url}/v1/chat/completions", json=body, headers=headers)
        HTTP.post(f"{gw.url}/v1/completions", json={"prompt": []}, headers=headers)
        HTTP.post(f"{gw.url}/generate", json={"prompt": "not sampled"})
        HTTP.post(f"{gw.url}/generate", json={"prompt": "bad header"}, headers={"traceparent": "00-zz-xx-01"})
        submits = list(gw.mesh.submits)
    tracing.shutdown()
    spans = {span.name: span for span in receiver.spans}
    assert sorted(span.name for span in receiver.spans) == [
        "chat tiny", "receive", "receive", "stream", "text_completion tiny", "tokenize",
    ]  # fmt: skip
    chat = spans["chat tiny"]
    assert all(span.trace_id.hex() == TRACE_ID for span in spans.values())
    assert chat.parent_span_id.hex() == PARENT
    assert spans["tokenize"].parent_span_id == spans["stream"].parent_span_id == chat.span_id
    assert submits[0].traceparent == f"00-{TRACE_ID}-{chat.span_id.hex()}-01"
    found = attributes(chat)
    assert found["gen_ai.operation.name"] == "chat"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (3, 0.5)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (
        len(submits[0].prompt) // 4,
        3,
    )
    assert chat.start_time_unix_nano <= spans["tokenize"].start_time_unix_nano
    set_meanwhile = 50_000_000  # ns: the machine's clock may be
    assert spans["tokenize"].end_time_unix_nano <= spans["stream"].start_time_unix_nano + set_meanwhile
    assert spans["stream"].end_time_unix_nano == chat.end_time_unix_nano
    refused = spans["text_completion tiny"]
    assert attributes(refused)["error.type"] == "invalid"
    assert refused.status.code == refused.status.STATUS_CODE_ERROR


def test_without_an_endpoint_the_callers_context_still_travels(gw: RunningGateway, http: httpx.Client) -> None:
    http.post("/generate", json={"prompt": "x"}, headers={"traceparent": TRACEPARENT})
    http.post("/generate", json={"prompt": "x"})
    assert [submit.traceparent for submit in gw.mesh.submits] == [TRACEPARENT, ""]
