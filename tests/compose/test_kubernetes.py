"""The manifests for Kubernetes, against its schemas (an unknown field is an error), the code and compose files."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from gateway.config import GatewayConfig
from headrace.nats_server import find_nats_server
from observability.listener import InternalListener
from scheduler.config import SchedulerConfig
from shared.config import options_of
from worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "compose" / "kubernetes"
SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text("utf-8"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]
CONFIGS: dict[str, type] = {"gateway": GatewayConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}
RESOURCES: list[str] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
PLAIN = [(name, one) for name in RESOURCES for one in yaml.safe_load_all((FOLDER / name).read_text())]
BY_NAME = {(one["kind"], one["metadata"]["name"]): one for _, one in PLAIN}
AUTOSCALING = [("hpa.yaml", yaml.safe_load((FOLDER / "autoscaling" / "hpa.yaml").read_text()))]


def merged(base: Any, patch: Any) -> Any:
    """As kustomize merges: objects by key, containers by name, anything else is replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in one for one in base + patch if one):
        named = {one["name"]: one for one in base} | {
            one["name"]: merged(next((o for o in base if o["name"] == one["name"]), {}), one) for one in patch
        }
        return list(named.values())
    return copy.deepcopy(patch)


GPU = merged(BY_NAME["Deployment", "worker"], yaml.safe_load((FOLDER / "gpu" / "worker.yaml").read_text()))
CHECKED = [*PLAIN, *AUTOSCALING, ("gpu/worker.yaml", GPU)]
WORKLOADS = {
    name: BY_NAME[kind, name] for kind, name in BY_NAME if kind in ("Deployment", "StatefulSet")
} | {"gpu worker": GPU}  # fmt: skip


TRANSFER = 9403
"""Where workers fetch KV blocks from one another: any free port, unless a policy must name it."""


@cache
def validator(kind: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(SCHEMAS["kinds"][kind] | {"$defs": SCHEMAS["$defs"]})


def faults(resource: dict[str, Any]) -> list[str]:
    return [f"{error.instance_path}: {error.message}" for error in validator(resource["kind"]).iter_errors(resource)]


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = WORKLOADS[name]["spec"]["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    return dict(found)


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in WORKLOADS:
        yield from ((name, one) for one in pod(name).get("initContainers", []) + pod(name)["containers"])


# --- the schemas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "resource"), CHECKED, ids=lambda one: one if isinstance(one, str) else one["kind"])
def test_the_schema_accepts_it(file: str, resource: dict[str, Any]) -> None:
    assert not faults(resource), file


def test_the_schemas_find_what_is_wrong() -> None:
    worker = BY_NAME["Deployment", "worker"]
    for path, value in (
        (("spec", "replica"), 1), (("spec", "template", "spec", "terminationGracePeriod"), 5),
        (("spec", "replicas"), "two"), (("spec", "template", "spec", "containers"), [{"image": "x"}]),
        (("spec", "template", "spec", "containers"), [{"name": "x", "livenessProb": {}}]),
    ):  # fmt: skip
        broken = copy.deepcopy(worker)
        place = broken
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert faults(broken), path
    assert SCHEMAS["version"].endswith("-strict")


def test_every_file_is_named_and_everything_is_in_one_namespace() -> None:
    assert sorted(RESOURCES) == sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
    for file, one in CHECKED:
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "headrace", file
    overlay = yaml.safe_load((FOLDER / "gpu" / "kustomization.yaml").read_text())
    assert overlay["resources"] == [".."] and overlay["patches"] == [{"path": "worker.yaml"}]


# --- the code -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CONFIGS, "gpu worker"])
def test_every_flag_exists_and_its_value_is_taken(name: str) -> None:
    service = name.split()[-1]
    command, *flags = container(name)["args"]
    assert command == service
    known = {opt.flag: opt for opt in options_of(CONFIGS[service])}
    for flag in flags:
        option, _, value = flag.partition("=")
        known[option].parse(value, flag)


def test_every_variable_is_an_option_of_some_service() -> None:
    known = {opt.env: opt for config in CONFIGS.values() for opt in options_of(config)}
    for key, value in BY_NAME["ConfigMap", "headrace"]["data"].items():
        known[key].parse(value, key)
    for name, one in containers():
        for variable in one.get("env", []):
            assert name == "nats" or variable["name"] in known or variable["name"] == "HF_HUB_OFFLINE"


@pytest.mark.parametrize("name", [*CONFIGS, "gpu worker"])
def test_ports_and_probes_are_those_of_the_listeners(name: str) -> None:
    config: Any = CONFIGS[name.split()[-1]]
    ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    assert ports.pop("metrics") == config.metrics_port
    ours = {"gateway": {"http": GatewayConfig.port}, "worker": {"transfer": TRANSFER}}
    assert ports == ours.get(name.split()[-1], {})
    annotations = WORKLOADS[name]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.metrics_port)
    probes = {kind: container(name)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert probes["startup"] == probes["liveness"]
    assert {kind: (probe["path"], probe["port"]) for kind, probe in probes.items() if kind != "startup"} == {
        "gateway": {"liveness": ("/health", "http"), "readiness": ("/health", "http")},
        "scheduler": {"liveness": ("/metrics", "metrics"), "readiness": ("/debug/scheduler", "metrics")},
        "worker": {"liveness": ("/metrics", "metrics"), "readiness": ("/ready", "metrics")},
    }[name.split()[-1]]
    source = {
        "gateway": ROOT / "gateway" / "app.py", "scheduler": ROOT / "scheduler" / "pages.py",
        "worker": ROOT / "worker" / "__main__.py",
    }[name.split()[-1]]  # fmt: skip
    assert f'"{probes["readiness"]["path"]}"' in source.read_text()
    assert '"/metrics"' in Path(InternalListener._answer.__code__.co_filename).read_text()


@pytest.mark.parametrize("name", ["gateway", "worker", "gpu worker"])
def test_a_pod_is_given_the_time_to_drain(name: str) -> None:
    (drain,) = (
        float(flag.partition("=")[2]) for flag in container(name)["args"] if flag.startswith("--drain-grace-s=")
    )
    wait = container(name).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert wait[0] == "sleep" and float(wait[1]) + drain + 5 <= pod(name)["terminationGracePeriodSeconds"]


def test_images_are_those_of_the_compose_stack() -> None:
    assert {(name, one["name"]): one["image"] for name, one in containers()} == {
        ("nats", "nats"): COMPOSE["nats"]["image"],
        ("scheduler", "scheduler"): COMPOSE["scheduler"]["image"],
        **{(name, "worker"): COMPOSE["worker"]["image"] for name in ("worker", "gpu worker")},
        ("gateway", "gateway"): COMPOSE["gateway"]["image"],
        **{(name, "model"): COMPOSE["model"]["image"] for name in ("worker", "gpu worker", "gateway")},
    }


# --- what it may do -------------------------------------------------------------------------------------------------


def test_nothing_runs_as_root_or_writes_outside_its_volumes() -> None:
    user = re.search(r"useradd --uid (\d+)", (ROOT / "compose" / "Dockerfile").read_text())
    assert user
    for name in WORKLOADS:
        context = pod(name)["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] == int(user[1]), name
        assert pod(name)["automountServiceAccountToken"] is False
    for name, one in containers():
        context = one["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"], name
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert one["resources"]["requests"] and one["resources"]["limits"]["memory"]


def test_each_service_sees_its_own_password_only() -> None:
    seen = {
        name: [
            (reference["name"], reference["key"])
            for variable in container(name)["env"]
            if (reference := variable.get("valueFrom", {}).get("secretKeyRef"))
        ]
        for name in ("nats", "gateway", "scheduler", "worker")
    }
    every = ("gateway", "scheduler", "worker", "observer", "routes")
    assert seen == {
        "nats": [("headrace-nats", key) for key in every],
        "gateway": [("headrace-nats", "gateway"), ("headrace-api", "key")],
        "scheduler": [("headrace-nats", "scheduler")],
        "worker": [("headrace-nats", "worker")],
    }
    operations = (ROOT / "docs" / "operations.md").read_text()
    assert all(f"--from-literal={key}=" in operations for key in every), "the command that makes them"


def test_no_service_is_without_a_budget_and_labels_find_their_pods() -> None:
    for name in ("nats", "scheduler", "worker", "gateway"):
        labels = {"app.kubernetes.io/name": name}
        assert BY_NAME["PodDisruptionBudget", name]["spec"]["selector"] == {"matchLabels": labels}
        assert WORKLOADS[name]["spec"]["selector"] == {"matchLabels": labels}
        assert labels.items() <= WORKLOADS[name]["spec"]["template"]["metadata"]["labels"].items()
    assert BY_NAME["Service", "nats"]["spec"]["clusterIP"] == "None"
    assert WORKLOADS["nats"]["spec"]["replicas"] == 3 and WORKLOADS["scheduler"]["spec"]["replicas"] == 2
    names = BY_NAME["ConfigMap", "headrace"]["data"]["HEADRACE_NATS"].split(",")
    assert names == [f"nats://nats-{index}.nats:4222" for index in range(3)]


def test_only_services_of_the_mesh_reach_nats_and_only_http_is_open() -> None:
    policies = {name: one["spec"] for (kind, name), one in BY_NAME.items() if kind == "NetworkPolicy"}
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    clients, nodes = policies["mesh-to-nats"]["ingress"]
    assert clients["ports"] == [{"port": 4222}] and nodes["ports"] == [{"port": 6222}]
    (workers,) = policies["workers-to-workers"]["ingress"]
    assert workers["from"] == [{"podSelector": policies["workers-to-workers"]["podSelector"]}]
    assert workers["ports"] == [{"port": TRANSFER}]
    for name in ("worker", "gpu worker"):
        assert {"--transfer-host=auto", f"--transfer-port={TRANSFER}"} <= set(container(name)["args"])
    (anybody,) = [one for spec in policies.values() for one in spec.get("ingress", []) if "from" not in one]
    assert anybody["ports"] == [{"port": GatewayConfig.port}]


# --- NATS and autoscaling -------------------------------------------------------------------------------------------


def test_nats_takes_the_configuration_and_it_grants_what_the_compose_stack_grants(tmp_path: Path) -> None:
    text: str = BY_NAME["ConfigMap", "nats"]["data"]["nats.conf"]
    ours = (ROOT / "compose" / "nats.conf").read_text()
    assert text[text.index("authorization {\n  users") :] == ours[ours.index("authorization {\n") :]
    environ = {"POD_NAME": "nats-0", "PATH": os.environ["PATH"]}
    for variable in container("nats")["env"][1:]:
        value = variable.get("value", "p0123abc").replace("$(ROUTES_PASSWORD)", "p0123abc")
        environ[variable["name"]] = value
    file = tmp_path / "nats.conf"
    file.write_text(text)
    command = [find_nats_server(), "-t", "--config", file]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ROUTES" in environ and len(json.loads(environ["ROUTES"])) == 3
    del environ["WORKER_PASSWORD"]
    assert subprocess.run(command, env=environ, capture_output=True).returncode != 0, "without its password"


def test_autoscalers_read_the_metric_and_keep_to_the_schedulers_bounds() -> None:
    (flag,) = (one for one in container("scheduler")["args"] if one.startswith("--scale-max-workers="))
    most = int(flag.partition("=")[2])
    (_, hpa), keda = AUTOSCALING[0], yaml.safe_load((FOLDER / "autoscaling" / "keda.yaml").read_text())
    assert hpa["spec"]["maxReplicas"] == keda["spec"]["maxReplicaCount"] == most
    assert hpa["spec"]["scaleTargetRef"]["name"] == keda["spec"]["scaleTargetRef"]["name"] == "worker"
    external = hpa["spec"]["metrics"][0]["external"]
    queries = " ".join(trigger["metadata"]["query"] for trigger in keda["spec"]["triggers"])
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for metric in (external["metric"]["name"], *re.findall(r"headrace_\w+", queries)):
        assert f"| `{metric}` |" in documented
    assert list(external["metric"]["selector"]["matchLabels"]) == ["model_name", "pool"]
