"""A worker's import of ``transformers`` leaves torch's compiler out, and the compiler is there for who wants it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from worker.torch_import import import_torch

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from pathlib import Path
import torch
LEAN = sys.argv[1] == "lean"
if LEAN:
    from worker.lean_import import import_transformers
    import_transformers()
from batch_driver import BatchDriver
from shared.messages import Sampling
from worker.torch_runner import TorchRunner
for folder in sys.argv[2:]:
    runner = TorchRunner.load(folder, dtype="float32", num_blocks=32, num_threads=1)
    driver = BatchDriver(runner)
    sequences = [driver.start([3 + seed, 5, 8], Sampling(seed, 12, temperature=1.0)) for seed in range(3)]
    driver.run_to_end()
    print([sequence.tokens for sequence in sequences])
if LEAN:
    heavy = {"torch.distributed.tensor", "torch._dynamo.utils", "torch._inductor"} & set(sys.modules)
    assert not heavy, heavy
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert torch._dynamo is sys.modules["torch._dynamo"] and "torch._dynamo.utils" in sys.modules
"""


def run(program: str, *argv: str) -> str:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # after ours: tests/kernels is no package
    program = f"import sys; sys.path += {folders!r}\n{program}"
    environ = os.environ | {"HEADRACE_CPU_ISA": "none"}  # the models' own modules run, not the C++ library
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_models_answer_as_ever_and_the_compiler_comes_when_it_is_asked_for(tmp_path: Path) -> None:
    families = ("llama", "gemma3_text", "qwen3_moe")
    folders = [str(make_tiny_model(tmp_path / family, family)) for family in families]
    lean = run(PROGRAM, "lean", *folders)
    assert lean.count("[[") == len(families)
    assert lean == run(PROGRAM, "ordinary", *folders)


@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo.config",
        "from torch._dynamo import config",
        "import torch; torch._dynamo.reset()",
        "import torch; torch.compiler.reset()",
        "from transformers.masking_utils import TransformGetItemToIndex as T; T()",
    ],
)
def test_whatever_asks_for_the_compiler_finds_the_real_one(use: str) -> None:
    begin = "from worker.lean_import import import_transformers; import_transformers(); import sys\n"
    begin += "assert 'sympy' not in sys.modules\n"
    end = "\nimport torch, torch._dynamo\nassert torch._dynamo is sys.modules['torch._dynamo']\n"
    end += "assert torch._dynamo.optimize and 'torch._dynamo.utils' in sys.modules"
    run(begin + use + end)


def test_torchao_is_not_imported_with_transformers(tmp_path: Path) -> None:
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise AssertionError('somebody imports torchao')")
    (tmp_path / "torchao-9.9.dist-info").mkdir()
    (tmp_path / "torchao-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 9.9\n")
    run(
        f"sys.path.append({str(tmp_path)!r})\n"
        "from worker.lean_import import import_transformers; import_transformers()\n"
        "from transformers.utils.import_utils import is_torch_available, is_torchao_available\n"
        "assert is_torch_available() and not is_torchao_available()"
    )


def test_a_process_that_has_the_compiler_keeps_it() -> None:
    run(
        "import torch._dynamo as real, torch\n"
        "from worker.lean_import import import_transformers; import_transformers()\n"
        "assert torch._dynamo is real"
    )


@pytest.mark.parametrize(
    "given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "x"}], ids=str
)
def test_a_gpus_memory_comes_in_segments_that_grow_unless_something_else_is_asked(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**os.environ, **given}
    if not given:
        environ = {name: value for name, value in environ.items() if "ALLOC_CONF" not in name}
    monkeypatch.setattr(os, "environ", environ)
    import_torch(one_process=False)
    found = {name: value for name, value in environ.items() if "ALLOC_CONF" in name}
    assert found == (given or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
