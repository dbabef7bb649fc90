"""Streams and whole answers go on over HTTP, whatever is lost behind the gateway: each right token, once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_mesh import MODEL, RunningGateway, running_gateway
from loopback_http import HTTP
from otlp_receiver import attributes, otlp_receiver

from observability.tracing import Tracing
from shared.messages import Outcome, SchedulerBeat, Submit, SubmitReply, TokenEntry, pack_tokens, unpack_tokens

BODY: dict[str, Any] = {"prompt": "some words", "max_tokens": 12, "ignore_eos": True, "seed": 5, "temperature": 1}
Answer = concurrent.futures.Future[httpx.Response]


@contextlib.contextmanager
def asked(gw: RunningGateway, **more: Any) -> Iterator[Answer]:
    """A completion that was accepted; the mesh steps only where the test says so."""
    gw.mesh.stepping = False
    before = len(gw.mesh.submits)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{gw.url}/v1/completions", json=BODY | more, timeout=30)
        gw.until(lambda: len(gw.mesh.submits) > before)
        gw.until(lambda: all(record.epoch for record in gw.gateway.dispatch.ledger))
        try:
            yield answer
        finally:
            gw.mesh.stepping = True


def steps(gw: RunningGateway, count: int) -> None:
    for _ in range(count):
        gw.call(gw.mesh.step())


def accepted_again(gw: RunningGateway, attempt: int = 2) -> Submit:
    gw.until(lambda: gw.mesh.submits[-1].attempt == attempt)
    gw.until(lambda: all(record.epoch for record in gw.gateway.dispatch.ledger))
    return gw.mesh.submits[-1]


def texts_of(answer: httpx.Response) -> list[str]:
    """The text of each choice; fails if the answer is not whole."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [choice["text"] for choice in answer.json()["choices"]]
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
    texts: dict[int, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


def expected(gw: RunningGateway, submit: Submit) -> list[str]:
    return [gw.decode(gw.expected(submit, choice)) for choice in range(submit.n)]


def lost(gw: RunningGateway) -> None:
    gw.call(gw.mesh.event(gw.mesh.submits[-1], "lost", "its worker died"))


def moved(gw: RunningGateway) -> None:
    gw.call(gw.mesh.event(gw.mesh.submits[-1], "moved", "its worker is stopping"))


def new_epoch(gw: RunningGateway) -> None:
    gw.call(gw.mesh.succeed())


def gap(gw: RunningGateway) -> None:
    gw.bus.lose = lambda subject, payload: ".tokens." in subject
    steps(gw, 1)
    gw.bus.lose = lambda subject, payload: False
    steps(gw, 1)


def reconnect(gw: RunningGateway) -> None:
    gw.losses += 1
    gw.loop.call_soon_threadsafe(gw.gateway.dispatch.look_for_losses)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("happens", [lost, moved, new_epoch, gap, reconnect])
def test_it_goes_on(tokenizer_folder: Path, happens: Callable[[RunningGateway], None], stream: bool) -> None:
    cause = {"new_epoch": "epoch"}.get(happens.__name__, happens.__name__)
    more = {"stream_options": {"include_usage": True}} if stream else {}
    with running_gateway(tokenizer_folder) as gw:
        gw.mesh.cached = 1
        with asked(gw, n=2, stream=stream, **more) as answer:
            steps(gw, 3)
            first = gw.mesh.submits[0]
            happens(gw)
            again = accepted_again(gw)
            assert (again.arrival_ns, again.sampling, again.prompt, again.n) == (
                first.arrival_ns, first.sampling, first.prompt, 2
            )  # fmt: skip
            for choice, packed in enumerate(again.resumed):
                assert unpack_tokens(packed) == gw.expected(first, choice)[: len(packed) // 4]
                assert len(packed) == 4 * 3
        assert texts_of(answer.result()) == expected(gw, first)
        assert [cancel.attempt for cancel in gw.mesh.cancels] == []
        assert gw.metric("headrace_gateway_resumes_total", cause=cause) == 1
        assert gw.metric("headrace_gateway_interruption_seconds_count") == 1
        assert gw.metric("headrace_gateway_resume_failures_total") == 0
        prompt = len(first.prompt) // 4
        usage = answer.result().json()["usage"] if not stream else json.loads(
            answer.result().text.split("data: ")[-2]
        )["usage"]  # fmt: skip
        assert usage == {
            "prompt_tokens": prompt, "completion_tokens": 24, "total_tokens": prompt + 24,
            "prompt_tokens_details": {"cached_tokens": 1},
        }  # fmt: skip
        assert gw.metric("vllm:prompt_tokens_total", model_name=MODEL) == prompt
        assert gw.metric("vllm:generation_tokens_total", model_name=MODEL) == 24


def test_choices_that_are_lost_one_by_one_are_one_resume(gw: RunningGateway) -> None:
    resumes = gw.metric("headrace_gateway_resumes_total", cause="lost")
    with asked(gw, n=3) as answer:
        steps(gw, 2)
        first = gw.mesh.submits[-1]
        for choice in range(3):
            gw.call(gw.mesh.event(first, "lost", "its worker died", choice))
        accepted_again(gw)
    assert texts_of(answer.result()) == expected(gw, first)
    assert gw.metric("headrace_gateway_resumes_total", cause="lost") == resumes + 1
    assert len(gw.mesh.submits) == 2


def test_a_finished_entry_that_was_lost(gw: RunningGateway) -> None:
    """The scheduler has ended it, and says that it does not know what the gateway waits for."""
    with asked(gw) as answer:
        steps(gw, 11)
        gw.bus.lose = lambda subject, payload: ".tokens." in subject
        steps(gw, 1)
        gw.bus.lose = lambda subject, payload: False
        assert not gw.mesh.running
        lost(gw)
        assert len(accepted_again(gw).resumed[0]) == 4 * 11
    assert texts_of(answer.result()) == expected(gw, gw.mesh.submits[0])


def test_a_stop_string_in_one_of_the_choices(gw: RunningGateway) -> None:
    """What stopped here stays so, and its cancel names the attempt that runs."""
    gw.mesh.script = lambda submit, choice, position: gw.encode("abcdefghij")[position] + choice
    with asked(gw, n=2, stop=["c"], max_tokens=9) as answer:
        steps(gw, 1)
        lost(gw)
        accepted_again(gw)
        steps(gw, 1)
        gw.until(lambda: len(gw.mesh.cancels) == 1)
        cancel = gw.mesh.cancels[0]
        assert (cancel.request_id, cancel.attempt, cancel.choice) == (gw.mesh.submits[0].request_id, 2, 1)
        lost(gw)
        again = accepted_again(gw, 3)
        assert (again.done_choices, [len(packed) // 4 for packed in again.resumed]) == ([1], [2, 0])
    assert texts_of(answer.result()) == ["ab", "b"]
    gw.until(lambda: len(gw.mesh.cancels) == 2)
    assert (gw.mesh.cancels[1].attempt, gw.mesh.cancels[1].choice) == (3, 0)


@pytest.mark.parametrize("outcome", ["no_worker", "unknown_model", "draining", "queue_full", "stale_epoch"])
def test_a_resume_that_is_refused_for_now_is_offered_again(gw: RunningGateway, outcome: str) -> None:
    with asked(gw) as answer:
        steps(gw, 2)
        first = gw.mesh.submits[0]
        refused: list[int] = []

        def refuse(submit: Submit) -> SubmitReply | None:
            refused.append(submit.attempt)
            return SubmitReply(Outcome(outcome), 7) if len(refused) < 4 else None

        gw.mesh.refuse = refuse
        lost(gw)
        accepted_again(gw)
        assert refused == [2] * 4
    assert texts_of(answer.result()) == expected(gw, first)


@pytest.mark.parametrize(("outcome", "status"), [("invalid", 503), ("never_fits", 503), ("deadline", 504)])
def test_a_resume_that_is_refused_for_good_is_an_error(gw: RunningGateway, outcome: str, status: int) -> None:
    failures = gw.metric("headrace_gateway_resume_failures_total")
    with asked(gw) as answer:
        gw.mesh.refuse = lambda submit: SubmitReply(Outcome(outcome), 7, "because")
        lost(gw)
        assert answer.result().status_code == status
    assert "because" in answer.result().json()["error"]["message"]
    assert gw.metric("headrace_gateway_resume_failures_total") == failures + 1


def test_past_the_timeout_it_is_an_error(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, resume_timeout_s=0.5) as gw:
        for stream in (True, False):
            with asked(gw, stream=stream) as answer:
                steps(gw, 2)
                gw.mesh.refuse = lambda submit: SubmitReply(Outcome.NO_WORKER, 7, "nobody is there")
                lost(gw)
                told = answer.result().text
                gw.mesh.refuse = lambda submit: None
            assert "could not be resumed within 0.5 s: nobody is there" in told
            assert "[DONE]" not in told and answer.result().status_code == (200 if stream else 503)
        gw.until(lambda: len(gw.gateway.dispatch.ledger) == 0)
        assert gw.metric("headrace_gateway_resume_failures_total") == 2


def test_a_client_that_leaves_while_it_is_being_resumed(gw: RunningGateway) -> None:
    """Whatever of it may run is cancelled: the attempt before, and the one that nobody may have heard of."""
    gw.mesh.stepping = False
    body = json.dumps(BODY).encode()
    with socket.create_connection(("127.0.0.1", gw.port), timeout=10) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        gw.until(lambda: any(record.epoch for record in gw.gateway.dispatch.ledger))
        first = gw.mesh.submits[0]
        gw.mesh.refuse = lambda submit: SubmitReply(Outcome.NO_WORKER, 7)
        offers = gw.mesh.offers
        gap_entry = TokenEntry(first.request_id, 1, 0, 5, [50])
        gw.call(gw.mesh.send("gw", [gap_entry]))
        gw.until(lambda: gw.mesh.offers > offers)
        assert gw.mesh.running, "nobody has told the mesh of the gap"
    gw.until(lambda: not gw.mesh.running and not len(gw.gateway.dispatch.ledger))
    gw.until(lambda: len(gw.mesh.cancels) == 2)
    assert {(cancel.request_id, cancel.attempt, cancel.choice) for cancel in gw.mesh.cancels} == {
        (first.request_id, 1, -1), (first.request_id, 2, -1),
    }  # fmt: skip
    offers = gw.mesh.offers
    assert HTTP.post(f"{gw.url}/v1/models").status_code == 405  # some loop iterations later
    assert gw.mesh.offers == offers


def test_prompt_log_probabilities_are_computed_again(gw: RunningGateway, http: httpx.Client) -> None:
    prompt = "some words of a prompt"
    whole = http.post("/v1/completions", json=BODY | {"prompt": prompt, "prompt_logprobs": 1, "logprobs": 1}).json()
    gw.mesh.submits.clear()
    with asked(gw, prompt=prompt, prompt_logprobs=1, logprobs=1) as answer:
        steps(gw, 2)
        lost(gw)
        accepted_again(gw)
    assert answer.result().json()["choices"] == whole["choices"]
    salts = [submit.cache_salt for submit in gw.mesh.submits]
    assert len(set(salts)) == 2 and all(salts)


def test_the_best_are_the_best_of_all_their_tokens(gw: RunningGateway, http: httpx.Client) -> None:
    body = {"n": 2, "best_of": 5}
    undisturbed = texts_of(http.post("/v1/completions", json=BODY | body))
    gw.mesh.submits.clear()
    with asked(gw, **body) as answer:
        steps(gw, 5)
        lost(gw)
        accepted_again(gw)
        steps(gw, 3)
        gap(gw)
        accepted_again(gw, 3)
    assert texts_of(answer.result()) == undisturbed
    first = gw.mesh.submits[0]
    scores = [sum(map(gw.mesh.score, gw.expected(first, choice))) for choice in range(5)]
    best = sorted(range(5), key=lambda choice: (-scores[choice], choice))[:2]
    assert undisturbed == [gw.decode(gw.expected(first, choice)) for choice in best]


def test_a_beam_search_starts_over(gw: RunningGateway) -> None:
    with asked(gw, n=2, use_beam_search=True, max_tokens=3) as answer:
        lost(gw)
        again = accepted_again(gw)
        assert (again.resumed, again.done_choices) == ([], [])
        found = [TokenEntry(again.request_id, 2, choice, 0, [50, 51, 52 + choice], "length", 3) for choice in (0, 1)]
        gw.call(gw.mesh.send("gw", found))
        assert texts_of(answer.result()) == [gw.decode([50, 51, 52]), gw.decode([50, 51, 53])]
        gw.mesh.running.clear()


def test_a_resume_is_on_the_requests_trace(tokenizer_folder: Path) -> None:
    with otlp_receiver() as receiver:
        tracing = Tracing("gateway", "gw", receiver.url, sampling=1.0)
        with RunningGateway(tokenizer_folder, tracing) as gw:
            with asked(gw) as answer:
                lost(gw)
                accepted_again(gw)
            assert texts_of(answer.result())
        tracing.shutdown()
        spans = {span.name: span for span in receiver.spans}
    resume = spans["resume"]
    found = attributes(resume)
    assert (found["headrace.cause"], found["headrace.attempt"]) == ("lost", 2)
    assert found["headrace.request_id"] == gw.mesh.submits[0].request_id
    assert resume.parent_span_id == spans["text_completion tiny"].span_id
    assert resume.start_time_unix_nano < resume.end_time_unix_nano


# --- first offers -----------------------------------------------------------------------------------------------------


def test_a_mesh_that_was_ready_is_waited_for(gw: RunningGateway) -> None:
    gw.mesh.workers = 0
    gw.until(lambda: gw.gateway.why_not_ready() is not None)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        bodies = {"/v1/completions": BODY, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]}}
        answers = [pool.submit(httpx.post, gw.url + path, json=body) for path, body in bodies.items()]
        assert HTTP.get(f"{gw.url}/ready").status_code == 503, "it says at once how it is"
        gw.until(lambda: gw.gateway.in_flight == 3)
        unknown = HTTP.post(f"{gw.url}/v1/completions", json=BODY | {"model": "another"})
        assert unknown.status_code == 404
        assert not any(answer.done() for answer in answers)
        gw.mesh.workers = 1
        assert [answer.result().status_code for answer in answers] == [200] * 3


@pytest.mark.parametrize("outcome", ["no_worker", "unknown_model", "draining", "stale_epoch"])
def test_a_first_offer_that_is_refused_for_a_moment(gw: RunningGateway, http: httpx.Client, outcome: str) -> None:
    refused: list[str] = []

    def refuse(submit: Submit) -> SubmitReply | None:
        refused.append(submit.request_id)
        return SubmitReply(Outcome(outcome), 7) if len(refused) < 3 else None

    gw.mesh.refuse = refuse
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert len(refused) == 3 and len(set(refused)) == 1
    assert [submit.attempt for submit in gw.mesh.submits] == [1]


def test_a_request_that_a_scheduler_accepted_as_another_took_over(tokenizer_folder: Path) -> None:
    """Its acceptance comes behind the beat of the one that leads: whoever accepted it will not run it."""
    with running_gateway(tokenizer_folder) as gw:
        epoch = gw.mesh.epoch
        successions: list[asyncio.Task[None]] = []

        def refuse(submit: Submit) -> SubmitReply | None:
            if submit.attempt > 1:
                return None
            gw.mesh.submits.append(submit)
            gw.gateway.dispatch._on_scheduler_beat(SchedulerBeat("next", epoch + 1, []))
            successions.append(gw.loop.create_task(gw.mesh.succeed()))
            return SubmitReply(Outcome.ACCEPTED, epoch)

        gw.mesh.refuse = refuse
        assert texts_of(HTTP.post(f"{gw.url}/v1/completions", json=BODY)) == expected(gw, gw.mesh.submits[0])
        assert [submit.attempt for submit in gw.mesh.submits] == [1, 2]


def test_tokens_and_losses_may_overtake_the_reply(gw: RunningGateway) -> None:
    """The reply to the first attempt is lost; its tokens come, then its loss; all before it is asked again."""
    gw.mesh.stepping = False
    gw.bus.lose = lambda subject, payload: False
    lost_replies: list[str] = []
    publish = gw.bus.publish

    async def swallow(subject: str, payload: bytes) -> None:
        if subject.startswith("_INBOX") and not lost_replies:
            lost_replies.append(subject)
            return
        await publish(subject, payload)

    gw.bus.publish = swallow  # type: ignore[method-assign]
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{gw.url}/v1/completions", json=BODY, timeout=30)
            gw.until(lambda: len(gw.mesh.submits) == 1)
            steps(gw, 2)
            lost(gw)
            again = accepted_again(gw)
            assert again.resumed == [pack_tokens(gw.expected(again)[:2])]
            gw.mesh.stepping = True
            assert texts_of(answer.result()) == expected(gw, again)
    finally:
        gw.bus.publish = publish  # type: ignore[method-assign]
    assert lost_replies
