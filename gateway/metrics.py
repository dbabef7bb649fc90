"""The gateway's metrics, declared once (``docs/metrics.md``). Names are vLLM's where the meaning is the same, and
those of OpenTelemetry's conventions for generative AI as Prometheus spells them (their status is *development*).

One registry per process object, so that several gateways can live in one test process. Token latencies are booked per
batch of tokens, not per token, and never inside a decision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from observability import conventions as names
from observability.lean_metrics import LeanHistogram, LeanNumber, lean_counters, lean_histograms

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
LATENCY_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
TPOT_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
ROUND_TRIP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
INTERRUPTION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 60.0)
GEN_AI_DURATION_BUCKETS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
GEN_AI_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
GEN_AI_TPOT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Those of one model: the label ``model_name``. What an adapter is asked for counts for its base model."""

    prompt_tokens: Counter
    cached_prompt_tokens: Counter
    generation_tokens: LeanNumber
    time_to_first_token: Histogram
    inter_token_latency: LeanHistogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    success: Callable[[str], Counter]  # by why a choice ended

    def choice_finished(self, reason: str, tokens: int, decode_s: float) -> None:
        """``decode_s``: from its first token to its last."""
        self.success(reason).inc()
        if tokens > 1:
            self.time_per_output_token.observe(decode_s / (tokens - 1))


class GatewayMetrics:
    """Every metric of one gateway. ``outcome`` is finished, aborted, failed, or why it was refused."""

    def __init__(self, *models: str) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "headrace_gateway_requests", "HTTP requests for an answer, by how they ended", ["endpoint", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "headrace_gateway_requests_in_flight", "HTTP requests being worked on", registry=registry
        )
        self.ready = Gauge("headrace_gateway_ready", "1 if a completion can succeed", registry=registry)
        self.dropped_entries = Counter(
            "headrace_gateway_dropped_token_entries",
            "Token entries dropped: duplicates, older attempts or epochs, requests that are gone",
            registry=registry,
        )
        self.bad_messages = Counter(
            "headrace_gateway_bad_messages", "Messages on the bus that could not be read", registry=registry
        )
        self.cancels = Counter("headrace_gateway_cancels", "Cancels published", registry=registry)

        def gen_ai(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            every = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", *labels]
            return Histogram(name, text, every, unit="seconds", buckets=buckets, registry=registry)

        self._gen_ai_duration = gen_ai(
            "gen_ai_server_request_duration_seconds", "From a request's arrival to its end, whichever it is",
            GEN_AI_DURATION_BUCKETS_S, "error_type",
        )  # fmt: skip
        self._gen_ai_ttft = gen_ai(
            "gen_ai_server_time_to_first_token_seconds", "From arrival to the first token, of answers that finished",
            GEN_AI_TTFT_BUCKETS_S,
        )  # fmt: skip
        self._gen_ai_tpot = gen_ai(
            "gen_ai_server_time_per_output_token_seconds", "For each token after the first, of answers that finished",
            GEN_AI_TPOT_BUCKETS_S,
        )  # fmt: skip
        self.submit_seconds = Histogram(
            "headrace_gateway_submit_seconds", "From a submit to the scheduler's reply: both ways over the bus",
            unit="seconds", buckets=ROUND_TRIP_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.resubmits = Counter(
            "headrace_gateway_resubmits", "Submits sent again: no reply came, or the scheduler had changed",
            registry=registry,
        )  # fmt: skip
        self.resumes = Counter(
            "headrace_gateway_resumes",
            "Requests offered again behind the tokens that are here: lost or moved by the scheduler's word, a gap in "
            "the tokens, another scheduler's epoch, a reconnect of this process, or a mesh that stayed away",
            ["cause"], registry=registry,
        )  # fmt: skip
        for cause in ("lost", "moved", "epoch", "gap", "reconnect", "mesh"):
            self.resumes.labels(cause)
        self.resume_failures = Counter(
            "headrace_gateway_resume_failures", "Requests that ended with an error since they could not be resumed",
            registry=registry,
        )  # fmt: skip
        self.interruption_seconds = Histogram(
            "headrace_gateway_interruption_seconds", "From a loss noticed to the request's next token",
            unit="seconds", buckets=INTERRUPTION_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.loop_lag_seconds = Histogram(
            "headrace_gateway_loop_lag_seconds", "How late the event loop woke what was due, seen 4 times a second",
            unit="seconds", buckets=LAG_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._of = _by_model(registry, models)

    def of(self, model: str) -> ModelMetrics:
        return self._of[model]

    def answered(
        self, operation: str, model: str, outcome: str, duration_s: float, ttft_s: float, per_token_s: float
    ) -> None:
        """The GenAI metrics of one request. ``model``: empty if it was never known; ``ttft_s`` and ``per_token_s``: 0
        where there was no such token.
        """
        labels = (operation, names.PROVIDER, model)
        finished = outcome == "finished"
        self._gen_ai_duration.labels(*labels, "" if finished else outcome).observe(duration_s)
        if finished and ttft_s:
            self._gen_ai_ttft.labels(*labels).observe(ttft_s)
        if finished and per_token_s:
            self._gen_ai_tpot.labels(*labels).observe(per_token_s)


def _by_model(registry: CollectorRegistry, models: Sequence[str]) -> dict[str, ModelMetrics]:
    label = "model_name"

    def histogram(name: str, text: str, buckets: tuple[float, ...], unit: str = "") -> Histogram:
        return Histogram(name, text, [label], unit=unit, buckets=buckets, registry=registry)

    success = Counter("vllm:request_success", "Choices that ended well", [label, "finished_reason"], registry=registry)
    cached = Counter(
        "vllm:prompt_tokens_cached", "Prompt tokens of finished requests that the prefix cache held", [label],
        registry=registry,
    )  # fmt: skip
    prompt = Counter("vllm:prompt_tokens", "Prompt tokens of accepted requests", [label], registry=registry)
    generated = lean_counters(registry, "vllm:generation_tokens", "Tokens generated for clients", label, models)
    ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS_S, "seconds")
    itl = lean_histograms(
        registry, "vllm:inter_token_latency_seconds", "Between two tokens of a choice", label, models, ITL_BUCKETS_S
    )
    tpot = histogram(
        "vllm:request_time_per_output_token_seconds", "For each token after the first, mean of a finished choice",
        TPOT_BUCKETS_S, "seconds",
    )  # fmt: skip
    e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end", LATENCY_BUCKETS_S, "seconds")
    prompts = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS)
    answers = histogram("vllm:request_generation_tokens", "Tokens generated for a request", TOKEN_BUCKETS)
    return {
        model: ModelMetrics(
            prompt_tokens=prompt.labels(model),
            cached_prompt_tokens=cached.labels(model),
            generation_tokens=generated[model],
            time_to_first_token=ttft.labels(model),
            inter_token_latency=itl[model],
            time_per_output_token=tpot.labels(model),
            e2e_latency=e2e.labels(model),
            request_prompt_tokens=prompts.labels(model),
            request_generation_tokens=answers.labels(model),
            success=functools.partial(success.labels, model),
        )
        for model in models
    }
