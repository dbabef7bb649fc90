"""One HTTP request's whole way: body, valid request, tokens, submission, answer; and its end, whichever it is.

Everything that can be refused is refused before the response starts, with its HTTP status. From then on an error is
an event in the stream. Whatever happens, the request is released: what may still run of it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import Receive, Scope, Send

from gateway.access import access_of
from gateway.body import ClientGone, check_media_type, parse_json, timely_body
from gateway.choices import check_told, choice_text, prompt_report
from gateway.deadline import deadline_ns
from gateway.decoding import Decoding
from gateway.endpoints import Endpoint, Request, WriterContext
from gateway.errors import ApiError, unavailable
from gateway.flight import Flight
from gateway.gateway import Gateway
from gateway.idempotency import read_keyed
from gateway.ledger import RequestRecord
from gateway.models import Target
from gateway.numbered_events import NumberedWriter
from gateway.offering import Part
from gateway.parameters import CompletionRequest
from gateway.pool import pool_of
from gateway.responses import header, id_header, request_id, send_error, send_whole
from gateway.structured import check_served
from gateway.visit import Visit, record_answer, sampling_attributes
from gateway.writers import StreamWriter, Writer
from observability import conventions as names
from observability.logs import about
from shared.flight_record import AnswerTrace
from shared.ids import new_request_id
from shared.messages import Outcome, Submit, pack_tokens

log = logging.getLogger("headrace.gateway")

BLOCKED_S = 0.02  # a client that takes so long to take a piece is slow
MOST_BLOCKED = 64  # such times that are remembered of one answer
CONCURRENT_OFFERS = 32  # submissions of one request that wait for their reply at once


class AnswerApp:
    """The ASGI application of one endpoint that answers prompts."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        visit = self._visit(scope)
        gateway.enter(visit.access)
        try:
            await self._answer(scope, receive, send, visit)
        except ApiError as error:
            visit.outcome = error.outcome
            self._give_back(visit)
            await send_error(send, error, visit.headers)
        except ClientGone:
            visit.outcome = "aborted"
        finally:
            self._give_back(visit)
            gateway.leave()
            self._account(visit)

    def _give_back(self, visit: Visit) -> None:
        self._gateway.give_back(visit.access, visit.flight.prompt_tokens + visit.flight.completion_tokens)

    def _visit(self, scope: Scope) -> Visit:
        arrival_ns = time.time_ns()
        models = self._gateway.models
        model = models.first.name if len(models) == 1 else ""  # which one of several shows in its body
        span = self._gateway.tracing.start(
            f"{self._endpoint.operation} {model}".rstrip(),
            arrival_ns,
            header(scope, b"traceparent"),
            {
                names.OPERATION_NAME: self._endpoint.operation,
                names.PROVIDER_NAME: names.PROVIDER,
                names.REQUEST_MODEL: model,
                names.CLIENT_REQUEST_ID: request_id(scope),
            },
            server=True,
        )
        flight = Flight(time.monotonic(), models.first.metrics)
        visit = Visit(request_id(scope), arrival_ns, flight, span, [id_header(scope)], model)
        visit.access = access_of(scope)
        return visit

    def _account(self, visit: Visit) -> None:
        metrics, flight = self._gateway.metrics, visit.flight
        of_model = flight.metrics
        metrics.requests.labels(self._endpoint.name, visit.outcome).inc()
        duration_s = time.monotonic() - flight.arrival_s
        if visit.outcome == "finished":
            of_model.e2e_latency.observe(duration_s)
            of_model.request_generation_tokens.observe(flight.completion_tokens)
            of_model.cached_prompt_tokens.inc(flight.cached_tokens)
        after_first = flight.completion_tokens - len(flight.choices)
        ttft_s = flight.first_token_s - flight.arrival_s if flight.first_token_s else 0.0
        spent_s = sum(choice.last_token_s - choice.first_token_s for choice in flight.choices)
        per_token_s = spent_s / after_first if after_first > 0 else 0.0
        metrics.answered(self._endpoint.operation, visit.model, visit.outcome, duration_s, ttft_s, per_token_s)
        record_answer(self._gateway.tracing, visit, time.time_ns())
        log.info(
            "%s %s: %d prompt and %d answer tokens in %.3f s",
            self._endpoint.name, visit.outcome, flight.prompt_tokens, flight.completion_tokens, duration_s,
            extra=about(visit.request_id, visit.span.traceparent),
        )  # fmt: skip

    def _trace(self, visit: Visit, request_id: str) -> AnswerTrace:
        """For ``headrace explain``."""
        outcome = "finished" if visit.answered and visit.flight.error is None else "not finished"
        return AnswerTrace(
            request_id, visit.answer_id, visit.request_id, self._endpoint.name, visit.arrival_ns, visit.read_ns,
            visit.tokenised_ns, visit.accepted_ns, visit.finished_ns or time.time_ns(), outcome, visit.blocked,
        )  # fmt: skip

    async def _answer(self, scope: Scope, receive: Receive, send: Send, visit: Visit) -> None:
        gateway, flight = self._gateway, visit.flight
        gateway.check_open()
        visit.enter()
        if not self._endpoint.any_media_type:
            check_media_type(scope)
        visit.keyed = read_keyed(scope, visit.access.tenant)
        body = await timely_body(scope, receive, gateway.config.max_body_bytes, gateway.config.body_timeout_s)
        visit.read_ns = time.time_ns()
        if gateway.draining:
            raise unavailable("the gateway is draining", Outcome.DRAINING.value)
        gateway.check_some_room(visit.request_id)  # before anything costs: a refusal must be cheap
        fields = parse_json(body)
        if visit.keyed is not None:
            visit.keyed.read(self._endpoint.name, body, fields)
        request = self._endpoint.parse(fields, gateway.config)
        if visit.keyed is not None:
            visit.keyed.check(request.delivery.stream, self._endpoint.event_ids)
        visit.deadline_ns = deadline_ns(visit.arrival_ns, request.delivery.timeout_s, scope)
        visit.pool = pool_of(scope)
        target = await gateway.target(request.model)
        visit.aim(target, self._endpoint.operation)
        gateway.check_room(target.served.name, _num_sequences(request), 0, visit.request_id)
        records = await self._open(request, target, visit)
        visit.tokenised_ns = time.time_ns()
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(_watch_client(receive, flight))
                await self._offer(records, flight)
                if flight.error is None and not flight.client_gone:
                    visit.accepted_ns = time.time_ns()
                    flight.metrics.prompt_tokens.inc(flight.prompt_tokens)
                    flight.metrics.request_prompt_tokens.observe(flight.prompt_tokens)
                    tokenizer = target.served.tokenizer
                    place = visit.place
                    created_s = visit.arrival_ns // 1_000_000_000 if place is None else place.created_s
                    context = WriterContext(
                        flight, visit.answer_id, created_s, target.name, tokenizer.vocabulary, tokenizer.tools
                    )
                    writer = self._endpoint.writer(request, context)
                    if request.delivery.stream:
                        numbered = writer if place is None else NumberedWriter(writer, flight, place)
                        await self._stream(send, numbered, visit)
                    else:
                        await self._reply(send, writer, visit, request.decoding)
                watch.cancel()
        finally:
            for record in records:
                gateway.dispatch.release(record)
                gateway.dispatch.tell(record, self._trace(visit, record.submit.request_id))
        if visit.answered:
            return
        if flight.error is not None and not flight.client_gone:
            raise flight.error
        raise ClientGone

    async def _open(self, request: Request, target: Target, visit: Visit) -> list[RequestRecord[Part]]:
        """Tokenise, settle the parameters, and enter one request for each prompt into the ledger."""
        gateway, flight = self._gateway, visit.flight
        model, tokenizer = target.info, target.served.tokenizer
        check_served(request.decoding.constraint, model)
        await tokenizer.grammars.check(request.decoding.constraint)
        began_ns = time.time_ns()
        prompts = await self._endpoint.tokenize(request, tokenizer, model)
        flight.prompt_tokens = sum(len(prompt) for prompt in prompts)
        gateway.tracing.record(
            names.TOKENIZE, began_ns, time.time_ns(), visit.span.traceparent,
            {names.INPUT_TOKENS: flight.prompt_tokens},
        )  # fmt: skip
        decoding = request.decoding
        most = self._endpoint.default_max_tokens(gateway.config)
        if decoding.max_tokens is None:
            most = gateway.default_answer(target, prompts, visit.pool, most)
        sampling = decoding.bind(model, max(len(prompt) for prompt in prompts), most)
        check_told(decoding, request.report, sampling.max_tokens, prompts)
        packed = [pack_tokens(prompt) for prompt in prompts]
        if visit.keyed is not None and request.delivery.stream and self._endpoint.event_ids:
            visit.place = visit.keyed.place(
                target.name, packed, sampling.max_tokens, len(prompts) * decoding.samples,
                1 + request.delivery.include_usage, visit.arrival_ns // 1_000_000_000,
            )  # fmt: skip
        visit.span.set(sampling_attributes(sampling, decoding.n, request.delivery.stream))
        tokens = flight.prompt_tokens + len(prompts) * sampling.max_tokens * (decoding.beam_width or decoding.samples)
        gateway.check_room(model.name, _num_sequences(request), tokens, visit.request_id)
        visit.charge(tokens)
        name = new_request_id().removeprefix("req-") if visit.keyed is None else visit.keyed.answer_name
        visit.answer_id = self._endpoint.answer_id(name)
        submits = [
            Submit(
                request_id=new_request_id(),
                attempt=1,
                gateway=gateway.dispatch.gateway_id,
                model=model.name,
                prompt=prompt,
                sampling=sampling,
                arrival_ns=visit.arrival_ns,
                n=decoding.samples,
                prompt_index=index,
                # Log-probabilities come from computing: what the prefix cache holds is not computed again.
                cache_salt=new_request_id()
                if decoding.prompt_logprobs >= 0
                else visit.access.salt(request.delivery.cache_salt),
                priority=visit.access.priority(request.delivery.priority),
                tenant=visit.access.tenant,
                tenant_weight=visit.access.weight,
                deadline_ns=visit.deadline_ns,
                traceparent=visit.span.traceparent,
                client_id=visit.request_id,
                answer_id=visit.answer_id,
                adapter=target.adapter,
                pool=visit.pool,
            )
            for index, prompt in enumerate(packed)
        ]
        for submit in submits:
            gateway.dispatch.check_size(submit)
        records = []
        vocabulary = tokenizer.vocabulary
        for index, (submit, prompt) in enumerate(zip(submits, prompts, strict=True)):
            source = request.prompts[index] if isinstance(request, CompletionRequest) else prompt
            told = prompt_report(request.report, source, prompt, vocabulary)
            choices = [
                flight.add_choice(
                    choice_text(decoding, request.report, prompt, told, vocabulary), told, visit.place is not None
                )
                for _ in range(decoding.samples)
            ]
            records.append(gateway.dispatch.open(submit, Part(flight, choices, told)))
        return records

    async def _offer(self, records: list[RequestRecord[Part]], flight: Flight) -> None:
        """Submit every prompt; the first refusal fails the flight, and the rest are not offered any more."""
        slots = asyncio.Semaphore(CONCURRENT_OFFERS)

        async def offer(record: RequestRecord[Part]) -> None:
            async with slots:
                try:
                    await self._gateway.dispatch.offer(record)
                except ApiError as error:
                    flight.fail(error)

        if len(records) == 1:
            await offer(records[0])
            return
        async with asyncio.TaskGroup() as group:
            for record in records:
                group.create_task(offer(record))

    async def _reply(self, send: Send, writer: Writer, visit: Visit, decoding: Decoding) -> None:
        flight = visit.flight
        pieces: list[list[str]] = [[] for _ in flight.choices]
        while progress := await flight.wait():
            for choice, text in progress:
                pieces[choice.index].append(text)
        if flight.error is None and not flight.client_gone:
            kept = flight.keep_best(decoding.samples, decoding.n)
            answer = writer.whole(["".join(pieces[index]) for index in kept])
            self._give_back(visit)
            await send_whole(send, 200, answer, visit.headers)
            visit.outcome = "finished"
            visit.finished_ns = time.time_ns()
            visit.answered = True

    async def _stream(self, send: Send, writer: StreamWriter, visit: Visit) -> None:
        """Send what has gathered, as fast as the client takes it."""
        flight = visit.flight
        headers = [
            (b"content-type", writer.stream_media_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *visit.headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if opening := writer.opening():
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        while progress := await flight.wait():
            began_s = time.monotonic()
            await send({"type": "http.response.body", "body": writer.progress(progress), "more_body": True})
            took_s = time.monotonic() - began_s
            if took_s > BLOCKED_S and len(visit.blocked) < MOST_BLOCKED:
                now_ns = time.time_ns()
                visit.blocked.append((now_ns - int(took_s * 1e9), now_ns))
        if flight.client_gone:
            return
        if flight.error is not None:
            log.warning("a stream broke off: %s", flight.error, extra=about(visit.request_id, visit.span.traceparent))
            last, outcome = writer.error(flight.error), "failed"
        else:
            last, outcome = writer.closing(), "finished"
        self._give_back(visit)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        if not flight.client_gone:  # who takes nothing for too long is cut off by the protocol
            visit.outcome = outcome
            visit.finished_ns = time.time_ns()
            visit.answered = True


async def _watch_client(receive: Receive, flight: Flight) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.abandon()


def _num_sequences(request: Request) -> int:
    """How many the request puts into the queue."""
    prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    return prompts * (1 if request.decoding.beam_width else request.decoding.samples)
