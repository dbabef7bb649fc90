"""Prometheus, Grafana and Jaeger of the stack: what is reachable, what is found, and that the files fit together."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import GatewayConfig
from scheduler.config import SchedulerConfig
from worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
MONITORING: dict[str, Any] = yaml.safe_load((COMPOSE / "monitoring.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = MONITORING["services"]
STACK: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())


def test_only_loopback_is_published() -> None:
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:${HEADRACE_") for port in service["ports"]), name


def test_grafana_and_jaeger_come_with_the_ui_profile_only() -> None:
    assert {name: service.get("profiles", []) for name, service in SERVICES.items()} == {
        "prometheus": [], "grafana": ["ui"], "jaeger": ["ui"],
    }  # fmt: skip


@pytest.mark.parametrize("name", [*SERVICES, *STACK])
def test_no_service_may_take_all_memory_gain_rights_or_write_beside_its_volumes(name: str) -> None:
    service = {**STACK, **SERVICES}[name]
    assert service["mem_limit"] and service["pids_limit"]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_what_runs_is_restarted_and_its_health_is_known() -> None:
    for name, service in {**STACK, **SERVICES}.items():
        once = name in ("passwords", "model")
        assert service["restart"] == ("no" if once else "unless-stopped"), name
        assert once or name == "jaeger" or service["healthcheck"]["test"], name


def test_prometheus_finds_every_replica_by_dns_at_the_port_where_its_metrics_are() -> None:
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    for name, config in (("gateway", GatewayConfig), ("scheduler", SchedulerConfig), ("worker", WorkerConfig)):
        (found,) = jobs[f"headrace-{name}"]["dns_sd_configs"]
        assert found["names"] == [name] and name in STACK
        assert (found["type"], found["port"]) == ("A", config.metrics_port)
        assert STACK[name]["environment"]["HEADRACE_METRICS_HOST"] == "0.0.0.0"
        assert not any(str(config.metrics_port) in port for port in STACK[name].get("ports", []))


def mounted(service: str) -> dict[str, Path]:
    """Path in the container -> file here, of what is mounted from the repository."""
    parts = [volume.split(":") for volume in SERVICES[service]["volumes"] if volume.startswith(".")]
    return {inside: (COMPOSE / outside).resolve() for outside, inside, _ in parts}


def test_what_prometheus_reads_is_mounted() -> None:
    files = mounted("prometheus")
    config = next(flag.split("=")[1] for flag in SERVICES["prometheus"]["command"] if "config.file" in flag)
    assert files[config] == COMPOSE / "prometheus" / "prometheus.yml"
    assert [files[rules] for rules in PROMETHEUS["rule_files"]] == [ROOT / "observability" / "prometheus" / "rules.yml"]


def test_what_grafana_reads_is_mounted_and_points_at_the_stack() -> None:
    files = mounted("grafana")
    provisioning = files["/etc/grafana/provisioning"]
    sources = yaml.safe_load((provisioning / "datasources" / "headrace.yml").read_text())
    assert sources["apiVersion"] == 1
    assert {one["type"]: one["url"] for one in sources["datasources"]} == {
        "prometheus": "http://prometheus:9090", "jaeger": "http://jaeger:16686",
    }  # fmt: skip
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "headrace.yml").read_text())["providers"]
    folder = files[provider["options"]["path"]]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert json.loads((folder / home.name).read_text())["title"] == "Headrace"
    assert str(home.parent) == provider["options"]["path"]


def test_traces_go_to_the_stacks_jaeger_unless_told_otherwise() -> None:
    (flag,) = SERVICES["jaeger"]["command"]
    assert flag == "--set=receivers.otlp.protocols.http.endpoint=0.0.0.0:4318"
    for name in ("gateway", "scheduler", "worker"):
        endpoint = STACK[name]["environment"]["HEADRACE_OTLP_ENDPOINT"]
        assert endpoint == "${HEADRACE_OTLP_ENDPOINT:-http://jaeger:4318}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    text = (COMPOSE / "prometheus" / "prometheus.yml").read_text()
    rules = ROOT / "observability" / "prometheus" / "rules.yml"
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/headrace/rules.yml", str(rules)))
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True)
