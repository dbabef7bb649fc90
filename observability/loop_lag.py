"""How late an event loop runs what is due: the first thing to look at when every stream of a process stutters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVERY_S = 0.25


async def watch_loop_lag(observe: Callable[[float], None], every_s: float = EVERY_S) -> None:
    """Tell ``observe`` by how many seconds each wake-up was late. Runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, loop.time() - due_s))
