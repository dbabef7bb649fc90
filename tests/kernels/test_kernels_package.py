"""Hugging Face has a package named ``kernels`` too, and ``transformers`` imports whichever it finds."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_our_kernels_package_imports_no_torch() -> None:
    run("import kernels, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules")


def test_transformers_models_import_with_our_package_on_the_path() -> None:
    run(
        "import kernels\n"
        "from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
        "from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM\n"
        "config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,\n"
        "                     vocab_size=8)\n"
        "assert LlamaForCausalLM(config).num_parameters() > 0\n"
        "assert kernels.__doc__.startswith('Attention and cache kernels')\n"
    )
