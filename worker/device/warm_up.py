"""What serving would stop for, done at start instead, for as long as it may take. Kernels that no pass has asked for
yet are compiled (Triton keeps them on disk, for the next start), then decode steps are captured. What is left comes
when it is asked for.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.lifecycle import StartupError
from worker.batch import SCRATCH_PAGE
from worker.device.prepare import Prepared
from worker.device.runner import DeviceRunner
from worker.parallel.ranks import mine

log = logging.getLogger("headrace.worker.device")

TELL_S = 5.0
"""How often its progress is told."""


def warm_up(
    prepared: Prepared, runner: DeviceRunner, seconds: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """For ``seconds`` at most, and the piece of work that it is at by then: some seconds. 0: nothing is done.

    Raises StartupError where a rank lacks memory in a step that others take part in.
    """
    if not seconds:
        return
    began = told = clock()
    port, graphs = runner.port, runner.graphs

    def more(what: str, done: int, of: int) -> bool:
        nonlocal told
        now = clock()
        if now - told >= TELL_S:
            told = now
            log.info("warming up, %.0f s so far: %d of %d %s", now - began, done, of, what)
        return now - began < seconds

    launches: list[Callable[[], None]] = []
    compiled = 0
    try:
        launches += prepared.kernel.warm_ups(prepared.model.caches[0], prepared.layers)
        while compiled < len(launches) and more("attention kernels", compiled, len(launches)):
            port.run(launches[compiled])
            compiled += 1
        runner.pages.copy([(SCRATCH_PAGE, SCRATCH_PAGE)])
    except port.out_of_memory as error:  # a step that lacks it gives back what it can
        why = str(error).split(".")[0]
        log.warning("memory lacks (%s): %d of %d attention kernels are compiled", why, compiled, len(launches))
    port.synchronize()
    launches.clear()
    wanted = graphs.ahead()
    ranks = mine()
    if ranks is not None:
        ranks.begin_steps()  # a graph's sums stay in the group that they were captured in
    with _little_to_collect():
        for done, key in enumerate(wanted):
            # A pass has sums over all ranks: they make the same ones.
            go_on = more("decode steps", done, len(wanted)) and graphs.open
            if not (go_on if ranks is None else ranks.all_agree(go_on)):
                break
            try:
                graphs.capture(*key, alone=ranks is None)
            except port.out_of_memory as error:
                why = str(error).split(".")[0]
                raise StartupError(f"a rank's GPU lacks memory for a step of {key[0]} sequences ({why})") from None
        port.synchronize()
    log.info(
        "warmed up in %.1f s: %d attention kernels, %d of %d decode steps captured in %d MiB",
        clock() - began, compiled, len(graphs), len(wanted), graphs.used >> 20,
    )  # fmt: skip


@contextmanager
def _little_to_collect() -> Iterator[None]:
    """Each capture has Python's garbage collected: what is there already is not looked at again each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
