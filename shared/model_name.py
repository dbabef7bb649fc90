"""Under which name a model is served: one rule, or gateway and workers would never meet."""

from __future__ import annotations

from pathlib import Path

GGUF_SUFFIX = ".gguf"


def model_name(model: str, served_model_name: str) -> str:
    """``served_model_name`` if it is given, else a folder's or a GGUF file's own name, else ``model`` (an id)."""
    if served_model_name:
        return served_model_name
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.name.removesuffix(GGUF_SUFFIX) if path.suffix == GGUF_SUFFIX else model
