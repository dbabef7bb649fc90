"""The life of one service process: one task group, one path to the end, exit codes people expect.

0: asked to stop (SIGTERM, SIGINT) and drained. 1: a fault. 2: it cannot start as configured (one line on stderr).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable

log = logging.getLogger("headrace.lifecycle")

CANCEL_AGAIN_S = 0.1


class StartupError(RuntimeError):
    """The service cannot start as it is configured; the message is one line for the person who started it."""


class ServiceFault(RuntimeError):
    """The service cannot go on; its supervisor restarts it."""


def run(
    main: Callable[[asyncio.Event], Awaitable[None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run ``main(stop)`` until it returns; SIGTERM and SIGINT set ``stop``. Returns the exit code.

    ``loop_factory`` makes the event loop (e.g. uvloop's); None takes asyncio's own.
    """

    async def body() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        await main(stop)

    code = 0
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(body())
    except* StartupError as group:
        print(f"headrace: {_first(group)}", file=sys.stderr, flush=True)
        code = 2
    except* ServiceFault as group:
        log.error("%s", _first(group))
        code = 1
    except* Exception as group:
        log.error("fault: %s", _first(group), exc_info=group)
        code = 1
    return code


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks, and return once they have ended.

    Once is not enough: where an answer is there at the same moment, ``asyncio.wait_for`` (before Python 3.12) and
    nats-py drop the cancellation, and a loop around them would go on for ever.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
