"""Alert rules, their runbooks and the Grafana dashboard against the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.metrics_docs import tables

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "observability" / "prometheus"
GROUPS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
CASES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "rules.test.yml").read_text())["tests"]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "observability" / "grafana" / "headrace.json").read_text())
DECLARED = [metric for metrics in tables().values() for metric in metrics]
LABELS = {series: set(metric.labels) for metric in DECLARED for series in metric.series}
NAME = re.compile(r"(?:headrace[_:]|vllm:|gen_ai_)[a-zA-Z0-9_:]*")


def unknown(expression: str) -> set[str]:
    """Names of metrics in a PromQL expression that nothing declares or records."""
    return set(NAME.findall(_without_strings(expression))) - set(LABELS) - RECORDED


def _without_strings(expression: str) -> str:
    return re.sub(r'"[^"]*"', '""', expression)


def wrong_labels(expression: str) -> list[str]:
    """Selections by a label that the metric is not declared with."""
    selections = re.findall(rf"({NAME.pattern})\{{([^}}]*)\}}", _without_strings(expression))
    return [
        f"{name}{{{label}}}"
        for name, inside in selections
        for label in re.findall(r"(\w+)\s*[=!]", inside)
        if label not in LABELS.get(name, set())
    ]


def test_the_checks_themselves_find_what_is_wrong() -> None:
    assert unknown('rate(headrace_step_tokens_total{kind="new"}[2m]) + headrace_stepp') == {"headrace_stepp"}
    assert wrong_labels('headrace_step_tokens_total{knd=~"new"}') == ["headrace_step_tokens_total{knd}"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_speak_of_metrics_that_there_are(rule: dict[str, Any]) -> None:
    assert not unknown(rule["expr"]) and not wrong_labels(rule["expr"])
    assert NAME.search(rule["expr"])


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    runbook = ROOT / alert["annotations"]["runbook"]
    text = runbook.read_text()
    assert text.startswith(f"# {name}\n") and "**What it means.**" in text and "**Look at**" in text
    index = (runbook.parent / "README.md").read_text()
    assert f"[{name}]({runbook.name}) | {alert['labels']['severity']} |" in index
    assert not set(NAME.findall(text)) - {metric.name for metric in DECLARED} - RECORDED


def test_every_runbook_has_its_alert() -> None:
    folder = ROOT / "docs" / "runbooks"
    assert {path.name for path in folder.glob("*.md")} - {"README.md"} == {
        Path(alert["annotations"]["runbook"]).name for alert in ALERTS.values()
    }


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_tested_both_ways(name: str) -> None:
    cases = [case for test in CASES for case in test["alert_rule_test"] if case["alertname"] == name]
    assert any(case.get("exp_alerts") for case in cases) and any(not case.get("exp_alerts") for case in cases)


def test_options_that_runbooks_name_exist() -> None:
    known = set(re.findall(r"`(--[a-z-]+)`", (ROOT / "docs" / "configuration.md").read_text()))
    for path in (ROOT / "docs" / "runbooks").glob("*.md"):
        assert set(re.findall(r"(--[a-z][a-z-]+)", path.read_text())) - {"--slowest"} <= known, path.name


def panels() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


@pytest.mark.parametrize(("title", "expression"), panels(), ids=lambda text: text[:40])
def test_panels_ask_for_metrics_that_there_are(title: str, expression: str) -> None:
    assert not unknown(expression) and not wrong_labels(expression)
    by = re.findall(r"by \(([^)]*)\)", expression)
    known = {"le", "instance", *(label for labels in LABELS.values() for label in labels)}
    assert {label.strip() for group in by for label in group.split(",")} <= known


def test_every_panel_says_what_it_shows_and_none_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert len(panel["description"]) > 10
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_the_dashboard_shows_every_kind_of_what_is_measured() -> None:
    """Whatever is told about load, latency, memory and losses is on it; bookkeeping may be left out."""
    shown = {name for _, expression in panels() for name in NAME.findall(_without_strings(expression))}
    left_out = {metric.name for metric in DECLARED if not set(metric.series) & shown}
    assert left_out == {
        "headrace_bad_messages_total", "headrace_deadline_drops_total", "headrace_gateway_bad_messages_total",
        "headrace_gateway_cancels_total", "headrace_gateway_dropped_token_entries_total", "headrace_gateway_ready",
        "headrace_idle_slot_iterations_total", "headrace_kv_copied_bytes", "headrace_plan_gaps_total",
        "headrace_resumed_hits_total", "headrace_scheduler_epoch", "headrace_worker_probes_total",
        "headrace_sequences_ended_total", "headrace_stale_plans_total",
        "headrace_worker_slots", "vllm:num_preemptions_total", "vllm:request_generation_tokens",
        "vllm:request_prompt_tokens", "vllm:request_success_total", "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_per_output_token_seconds", "gen_ai_server_time_to_first_token_seconds",
    }  # fmt: skip


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@promtool
def test_promtool_accepts_the_rules_and_their_cases_hold() -> None:
    subprocess.run(["promtool", "check", "rules", FOLDER / "rules.yml"], check=True)
    subprocess.run(["promtool", "test", "rules", FOLDER / "rules.test.yml"], check=True)


@promtool
def test_promtool_accepts_the_dashboards_queries(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{index}", "expr": expression.replace("$__rate_interval", "1m")}
        for index, (_, expression) in enumerate(panels())
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", tmp_path / "panels.yml"], check=True)
