"""``python -m gateway``: the HTTP gateway as a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from gateway.config import GatewayConfig
from observability.logs import setup_logging
from observability.startup import start_up
from shared.config import parse_service
from shared.lifecycle import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until it is told to stop; returns the process's exit code."""
    config = parse_service(GatewayConfig, "gateway", "headrace gateway", argv)
    setup_logging("gateway", config.log_level)
    # transformers imports torch where it is installed: seconds and hundreds of megabytes that no tokenizer needs.
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]

    start_up.ended("imports")

    async def body(stop: asyncio.Event) -> None:
        from gateway.service import serve

        await serve(config, stop)

    return run(body, loop_factory=_loop_factory())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
