"""Where models come from: the default model (fetched and converted once), a folder, a GGUF file, or an id."""

from headrace.models.default import DEFAULT_MODEL_ID, default_model_path, ensure_default_model
from headrace.models.error import ModelError
from headrace.models.resolve import resolve_model

__all__ = ["DEFAULT_MODEL_ID", "ModelError", "default_model_path", "ensure_default_model", "resolve_model"]
