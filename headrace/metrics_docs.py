"""``docs/metrics.md``, made from the declarations: ``headrace metrics-docs > docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from observability.metric_table import Described, described
from shared.config import Parser

HEAD = """\
# Metrics

<!-- Made by `headrace metrics-docs`; do not edit. -->

Each service serves Prometheus text at `/metrics` of its internal listener (`--metrics-host`, `--metrics-port`: 9400 the
gateway's, 9401 the scheduler's, 9402 a worker's). `vllm:*` have vLLM's names and its label `model_name` where the
meaning is the same, so that its dashboards and alerts find them. Its label `engine` there is not: a mesh's engines are
its workers, each an `instance` of its own. `gen_ai_*` are OpenTelemetry's conventions for generative AI as Prometheus
spells them; their status is *development*, so they may change with the conventions.

Of a histogram there are `_bucket` (with the label `le`), `_sum` and `_count`. Unit `count`: plain numbers of what the
name says. Alert rules are in `observability/prometheus/rules.yml`, each with a [runbook](runbooks/README.md); a Grafana
dashboard is in `observability/grafana/`.
"""


def tables() -> dict[str, list[Described]]:
    """Service -> its metrics. Needs what gateway and worker need, but no model and no bus."""
    from gateway.metrics import GatewayMetrics
    from scheduler.metrics import SchedulerMetrics
    from worker.metrics import WorkerMetrics

    scheduler, worker = CollectorRegistry(), CollectorRegistry()
    SchedulerMetrics(scheduler)
    WorkerMetrics(worker, "model")
    gateway = GatewayMetrics("model").registry
    return {"gateway": described(gateway), "scheduler": described(scheduler), "worker": described(worker)}


def metrics_markdown() -> str:
    """The whole document."""
    parts = [HEAD]
    for service, metrics in tables().items():
        rows = "".join(map(_row, metrics))
        parts.append(
            f"## {service.capitalize()}\n\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n{rows}"
        )
    return "\n".join(parts)


def main(argv: Sequence[str]) -> int:
    Parser(prog="headrace metrics-docs", description="Print docs/metrics.md.").parse_args(argv)
    print(metrics_markdown(), end="")
    return 0


def _row(one: Described) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{one.name}` | {one.kind} | {one.unit} | {labels} | {one.text} |\n"
