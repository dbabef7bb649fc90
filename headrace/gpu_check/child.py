"""The process in which stages run: a request in, rows, checks and facts out, as they come.

A stage that raises has failed, and what it had found stands. Memory that ran out is given back and the next stage goes
on; after any other fault of the device its process is not used again, for CUDA answers nothing after one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from headrace.gpu_check.document import CUT, FAILED, PASSED, SKIPPED
from headrace.gpu_check.plan import STAGES

NOTE_CHARACTERS = 300


def main(argv: list[str]) -> int:
    """``argv``: file descriptors to read requests from and to write events to."""
    requests, events = int(argv[0]), int(argv[1])

    def say(event: dict[str, Any]) -> None:
        os.write(events, json.dumps(event, default=str).encode() + b"\n")

    with open(requests, encoding="utf-8") as lines:
        for line in lines:
            say(answer(json.loads(line), say))
    return 0


def answer(request: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the stage that is asked for; the event that ends it."""
    from headrace.gpu_check.rig import CannotRun, Rig

    if request.get("rehearsal"):
        import torch

        torch.set_num_threads(1)  # what is tiny is quicker so, on a busy machine above all
    stage = next(stage for stage in STAGES if stage.name == request["stage"])
    rig = Rig(request, say)
    end: dict[str, Any] = {"end": PASSED, "note": ""}
    try:
        importlib.import_module(stage.module).run(rig)
        if rig.cut:
            end = {"end": CUT, "note": rig.cut}
    except CannotRun as reason:
        end = {"end": SKIPPED, "note": str(reason)}
    except Exception as error:  # noqa: BLE001  whatever a stage raises is its result
        traceback.print_exc()
        end = {"end": FAILED, "note": describe(error), "leave": not rig.usable_after(error)}
    del rig
    gc.collect()
    return end


def describe(error: BaseException) -> str:
    """One line: what was raised, and where in our own code."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "site-packages" not in frame.filename:
            where = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:NOTE_CHARACTERS]}{where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
