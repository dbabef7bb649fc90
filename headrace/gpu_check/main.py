"""The command line of ``headrace doctor --gpu``."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.gpu_check import report
from headrace.gpu_check.budget import Budget
from headrace.gpu_check.conversation import ChildProcess, Conversation
from headrace.gpu_check.document import Document
from headrace.gpu_check.goals import goals
from headrace.gpu_check.plan import STAGES, chosen
from headrace.gpu_check.supervise import Supervisor
from headrace.output_file import check_writable
from shared.config import Parser

PROG = "headrace doctor --gpu"
SECONDS = 480.0
FEWEST_SECONDS = 10.0
NO_GPU = 2
ROUNDING_PRODUCTS = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
"""Variables by which images have float32 products in TF32: those that kernels are held against must be exact."""


def parser() -> Parser:
    made = Parser(
        prog=PROG,
        description="Check and measure the GPU path on this machine's card, without network or weights. Exit 0: all is "
        "computed right; 1: something is not; 2: no GPU. Speed is shown and fails nothing.",
        epilog="stages: " + ", ".join(stage.name for stage in STAGES),
    )
    shown = "(default: %(default)s)"
    made.add_argument("--json", type=Path, default=None, metavar="FILE", help="write every figure to this file")
    made.add_argument("--markdown", type=Path, default=None, metavar="FILE", help="write the table as Markdown")
    made.add_argument("--seconds", type=float, default=SECONDS, help=f"in all; what does not fit is left out {shown}")
    made.add_argument("--only", default="", metavar="STAGE,...", help="these stages alone")
    made.add_argument(
        "--nats", action="store_true",
        help="measure with the mesh around the worker too; without it, only where a nats-server is found",
    )  # fmt: skip
    made.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU: figures mean nothing")
    return made


def main(argv: Sequence[str]) -> int:
    """Exit 0: every correctness stage stands. 1: one does not. 2: no GPU, or a bad command line."""
    made = parser()
    args = made.parse_args(argv)
    try:
        stages = chosen(args.only)
        if not args.seconds >= FEWEST_SECONDS:
            raise ValueError(f"--seconds must be {FEWEST_SECONDS:g} or more")
        for flag, path in (("--json", args.json), ("--markdown", args.markdown)):
            if path is not None:
                check_writable(path, flag)
    except ValueError as error:
        made.error(str(error))
    began = time.monotonic()
    if not args.rehearse and (reason := no_gpu()):
        print(f"{PROG}: {reason}", file=sys.stderr)
        return NO_GPU
    options = {"rehearsal": args.rehearse, "nats": args.nats}
    found = check(
        lambda: ChildProcess(environment(args.rehearse)), [stage.name for stage in stages], args.seconds, options,
        began=began,
    )  # fmt: skip
    print(report.text(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found.as_json(), indent=1) + "\n", "utf-8")
    if args.markdown is not None:
        args.markdown.write_text(report.markdown(found), "utf-8")
    return found.exit_code


def check(
    start: Callable[[], Conversation], names: Sequence[str], seconds: float, options: dict[str, bool], *,
    began: float | None = None, clock: Callable[[], float] = time.monotonic,
) -> Document:  # fmt: skip
    """Run the stages called ``names`` within ``seconds``, counted from ``began`` on ``clock``."""
    at = datetime.datetime.now().astimezone()
    budget = Budget(seconds, clock, began)
    supervisor = Supervisor(start, budget, _show, dict(options), clock)
    reports = supervisor.run([stage for stage in STAGES if stage.name in names])
    return Document(reports, goals(reports), seconds, budget.passed_s, bool(options.get("rehearsal")), at)


def no_gpu() -> str:
    """Why there is nothing to check; empty if there is a GPU."""
    try:
        import torch
    except ImportError as error:
        return f"{error}; workers need it (pip install 'headrace[worker]')"
    if not torch.cuda.is_available():
        built = "a CPU build of torch" if torch.version.cuda is None else f"torch for CUDA {torch.version.cuda}"
        return f"no usable GPU ({torch.__version__}, {built})"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than the kernels are for (compute capability 8.0 and up)"
    return ""


def environment(rehearsal: bool) -> dict[str, str]:
    """Of the child. What torch's allocator reserves grows in place, so that stages of many sizes leave no holes."""
    environ = dict(os.environ)
    environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in ROUNDING_PRODUCTS:
        environ.pop(name, None)
    home = str(Path(__file__).resolve().parents[2])  # where it is run from a checkout that is not installed
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (home, environ.get("PYTHONPATH"))))
    if rehearsal:
        environ["TRITON_INTERPRET"] = "1"
        environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environ.pop("TRITON_INTERPRET", None)
    return environ


def _show(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)
