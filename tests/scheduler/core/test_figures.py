"""Figures of memory at any moment."""

from __future__ import annotations

from mesh_in_a_box import Box, request

from scheduler.core.figures import memory_figures
from scheduler.core.limits import Limits


def test_figures_of_a_running_batch() -> None:
    box = Box(Limits(max_num_seqs=8, max_num_batched_tokens=64), num_blocks=60)
    idle = memory_figures(box.core.workers["w0"])
    assert (idle.used, idle.cached, idle.shared, idle.waste_share) == (0, 0, 0, 0.0)
    box.submit(request("r", prompt=list(range(1, 10)), n=3, max_tokens=12))
    box.step()
    box.step()
    busy = memory_figures(box.core.workers["w0"])
    assert busy.shared == 2 and busy.used == 2 + 3
    assert busy.slots == 3 * 12 and 0 < busy.wasted < 3 * 4
    box.run()
    done = memory_figures(box.core.workers["w0"])
    assert done.used == 0 and done.cached > 0
