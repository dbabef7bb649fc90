"""The line by which a process says where its start-up time went."""

from __future__ import annotations

import re
import subprocess
import sys
import time

from observability.startup import StartUp


def test_stages_add_up_to_the_whole_and_count_from_the_processs_creation() -> None:
    started = time.monotonic()
    program = (
        "import time; time.sleep(0.2)\n"
        "from observability.startup import start_up\n"
        "start_up.ended('imports'); time.sleep(0.05); start_up.ended('weights'); print(start_up.line())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lived_s = time.monotonic() - started
    found = re.fullmatch(r"ready after (\S+) s: imports (\S+), weights (\S+)\n", done.stdout)
    assert found is not None, done.stdout
    whole, imports, weights = (float(text) for text in found.groups())
    assert imports >= 0.2
    assert weights >= 0.05
    assert abs(whole - imports - weights) <= 0.011
    assert whole <= lived_s + 0.02  # the kernel counts in hundredths


def test_a_stage_in_several_parts_is_one() -> None:
    clock = StartUp()
    for stage in ("imports", "weights", "weights", "self-check"):
        clock.ended(stage)
    assert re.fullmatch(r"ready after \S+ s: imports \S+, weights \S+, self-check \S+", clock.line())
