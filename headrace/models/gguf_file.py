"""``--model file.gguf``: the file is looked at, converted once to a folder in the cache, and served from there.

Dequantised and written as float32 safetensors, since transformers reads a GGUF at some 10 s for 100 million weights
while safetensors are mapped. Gateway and worker then both have an ordinary folder.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.models.cache import CONVERSION, Progress, cache_root, is_made, made_once, megabytes
from headrace.models.error import ModelError
from shared.model_name import GGUF_SUFFIX

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"

NOT_READ = {"rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors without which the model would be another one, and that transformers' loader passes over."""


def is_gguf(path: Path) -> bool:
    """True for a file that is one, or whose name says that it means to be one."""
    if path.suffix == GGUF_SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_folder(path: Path) -> Path:
    """Where the converted ``path`` lies, whether or not it is there yet: a folder under the file's own name."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return cache_root() / "models" / "gguf" / digest / path.name.removesuffix(GGUF_SUFFIX)


def ensure_gguf(path: Path, progress: Progress) -> Path:
    """Convert ``path`` unless that has been done since it last changed; return the folder.

    Raises :class:`ModelError`, one line, for a file that is not a whole GGUF, or whose model can't be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    folder = gguf_folder(path)
    marker: dict[str, object] = {
        "id": folder.name,
        "conversion": CONVERSION,
        "source": str(path.resolve()),
        "source_bytes": found.st_size,
        "source_mtime_ns": found.st_mtime_ns,
    }
    if is_made(folder, marker):
        return folder
    weights = check(path)  # before anything is written

    def make(work: Path) -> Path:
        from headrace.models.convert import convert_gguf

        needed = 4 * weights
        if shutil.disk_usage(work).free < needed:
            raise ModelError(f"{path}: {needed / 1e9:.1f} GB are needed in {cache_root()} for its float32 weights")
        progress(f"converting {path.name} to safetensors (float32, once)")
        convert_gguf(path, work / "model")
        progress(f"the converted model goes to {folder} ({megabytes(work / 'model')} MB)")
        return work / "model"

    try:
        return made_once(folder, marker, make, progress)
    except ModuleNotFoundError as error:
        raise _not_installed(path, error) from None


def check(path: Path) -> int:
    """How many weights the file holds. Raises :class:`ModelError` unless it is a whole GGUF of one part."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path}: is not a GGUF file")
            version = int.from_bytes(file.read(4), "little")
        from gguf import GGUFReader
        from gguf.gguf_reader import READER_SUPPORTED_VERSIONS
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None
    except ModuleNotFoundError as error:
        raise _not_installed(path, error) from None
    try:
        reader = GGUFReader(path)
    except Exception:  # noqa: BLE001  its parser trips over a damaged file in many ways, most of them numpy's
        if version not in READER_SUPPORTED_VERSIONS:
            raise ModelError(f"{path}: is of GGUF version {version}, which can't be read") from None
        size = path.stat().st_size
        raise ModelError(
            f"{path}: is truncated or damaged: its {size:,} bytes are not what its header tells of"
        ) from None
    _check_parts(path, reader)
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def _check_parts(path: Path, reader: GGUFReader) -> None:
    parts = reader.get_field("split.count")
    if parts is not None and int(parts.contents()) > 1:
        raise ModelError(f"{path}: is one of {parts.contents()} parts; merge them first (llama-gguf-split --merge)")
    architecture = reader.get_field("general.architecture")
    if architecture is None or not reader.tensors:
        raise ModelError(f"{path}: holds no model")
    scaling = reader.get_field(f"{architecture.contents()}.rope.scaling.type")
    lost = NOT_READ & {tensor.name for tensor in reader.tensors}
    if lost or (scaling is not None and scaling.contents() != "none"):
        what = min(lost) if lost else f"rope scaling {scaling.contents()!r}"  # type: ignore[union-attr]
        raise ModelError(f"{path}: {what} can't be read from a GGUF; take the model's safetensors")


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _not_installed(path: Path, error: ModuleNotFoundError) -> ModelError:
    return ModelError(f"{path}: reading a GGUF needs {error.name}; pip install 'headrace[worker,models]'")
