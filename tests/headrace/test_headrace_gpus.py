"""Workers of one machine have GPUs of their own, or the mesh is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import gpus
from headrace.gpus import VISIBLE, shares, visible
from headrace.launch import Mesh, child_specs
from headrace.settings import read_settings
from headrace.up_checks import check
from shared.config import ConfigError
from worker.config import WorkerConfig


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of four GPUs, with a driver's tool that says so, and torch for them."""
    tool = tmp_path / "nvidia-smi"
    lines = "".join(
        f"GPU {index}: NVIDIA H200 (UUID: GPU-{index}a)\\n  MIG 1g.18gb Device 0: x\\n" for index in range(4)
    )
    tool.write_text(f"#!/bin/sh\n[ \"$*\" = -L ] && printf '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cu130")
    gpus._count.cache_clear()
    yield
    gpus._count.cache_clear()


def of(workers: int, environ: dict[str, str] | None = None, **options: object) -> list[str | None]:
    given = shares(WorkerConfig(**options), workers, environ or {})  # type: ignore[arg-type]
    assert len(given) == workers
    return [one.get(VISIBLE) for one in given]


def test_each_worker_sees_its_own() -> None:
    assert of(4) == ["0", "1", "2", "3"] and of(3) == ["0", "1", "2"]
    assert of(2, tensor_parallel=2) == ["0,1", "2,3"]
    assert of(2, {VISIBLE: "3, GPU-1a,0"}) == ["3", "GPU-1a"]


@pytest.mark.parametrize(
    ("workers", "environ", "options"),
    [
        (1, {}, {"tensor_parallel": 2}),
        (8, {}, {"device": "cpu"}),
        (8, {}, {"simulate": True}),
        (8, {VISIBLE: ""}, {}),
        (8, {VISIBLE: "-1,0"}, {}),
        (8, {VISIBLE: "7"}, {}),
    ],
)
def test_nothing_is_divided_where_one_worker_has_all_or_none_has_any(
    workers: int, environ: dict[str, str], options: dict[str, object]
) -> None:
    assert of(workers, environ, **options) == [None] * workers


@pytest.mark.parametrize(
    ("workers", "environ", "each", "complaint"),
    [
        (5, {}, 1, "--workers 5: 5 GPUs are needed, and there are 4"),
        (3, {}, 2, "--workers 3 with --tensor-parallel 2: 6 GPUs are needed, and there are 4"),
        (2, {VISIBLE: "2"}, 1, "--workers 2: 2 GPUs are needed, and there is 1"),
    ],
)
def test_too_few_are_refused(workers: int, environ: dict[str, str], each: int, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of(workers, environ, tensor_parallel=each)
    assert str(refused.value) == complaint


def test_a_build_of_torch_for_cpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert of(9) == [None] * 9
    assert of(2, device="cuda") == ["0", "1"], "it is asked for: the worker says what it lacks"


def test_a_machine_without_a_driver_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert visible({}) == [] and visible({VISIBLE: "0,1"}) == ["0", "1"]
    assert of(2) == [None, None]


def test_up_starts_workers_with_their_gpus_or_not_at_all() -> None:
    settings = read_settings(["--workers", "2", "--tensor-parallel", "2"], {})
    specs = {spec.name: spec.env or {} for spec in child_specs(settings, Mesh("/m", "m", "nats://h:1", ""), {})}
    assert {name: env.get(VISIBLE) for name, env in specs.items()} == {
        "scheduler": None, "gateway": None, "worker-0": "0,1", "worker-1": "2,3",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="6 GPUs are needed, and there are 4"):
        check(read_settings(["--workers", "3", "--tensor-parallel", "2"], {}))
