"""Make ``kubernetes_schemas.json``: the strict JSON schemas of the kinds that the manifests use, and of nothing else.

    pip install kubernetes-validate          # in an environment of its own: it unpacks to a hundred megabytes
    python tests/compose/kubernetes_schemas.py v1.37.0

The package has the schemas made of Kubernetes's own OpenAPI description (both Apache-2.0). Texts are left out.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

KINDS = {
    "Namespace": "v1", "ConfigMap": "v1", "Service": "v1", "Deployment": "apps/v1", "StatefulSet": "apps/v1",
    "PodDisruptionBudget": "policy/v1", "NetworkPolicy": "networking.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
}  # fmt: skip


def without_texts(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_texts(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_texts(value)
        for key, value in schema.items()
        if not (key.startswith("x-kubernetes-") or (key == "description" and isinstance(value, str)))
    }


def named(schema: Any) -> set[str]:
    return set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))


def schemas(folder: Path) -> dict[str, Any]:
    every = without_texts(json.loads((folder / "_definitions.json").read_text("utf-8"))["$defs"])
    roots = {}
    for kind, version in KINDS.items():
        group = version.removesuffix("v1").removesuffix("v2").strip("/").split(".")[0]
        file = folder / "-".join(filter(None, (kind.lower(), group, version.rpartition("/")[2] + ".json")))
        text = file.read_text("utf-8").replace("/api/_definitions.json#/", "#/")
        roots[kind] = without_texts(json.loads(text))
    wanted, found = named(roots), set[str]()
    while wanted:
        found |= wanted
        wanted = named([every[name] for name in wanted]) - found
    return {"version": folder.name, "kinds": roots, "$defs": {name: every[name] for name in sorted(found)}}


def main(version: str) -> None:
    spec = importlib.util.find_spec("kubernetes_validate")
    assert spec is not None and spec.origin is not None, "kubernetes-validate is not installed"
    made = schemas(Path(spec.origin).parent / "kubernetes-json-schema" / f"{version}-local-strict")
    Path(__file__).with_suffix(".json").write_text(json.dumps(made, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
