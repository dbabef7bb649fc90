"""Every metric of a running mesh against ``docs/metrics.md``, and that they tell what happened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_http import HTTP
from mesh_stack import Process
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from whole_mesh import SIMULATED, Mesh, at_once, eventually, running_mesh

pytestmark = pytest.mark.mesh

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `([^`]+)` \| (\w+) \| (\w+) \| ([^|]*) \| (.+) \|")


def documented(service: str) -> dict[str, tuple[str, str, set[str], str]]:
    """name -> (type, unit, labels, meaning)."""
    section = DOCS.read_text().split(f"## {service.capitalize()}\n")[1].split("\n## ")[0]
    rows = [ROW.fullmatch(line) for line in section.splitlines() if line.startswith("| `")]
    assert rows and all(rows)
    return {
        row.group(1): (row.group(2), row.group(3), set(re.findall(r"`(\w+)`", row.group(4))), row.group(5))
        for row in rows
        if row is not None
    }


def scraped(process: Process) -> dict[str, Metric]:
    port = re.search(r"metrics on http://[^:]+:(\d+)/", process.output())
    assert port is not None
    text = HTTP.get(f"http://127.0.0.1:{port.group(1)}/metrics").text
    families = text_string_to_metric_families(text)
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


@pytest.fixture(scope="module")
def mesh(tiny: Path) -> Iterator[Mesh]:
    """A pool of 8 blocks, which two requests of 100 tokens outgrow; some traffic has gone through."""
    with running_mesh(tiny, scheduler=("--no-growth-aware-admission",), worker=(*SIMULATED, "--simulate-blocks", "8"),
                      ) as running:  # fmt: skip
        at_once([lambda i=i: running.text(prompt=f"p{i}", max_tokens=100, ignore_eos=True) for i in range(2)])
        assert running.post(prompt="x", max_tokens=100_000).status_code == 400
        running.quiescence()
        new = 'headrace_step_tokens_total{kind="new"}'  # counters are brought up to date four times a second
        eventually(lambda: running.metrics(running.scheduler)[new] >= 200, "every token")
        yield running


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_every_metric_is_documented_with_its_type_labels_and_meaning(mesh: Mesh, service: str) -> None:
    process = mesh.workers[0] if service == "worker" else getattr(mesh, service)
    found, known = scraped(process), documented(service)
    assert set(found) == set(known)
    for name, family in found.items():
        kind, _, labels, meaning = known[name]
        assert (family.type, family.documentation) == (kind, meaning), name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, name


def test_they_tell_what_happened(mesh: Mesh) -> None:
    gateway, scheduler, worker = (
        mesh.metrics(process) for process in (mesh.gateway, mesh.scheduler, mesh.workers[0])
    )  # fmt: skip
    kinds = {
        kind: scheduler[f'headrace_step_tokens_total{{kind="{kind}"}}'] for kind in ("new", "prefill", "recompute")
    }
    assert kinds["new"] >= 200 and kinds["prefill"] > 0 and kinds["recompute"] > 0
    assert scheduler["vllm:num_preemptions_total"] == scheduler['headrace_preemptions_total{cause="no_free_block"}'] > 0
    rows = sum(worker[f'headrace_worker_rows_total{{kind="{kind}"}}'] for kind in ("prefill", "decode", "padding"))
    assert worker["vllm:iteration_tokens_total_sum"] == rows
    assert worker["headrace_batch_size_count"] == worker["headrace_step_seconds_count"] > 0
    assert 0 < worker["headrace_worker_busy_seconds_total"] == pytest.approx(worker["headrace_step_seconds_sum"])
    assert scheduler["headrace_bus_round_trip_seconds_count"] > 0
    assert scheduler["headrace_apply_seconds_count"] == worker["headrace_step_seconds_count"]
    for stage in ("queue", "prefill", "decode"):
        assert scheduler[f'vllm:request_{stage}_time_seconds_count{{model_name="m"}}'] == 2
    assert scheduler['vllm:prefix_cache_queries_total{model_name="m"}'] > 0
    assert worker['vllm:iteration_tokens_total_count{model_name="m"}'] == worker["headrace_batch_size_count"]
    assert scheduler["headrace_scheduler_leading"] == 1 and scheduler["headrace_queue_age_seconds"] == 0
    assert gateway["headrace_gateway_submit_seconds_count"] == 2
    assert gateway["headrace_gateway_loop_lag_seconds_count"] > 0
    assert gateway['vllm:request_time_per_output_token_seconds_count{model_name="m"}'] == 2
    operation = 'gen_ai_operation_name="text_completion",gen_ai_provider_name="headrace",gen_ai_request_model="m"'
    assert gateway[f'gen_ai_server_request_duration_seconds_count{{error_type="",{operation}}}'] == 2
    assert gateway[f'gen_ai_server_request_duration_seconds_count{{error_type="invalid",{operation}}}'] == 1
    assert gateway[f"gen_ai_server_time_to_first_token_seconds_count{{{operation}}}"] == 2
