"""``transformers``' package of models, by the names that ``transformers`` has found already.

At its import ``transformers`` reads the files of all models, some thousands, to know who defines what; and once more
when the first model, configuration or tokenizer is asked for. That is a fifth of a second of CPU at every start of a
gateway or a worker, and what was found the first time is what is found again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def import_models() -> None:
    """Import ``transformers.models``. Changes nothing where that has been done."""
    if "transformers.models" in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    names: Any = import_utils
    define = names.define_import_structure
    folder = Path(transformers.__file__).parent / "models"

    def known(path: str | Path, prefix: str | None = None) -> Any:
        asked_again = Path(path) == folder / "__init__.py" and prefix is None
        return _found(define, folder) if asked_again else define(path, prefix)

    names.define_import_structure = known
    try:
        import transformers.models
    finally:
        names.define_import_structure = define


def _found(define: Any, folder: Path) -> dict[frozenset[str], dict[str, set[str]]]:
    """What ``transformers`` found for itself, and keeps: by backends, who defines what."""
    prefix = "models"
    return {
        backends: {
            module.removeprefix(f"{prefix}."): set(names)
            for module, names in modules.items()
            if module.startswith(f"{prefix}.")
        }
        for backends, modules in define(folder, prefix=prefix).items()
    }
