"""The command line of ``headrace profile``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.models import ModelError, resolve_model
from shared.config import Parser
from shared.lifecycle import StartupError

PROG = "headrace profile"
MOST_ROWS = 4096


def parser() -> Parser:
    made = Parser(
        prog=PROG,
        description="Run single steps of a real model, as a worker does but without a mesh, and print where their time "
        "goes beside this machine's own limits, measured in the same run.",
    )
    shown = "(default: %(default)s)"
    made.add_argument("--model", default="default", help=f"'default', a folder, a GGUF file or an id {shown}")
    made.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16", "float64"), help=f"{shown}"
    )
    made.add_argument(
        "--quantize", default="none", choices=("none", "int8"), help=f"weights in fewer bits, as a worker's {shown}"
    )
    made.add_argument("--batch", default="1,16,32,64", metavar="N,N,...", help=f"rows that decode; empty: none {shown}")
    made.add_argument("--context", type=int, default=128, help=f"tokens behind each of them {shown}")
    made.add_argument("--chunk", default="512", metavar="N,N,...", help=f"tokens of a prompt; empty: none {shown}")
    made.add_argument("--temperature", type=float, default=0.0, help=f"of sampling; 0: greedy {shown}")
    made.add_argument("--steps", type=int, default=20, help=f"measured of each kind; medians count {shown}")
    made.add_argument("--threads", type=int, default=0, help="compute threads (default: 0, as torch chooses)")
    made.add_argument("--json", action="store_true", help="print JSON, in seconds")
    return made


def counts(flag: str, text: str) -> list[int]:
    """``1,16`` -> [1, 16]; empty: []. Raises ValueError unless all are from 1 to MOST_ROWS."""
    found = []
    for part in (part.strip() for part in text.split(",") if text.strip()):
        if not part.isdecimal() or not 1 <= int(part) <= MOST_ROWS:
            raise ValueError(f"{flag}: {part!r} is no number from 1 to {MOST_ROWS}")
        found.append(int(part))
    return found


def main(argv: Sequence[str]) -> int:
    made = parser()
    args = made.parse_args(argv)
    try:
        batches, chunks = counts("--batch", args.batch), counts("--chunk", args.chunk)
        if not batches and not chunks:
            raise ValueError("neither --batch nor --chunk asks for a step")
        for flag, value, least in (("--context", args.context, 1), ("--steps", args.steps, 1)):
            if value < least:
                raise ValueError(f"{flag}: {value} is less than {least}")
        if args.threads < 0 or not 0 <= args.temperature < 100:
            raise ValueError("--threads and --temperature must not be negative, nor the temperature 100 or more")
        folder, name = resolve_model(args.model)
        print(_profiled(folder, name, args, batches, chunks))
    except (ValueError, ModelError, StartupError) as error:
        made.error(str(error))
    return 0


def _profiled(folder: str, name: str, args: Any, batches: list[int], chunks: list[int]) -> str:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as in a worker
    import torch

    from headrace.profile import report, roofline
    from headrace.profile.steps import Load, blocks_needed, profile_load
    from worker.torch_runner import TorchRunner

    if args.threads:
        torch.set_num_threads(args.threads)
    loads = [Load(rows, args.context) for rows in batches] + [Load(1, 0, chunk) for chunk in chunks]
    # Before the model is there: of the packed weights the machine's own caches know nothing then.
    sizes = sorted({load.tokens for load in loads} | {512})
    machine = roofline.measure(sizes, (torch.bfloat16, torch.float32))
    block_size = 16
    runner = TorchRunner.load(
        folder, dtype=args.dtype, device="cpu", quantize=args.quantize, block_size=block_size, served_model_name=name,
        num_blocks=blocks_needed(loads, args.steps, block_size), num_threads=args.threads or None, self_check=False,
    )  # fmt: skip
    longest = max(load.most_tokens(args.steps) for load in loads)
    if longest >= runner.capacity.max_model_len:
        raise ValueError(f"sequences of {longest} tokens; the model has {runner.capacity.max_model_len}")
    dtype = runner.capacity.dtype
    if dtype not in machine.gemm:
        more = roofline.measure(sizes, (getattr(torch, dtype),))
        machine = roofline.Machine(machine.threads, machine.gemm | more.gemm, machine.bandwidth)
    runs = [profile_load(runner, load, args.temperature, args.steps) for load in loads]
    weights = roofline.weights_of(Path(folder), item_bytes=1 if args.quantize == "int8" else 0)
    figures = (name, dtype, args.quantize, machine, weights, runner.capacity.kv_bytes_per_token, runs)
    return json.dumps(report.as_json(*figures), indent=2) if args.json else report.as_text(*figures)
