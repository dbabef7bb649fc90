"""What ``--model`` means: ``default``, a local folder, a GGUF file, or a Hugging Face id. Always ends in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.models.cache import Progress
from headrace.models.default import DEFAULT_MODEL_ID, ensure_default_model
from headrace.models.error import ModelError
from headrace.models.gguf_file import ensure_gguf, is_gguf
from shared.model_name import GGUF_SUFFIX

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""What is fetched of a hub repository. No pickled weights and no Python: neither is ever loaded."""


def say(line: str) -> None:
    """The default progress: a line on stderr."""
    print(f"headrace: {line}", file=sys.stderr, flush=True)


def resolve_model(spec: str, progress: Progress = say) -> tuple[str, str]:
    """(local folder, name to serve it under) of ``--model spec``; fetches what is missing.

    A Hugging Face id is served under that id, a folder under its own name, a GGUF file under its name without the
    suffix. What exists locally wins over an id.
    Raises :class:`ModelError` where there is no usable model.
    """
    if spec == "default":
        return str(ensure_default_model(progress)), DEFAULT_MODEL_ID
    folder = Path(spec).expanduser()
    if folder.is_dir():
        _check_folder(folder, spec)
        return str(folder.resolve()), folder.resolve().name
    if folder.is_file():
        if not is_gguf(folder):
            raise ModelError(
                f"{spec}: is a file; --model takes a GGUF file, or the folder that holds config.json and *.safetensors"
            )
        converted = ensure_gguf(folder, progress)
        return str(converted), converted.name
    if spec.endswith(GGUF_SUFFIX):
        raise ModelError(f"{spec}: no such file")
    if spec.startswith(("/", ".", "~")) or spec.count("/") > 1:
        raise ModelError(f"{spec}: no such folder")
    snapshot = _snapshot(spec)
    _check_folder(snapshot, spec)
    return str(snapshot), spec


def _snapshot(model_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )  # fmt: skip

    try:
        return Path(snapshot_download(model_id, allow_patterns=PATTERNS))
    except HFValidationError:
        raise ModelError(f"{model_id!r}: neither a folder nor a Hugging Face id") from None
    except GatedRepoError:
        raise ModelError(f"{model_id}: access is gated; accept its terms on the hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"{model_id}: no such model on the Hugging Face hub") from None
    except LocalEntryNotFoundError:
        raise ModelError(f"{model_id}: not in the local Hugging Face cache, and the hub cannot be reached") from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{model_id}: {str(error).splitlines()[0]}") from None


def _check_folder(folder: Path, spec: str) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{spec}: has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{spec}: has no *.safetensors; other weight formats are not loaded")
