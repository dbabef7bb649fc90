"""What rounding a model's weights and numbers costs: its logits over a text in float32, against those in less.

    python benchmarks/quantization.py [--model FOLDER] [--text FILE] [--windows 8] [--length 512]

Each variant is loaded as a CPU worker loads it and runs through the C++ decoder. The text is cut at even distances
into windows, each run as one sequence of its own; by default it is the prose of Python's language reference, which
every Python brings along (its wording differs a little between versions). Against float32, over all positions: the mean
Kullback-Leibler divergence of the next token's distribution, in nats, and its 99th percentile; the share of positions
at which the most likely token is the same; and each variant's perplexity, whose ratio to float32's is steadier than
itself. Deterministic: the same machine, model and text give the same figures.
"""

from __future__ import annotations

import argparse
import math
import platform
import pydoc_data.topics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from headrace.models.default import ensure_default_model
from headrace.text_table import table
from kernels.contract import RaggedBatch
from shared.lifecycle import StartupError
from worker.torch_runner import TorchRunner

VARIANTS = [("float32", "none"), ("float32", "int8"), ("bfloat16", "none"), ("bfloat16", "int8")]
"""--dtype and --quantize; the first is what the others are compared with."""


@dataclass(frozen=True)
class Compared:
    """By position: how far a variant's next token is from the reference's, and what it thinks of the text's."""

    divergence: torch.Tensor  # [positions], nats
    agrees: torch.Tensor  # [positions], bool: the most likely token is the same
    loss: torch.Tensor  # [positions - 1], nats: minus the log-probability of the token that follows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder (default: the default model)")
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text (default: Python's language reference)")
    parser.add_argument("--windows", type=int, default=8, help="pieces of the text (default: 8)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece (default: 512)")
    args = parser.parse_args()
    if args.windows < 1 or args.length < 2:
        parser.error("--windows must be at least 1, --length 2")
    model = args.model or ensure_default_model(lambda line: print(line, file=sys.stderr))
    text = args.text.read_text() if args.text else language_reference()
    transformers_logging.set_verbosity_error()  # the text is longer than a sequence may be: it is cut
    tokens = np.array(AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    if len(tokens) < args.windows * args.length:
        parser.error(f"the text has {len(tokens):,} tokens, {args.windows} x {args.length} are wanted")
    try:
        runners = [load(model, dtype, quantize, args.length) for dtype, quantize in VARIANTS]
    except StartupError as error:
        parser.error(str(error))
    windows = cut(tokens, args.windows, args.length)
    compared: list[list[Compared]] = [[] for _ in VARIANTS]
    for window in windows:
        reference = log_probabilities(runners[0], window)
        for runner, parts in zip(runners, compared, strict=True):
            parts.append(compare(reference, log_probabilities(runner, window), window))
    source = args.text.name if args.text else f"Python {platform.python_version()}'s language reference"
    print(f"{Path(model).name}, {len(windows)} x {args.length} tokens of {source}, {runners[0].kernel.name}\n")
    print(table([["variant", "mean KL, nats", "KL p99", "top-1 agreement", "perplexity", "ratio"], *rows(compared)]))
    return 0


def language_reference() -> str:
    """Python's own description of the language, topic by topic in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def cut(tokens: np.ndarray, windows: int, length: int) -> list[np.ndarray]:
    """Windows of ``length`` tokens, from the first to the last at even distances."""
    starts = np.linspace(0, len(tokens) - length, windows).astype(int)
    return [tokens[start : start + length] for start in starts]


def load(model: Path, dtype: str, quantize: str, length: int) -> TorchRunner:
    """With pages for one window. Raises StartupError."""
    pages = math.ceil(length / 16) + 1
    runner = TorchRunner.load(model, dtype=dtype, device="cpu", quantize=quantize, num_blocks=pages, self_check=False)
    if runner.decoder is None:
        raise StartupError(f"model {str(model)!r} does not run through the C++ decoder here")
    if runner.size.max_model_len < length:
        raise StartupError(f"model {str(model)!r} takes {runner.size.max_model_len:,} tokens, not {length:,}")
    return runner


def log_probabilities(runner: TorchRunner, tokens: np.ndarray) -> torch.Tensor:
    """``[tokens, vocabulary]``, float64: of the token that follows each of ``tokens``."""
    assert runner.decoder is not None  # see load
    place = np.arange(len(tokens), dtype=np.int64)
    table = np.arange(1, math.ceil(len(tokens) / 16) + 1, dtype=np.int32)[None]
    batch = RaggedBatch(np.array([0, len(tokens)]), place + 1, table, place + 16)
    return runner.decoder.forward(tokens, place, batch, place).double().log_softmax(dim=-1)


def compare(reference: torch.Tensor, other: torch.Tensor, tokens: np.ndarray) -> Compared:
    """Of two ``[tokens, vocabulary]`` of log-probabilities."""
    follows = torch.from_numpy(tokens[1:])[:, None]
    return Compared(
        divergence=(reference.exp() * (reference - other)).sum(dim=-1),
        agrees=reference.argmax(dim=-1) == other.argmax(dim=-1),
        loss=-other[:-1].gather(1, follows)[:, 0],
    )


def rows(compared: list[list[Compared]]) -> list[list[str]]:
    """One for each of VARIANTS, from its windows."""
    perplexities = [math.exp(torch.cat([part.loss for part in parts]).mean()) for parts in compared]
    lines = []
    for (dtype, quantize), parts, perplexity in zip(VARIANTS, compared, perplexities, strict=True):
        name = dtype if quantize == "none" else f"{dtype}, {quantize}"
        divergence = torch.cat([part.divergence for part in parts])
        agrees = torch.cat([part.agrees for part in parts]).double().mean().item()
        figures = ["-", "-", "-"]
        if parts is not compared[0]:
            p99 = divergence.quantile(0.99).item()
            figures = [f"{divergence.mean().item():.5f}", f"{p99:.4f}", f"{100 * agrees:.2f} %"]
        lines.append([name, *figures, f"{perplexity:.3f}", f"{perplexity / perplexities[0]:.4f}"])
    return lines


if __name__ == "__main__":
    sys.exit(main())
