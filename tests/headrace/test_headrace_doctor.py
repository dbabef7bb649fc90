"""``headrace doctor``: names what is wrong, above all another owner of our import names."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace import doctor
from kernels import choice
from kernels.cpu import library
from kernels.flash import libraries


def installed(folder: Path, name: str, files: list[str]) -> importlib.metadata.Distribution:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return importlib.metadata.PathDistribution(info)


def test_another_owner_of_an_import_name_is_found(tmp_path: Path) -> None:
    distributions = [
        installed(tmp_path, "kernels", ["kernels/__init__.py", "kernels/utils.py"]),
        installed(tmp_path, "python-gateway", ["gateway/__init__.py"]),
        installed(tmp_path, "headrace", ["gateway/__init__.py", "kernels/__init__.py"]),
        installed(tmp_path, "innocent", ["innocent/kernels/__init__.py", "shared/README.txt", "worker.py"]),
    ]
    assert doctor.owners(distributions) == {"kernels": {"kernels"}, "gateway": {"python-gateway"}}


def test_the_clash_is_a_problem_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clash = [installed(tmp_path, "kernels", ["kernels/__init__.py"])]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: clash)
    findings = list(doctor.check_packages())
    assert [finding.level for finding in findings] == ["problem"]
    assert "'kernels'" in findings[0].text
    assert "pip uninstall kernels" in findings[0].text


def test_a_package_imported_from_elsewhere_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "observability").mkdir()
    (tmp_path / "observability" / "__init__.py").touch()
    program = (
        "import sys; from headrace import doctor\n"
        "sys.modules.pop('observability', None); sys.path.insert(0, sys.argv[1])\n"
        "print([f.text for f in doctor.check_packages() if f.level == 'problem'])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert f"'observability' is imported from {tmp_path / 'observability'}" in done.stdout


def test_this_installation_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    output = capsys.readouterr().out
    for subject in ("python", "packages", "nats", "torch", "kernels", "model", "port"):
        assert f" {subject} " in output


def test_a_taken_port_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_free", lambda host, port: port != 8000)
    noted = [finding.text for finding in doctor.check_ports() if finding.level == "note"]
    assert noted == ["port 8000 on 127.0.0.1 is taken; choose another with --port"]


def test_missing_nats_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [finding.level for finding in doctor.check_nats_server()] == ["problem"]


def test_the_kernels_for_the_cpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> library.Missing:
        return library.Missing("not built; install a C++ compiler")

    def refused() -> library.Missing:
        raise library.IsaError("HEADRACE_CPU_ISA: this processor has no avx2")

    for find, level, text in ((missing, "note", "install a C++ compiler"), (refused, "problem", "has no avx2")):
        monkeypatch.setattr(library, "find", find)
        (finding,) = doctor.check_cpu_kernels()
        assert (finding.level, finding.subject) == (level, "kernels")
        assert text in finding.text


def test_the_kernels_for_gpus_are_named_with_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(libraries, "installed", lambda: iter([(2, "2.8.3")]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [(finding.level, finding.text) for finding in doctor.check_gpu_kernels()] == [
        ("ok", "Triton 3.6.0 for GPUs, of which there is none here"),
        ("note", "flash-attn 2.8.3: there is no GPU here"),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert [(finding.level, finding.text) for finding in doctor.check_gpu_kernels()] == [
        ("ok", "Triton 3.6.0 for GPUs"),
        ("ok", "flash-attn 2.8.3: serves fresh prompts; its pages hold a multiple of 256 tokens, not 16"),
    ]
    monkeypatch.setattr(choice, "triton_version", lambda: "")
    monkeypatch.setattr(libraries, "installed", lambda: iter([]))
    assert [finding.level for finding in doctor.check_gpu_kernels()] == ["note"]


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    assert [finding.level for finding in doctor.check_model_cache()] == ["note"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert [finding.level for finding in doctor.check_model_cache()] == ["problem"]
