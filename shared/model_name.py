"""Under which name a model is served: one rule, or gateway and workers would never meet."""

from __future__ import annotations

from pathlib import Path


def model_name(model: str, served_model_name: str) -> str:
    """``served_model_name`` if it is given, else a folder's own name, else ``model`` itself (a Hugging Face id)."""
    if served_model_name:
        return served_model_name
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model
