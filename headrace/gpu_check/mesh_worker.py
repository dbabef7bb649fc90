"""``python -m headrace.gpu_check.mesh_worker REQUEST FLAGS...``: a worker as it is, but for its model, which is random
and made on the device."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

from headrace.gpu_check.rig import Rig
from headrace.gpu_check.runners import made
from headrace.gpu_check.serving_load import SHAPES
from worker import __main__ as worker_main
from worker.config import WorkerConfig

LONGEST = 2048


def main(argv: list[str]) -> int:
    request = json.loads(argv[0])
    rig = Rig({"seconds": 0, "rehearsal": request["rehearsal"]}, lambda event: None)
    kept = ExitStack()  # the model, until the process ends

    def load(config: WorkerConfig) -> worker_main.Loaded:
        model = kept.enter_context(
            made(rig, SHAPES[request["shape"]], max_model_len=LONGEST, served_name=config.served_model_name)
        )
        return worker_main.Loaded(model.runner, None)

    return worker_main.main(argv[1:], load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
