"""``headrace capacity``: the arithmetic people do by hand, with its assumptions printed.

Weights, KV bytes per token, what is left for the KV cache, and how many sequences of a given length that holds. Three
people get three answers for the same card because they leave out different things; all are shown side by side.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headrace.simulate.hardware import GPUS, MODELS, Deployment, UnknownHardware, gpu_named, model_named
from shared.config import Parser

PAPER_KV_GB = 12.0
"""PagedAttention paper (SOSP 2023), table 1: a 13B model on an A100 with 40 GB has 12 GB of KV cache."""


@dataclass(frozen=True)
class Assumption:
    """What is taken to be left for the KV cache, and what fits into it."""

    text: str
    kv_bytes: float
    kv_tokens: int
    blocks: int
    sequences: dict[int, float]  # of each length asked for, whole blocks


@dataclass(frozen=True)
class Capacity:
    model: str
    gpu: str
    tp: int
    params: int
    weight_bytes: int
    kv_bytes_per_token: int
    block_size: int
    assumptions: list[Assumption]


def capacity(deployment: Deployment, block_size: int, lengths: Sequence[int], kv_gb: float | None = None) -> Capacity:
    """The figures for one deployment. ``kv_gb`` adds a row for a KV cache of a size one knows."""
    model, gpu, tp = deployment.model, deployment.gpu, deployment.tp
    rows = [
        (f"the card as sold, {gpu.nominal_gb} GB, less weights", tp * gpu.nominal_gb * 1e9 - model.weight_bytes),
        (
            f"{deployment.memory_share:g} of the {gpu.memory / 2**30:.4g} GiB usable, less "
            f"{deployment.activations / 1e9:g} GB for activations, less weights",
            deployment.kv_bytes,
        ),
    ]
    if kv_gb is not None:
        rows.append((f"{kv_gb:g} GB, as given", kv_gb * 1e9))
    elif model.name in ("llama-2-13b", "opt-13b") and gpu.name == "a100-40" and tp == 1:
        rows.insert(1, (f"{PAPER_KV_GB:g} GB: the vLLM paper's figure for this card", PAPER_KV_GB * 1e9))
    per_token = model.kv_bytes_per_token
    assumptions = []
    for text, kv_bytes in rows:
        tokens = max(0, int(kv_bytes // per_token))
        sequences = {
            length: max(0.0, kv_bytes) / (-(-length // block_size) * block_size * per_token) for length in lengths
        }
        assumptions.append(Assumption(text, kv_bytes, tokens, tokens // block_size, sequences))
    return Capacity(model.name, gpu.name, tp, model.params, model.weight_bytes, per_token, block_size, assumptions)


def text_of(deployment: Deployment, found: Capacity) -> str:
    model = deployment.model
    cards = f"{found.tp} x {found.gpu}" if found.tp > 1 else found.gpu
    block_mib = found.kv_bytes_per_token * found.block_size / 2**20
    lines = [
        f"{found.model} on {cards}",
        "",
        f"weights        {found.weight_bytes / 1e9:.1f} GB      {found.params / 1e9:.2f} billion parameters of "
        f"{model.bytes_per_value} bytes",
        f"KV per token   {found.kv_bytes_per_token / 1024:.0f} KiB      2 x {model.layers} layers x {model.kv_heads} "
        f"KV heads x {model.head_dim} x {model.bytes_per_value} bytes",
        f"KV per block   {block_mib:.4g} MiB      {found.block_size} tokens",
        "",
    ]
    lengths = list(found.assumptions[0].sequences)
    head = ["left for the KV cache", "GB", "tokens", "blocks", *(f"seqs of {length}" for length in lengths)]
    rows = [head]
    rows += [
        [
            row.text, f"{row.kv_bytes / 1e9:.1f}", str(row.kv_tokens), str(row.blocks),
            *(f"{count:.1f}" for count in row.sequences.values()),
        ]
        for row in found.assumptions
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines += [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)


def parser() -> Parser:
    made = Parser(prog="headrace capacity", description="How many sequences a model and a GPU hold, and why.")
    shown = "(default: %(default)s)"
    made.add_argument(
        "--model", default="llama-2-13b", help=f"{', '.join(MODELS)}, or a config.json or its folder {shown}"
    )
    made.add_argument("--gpu", default="a100-40", help=f"{', '.join(GPUS)} {shown}")
    made.add_argument("--tp", type=int, default=1, help=f"GPUs that share the model, tensor parallelism {shown}")
    made.add_argument("--block-size", type=int, default=16, help=f"tokens in a KV block {shown}")
    made.add_argument(
        "--length", type=int, action="append", default=None, metavar="TOKENS",
        help="length of a sequence, prompt and output; may be repeated (default: 512 and 2048)",
    )  # fmt: skip
    made.add_argument("--memory-share", type=float, default=0.9, help=f"share of the card that is used at all {shown}")
    made.add_argument(
        "--activations-gb", type=float, default=1.5, help=f"for activations and the runtime, per card {shown}"
    )
    made.add_argument("--kv-gb", type=float, default=None, help="one more row: a KV cache of this size (default: none)")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    args = made.parse_args(argv)
    lengths = args.length or [512, 2048]
    if min(args.tp, args.block_size, *lengths) < 1:
        made.error("--tp, --block-size and --length are at least 1")
    if not 0 < args.memory_share <= 1:
        made.error("--memory-share is above 0 and at most 1")
    if not 0 <= args.activations_gb < math.inf:
        made.error("--activations-gb is at least 0")
    if args.kv_gb is not None and not 0 < args.kv_gb < math.inf:
        made.error("--kv-gb is above 0")
    try:
        deployment = Deployment(
            model_named(args.model), gpu_named(args.gpu), args.tp, args.memory_share, args.activations_gb * 1e9
        )
        _ = deployment.kv_tokens  # where the weights leave no room there is nothing to show
    except UnknownHardware as error:
        made.error(str(error))
    found = capacity(deployment, args.block_size, lengths, args.kv_gb)
    print(json.dumps(asdict(found), indent=2) if args.json else text_of(deployment, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
