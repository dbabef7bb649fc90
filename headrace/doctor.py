"""``headrace doctor``: is this installation able to run a mesh, and if not, what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.launch import is_free
from headrace.models.cache import cache_root
from headrace.models.default import default_model_path, has_default_model
from headrace.nats_server import NatsServerError, find_nats_server
from headrace.services import OUR_PACKAGES, SERVICES
from kernels.cpu import library
from kernels.cpu.build import ISAS
from shared.config import Parser
from shared.ports import taken

OUR_DISTRIBUTION = "headrace"
NEEDED_FREE_BYTES = 2 << 30
"""The default model: the wheel, the GGUF and the converted folder, for a moment side by side."""


@dataclass(frozen=True)
class Finding:
    """``level``: ok, note (works, but know this) or problem (a mesh will not run as it is)."""

    level: str
    subject: str
    text: str


def main(argv: Sequence[str]) -> int:
    """Exit 0 without problems, 1 with some. With ``--gpu`` the rest is :mod:`headrace.gpu_check`'s."""
    if "--gpu" in argv:
        from headrace.gpu_check.main import main as check_gpu

        return check_gpu([word for word in argv if word != "--gpu"])
    made = Parser(prog="headrace doctor", description="Check this installation.")
    made.add_argument(
        "--gpu", action="store_true", help="check and measure the GPU path instead; `headrace doctor --gpu --help`"
    )
    made.parse_args(argv)
    findings = list(examine())
    for finding in findings:
        print(f"{finding.level:<8} {finding.subject:<12} {finding.text}")
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def examine() -> Iterator[Finding]:
    yield from check_python()
    yield from check_packages()
    yield from check_nats_server()
    yield from check_torch()
    yield from check_cpu_kernels()
    yield from check_gpu_kernels()
    yield from check_model_cache()
    yield from check_ports()


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "python", f"{version} at {sys.executable}")
    if sys.platform != "linux":
        yield Finding("note", "python", f"on {sys.platform}; Linux is what is tested")


def check_packages() -> Iterator[Finding]:
    """Who else owns an import name of ours, and where each really comes from."""
    clashes = owners(importlib.metadata.distributions())
    for package, others in sorted(clashes.items()):
        names = ", ".join(sorted(others))
        yield Finding(
            "problem", "packages", f"the import name {package!r} is also owned by {names}; pip uninstall {names}"
        )
    home = Path(__file__).resolve().parent.parent
    for package in OUR_PACKAGES:
        spec = importlib.util.find_spec(package)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None:
            yield Finding("problem", "packages", f"{package!r} cannot be imported")
        elif origin.parent.parent != home:
            yield Finding("problem", "packages", f"{package!r} is imported from {origin.parent}, not from {home}")
    if not clashes:
        yield Finding("ok", "packages", f"import names are ours, from {home}")


def owners(distributions: Iterable[importlib.metadata.Distribution]) -> dict[str, set[str]]:
    """Our import names that other distributions install too: package -> names of those distributions.

    Hugging Face's ``kernels`` is the known case: transformers looks for it, and would find ours, or the reverse.
    """
    clashes: dict[str, set[str]] = {}
    for distribution in distributions:
        name = distribution.metadata["Name"] or "?"
        if name.lower() == OUR_DISTRIBUTION:
            continue
        for path in distribution.files or ():
            if len(path.parts) > 1 and path.parts[0] in OUR_PACKAGES and path.suffix in (".py", ".so"):
                clashes.setdefault(path.parts[0], set()).add(name)
    return clashes


def check_nats_server() -> Iterator[Finding]:
    try:
        binary = find_nats_server()
        version = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (NatsServerError, OSError, subprocess.TimeoutExpired) as error:
        yield Finding("problem", "nats", str(error))
    else:
        yield Finding("ok", "nats", f"{version} at {binary}")


def check_torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("problem", "torch", f"{error}; workers need it (pip install 'headrace[worker]')")
        return
    if torch.cuda.is_available():
        yield Finding("ok", "torch", f"{torch.__version__} on {torch.cuda.get_device_name()}")
    else:
        yield Finding("ok", "torch", f"{torch.__version__} on the CPU, {torch.get_num_threads()} threads")
        if torch.version.cuda:
            yield Finding("note", "torch", f"built for CUDA {torch.version.cuda}, but no GPU is usable")


def check_cpu_kernels() -> Iterator[Finding]:
    try:
        found = library.find()
    except library.IsaError as error:
        yield Finding("problem", "kernels", str(error))
        return
    if isinstance(found, library.Library):
        yield Finding("ok", "kernels", f"C++ for the CPU, {found.isa} of {', '.join(ISAS)}")
    else:
        yield Finding("note", "kernels", f"no C++ kernels for the CPU: {found.reason}")


def check_gpu_kernels() -> Iterator[Finding]:
    """What is installed for GPUs, and of what use it is on the first one."""
    try:
        import torch

        from kernels import choice
        from kernels.flash.libraries import installed
    except ImportError:
        return  # said of torch already
    compute = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    version = choice.triton_version()
    if version:
        yield Finding("ok", "kernels", f"Triton {version} for GPUs{'' if compute else ', of which there is none here'}")
    elif compute:
        yield Finding("note", "kernels", "no Triton, so no GPU worker (pip install triton)")
    machine = choice.Machine("cuda", compute or (0, 0), version, dict(installed()))
    for foreign in choice.libraries(machine):
        use = choice.usefulness(foreign) if compute else "there is no GPU here"
        yield Finding("ok" if "serves" in use else "note", "kernels", f"{foreign.name}: {use}")


def check_model_cache() -> Iterator[Finding]:
    if has_default_model():
        yield Finding("ok", "model", f"the default model is at {default_model_path()}")
        return
    root = cache_root()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("problem", "model", f"the cache {root} cannot be written; set HEADRACE_CACHE")
    elif shutil.disk_usage(existing).free < NEEDED_FREE_BYTES:
        yield Finding("problem", "model", f"less than 2 GiB free at {root} for the default model; set HEADRACE_CACHE")
    else:
        yield Finding("note", "model", f"the default model is not fetched yet; headrace up puts it into {root}")


def check_ports() -> Iterator[Finding]:
    """The default ports. Only the gateway's own must be free: the others give way."""
    for name, service in SERVICES.items():
        declaration: Any = service.declaration()
        wanted = [("metrics_host", "metrics_port")] + ([("host", "port")] if name == "gateway" else [])
        for host, port in ((getattr(declaration, h), getattr(declaration, p)) for h, p in wanted):
            free = is_free(host, port)
            is_metrics = port == declaration.metrics_port
            text = f"{port} of the {name}{' (metrics)' if is_metrics else ''} is free"
            if not free:
                text = taken(host, port, "--metrics-port" if is_metrics else "--port")
                text += "; headrace up takes a free one" if is_metrics else ""
            yield Finding("ok" if free else "note", "port", text)
