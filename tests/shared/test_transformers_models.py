"""The names that a gateway and a worker know the models of ``transformers`` by are those that it finds itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
from pathlib import Path
from shared.transformers_models import _found, import_models
import_models()
import transformers.models
from transformers.utils import import_utils
define = import_utils.define_import_structure
assert define.__module__ == import_utils.__name__, "put back"
assert define.cache_info().misses == 1, "the files were read once"
folder = Path(transformers.__file__).parent / "models"
found = _found(define, folder)
assert found == define(transformers.models.__file__) and sum(map(len, found.values())) > 500
assert define.cache_info().misses == 2, "and what they are compared with was read now"
from transformers import AutoTokenizer, LlamaConfig
from transformers.models.qwen2 import Qwen2Config
assert LlamaConfig().model_type == "llama" and Qwen2Config().model_type == "qwen2"
import_models()
"""


def test_what_was_found_at_the_import_is_what_is_found_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
