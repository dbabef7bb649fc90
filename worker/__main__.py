"""``python -m worker``: load the model, join the mesh, run plans until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry

from observability.listener import Page
from observability.logs import setup_logging
from observability.membership import joined
from observability.startup import start_up
from shared.config import parse_service
from shared.ids import new_incarnation, new_process_id
from shared.lifecycle import StartupError, run
from shared.messages import Capacity
from shared.model_name import model_name
from worker.config import WorkerConfig
from worker.lora_names import check_folders, parse_adapters
from worker.metrics import WorkerMetrics
from worker.runner import Runner
from worker.service import WorkerService
from worker.simulated import SimulatedRunner, StepTime
from worker.step_loop import THREAD as STEP_LOOP
from worker.torch_import import import_torch

if TYPE_CHECKING:
    from worker.parallel.followers import Followers

log = logging.getLogger("headrace.worker")

LOADER = "load-model"
"""The thread that loads."""


def load_runner(config: WorkerConfig) -> Runner:
    """Load the model (or its simulation). Raises StartupError with the reason if it cannot be served."""
    if config.simulate:
        eos = [config.simulate_eos] if config.simulate_eos >= 0 else []
        name = model_name(config.model, config.served_model_name)
        longest = min(config.max_model_len or 1 << 20, config.simulate_blocks * config.block_size)
        capacity = Capacity(
            name,
            longest,
            config.block_size,
            config.simulate_blocks,
            config.simulate_vocab_size,
            eos,
            "simulated",
            grammars=False,
            adapters=list(parse_adapters(config.lora)),
        )
        return SimulatedRunner(capacity, StepTime(config.simulate_base_us, config.simulate_token_us))
    import_torch()
    from worker.loading import load_model_runner

    start_up.ended("transformers")
    return load_model_runner(config)


class Loaded(NamedTuple):
    runner: Runner
    followers: Followers | None  # the other ranks, where the model is divided


def load(config: WorkerConfig) -> Loaded:
    """Load the model, over as many ranks as asked. Raises StartupError, or ServiceFault if a rank is lost meanwhile."""
    if config.lora and config.tensor_parallel > 1:
        raise StartupError("--lora is not for a model that is divided over ranks")
    adapters = parse_adapters(config.lora)
    if model_name(config.model, config.served_model_name) in adapters:
        raise StartupError("a LoRA adapter needs a name of its own, not the model's")
    if not config.simulate:
        check_folders(adapters)
    if config.tensor_parallel == 1 or config.simulate:
        return Loaded(load_runner(config), None)
    import_torch(one_process=False)
    from worker.parallel.load import load_over_ranks

    start_up.ended("transformers")
    return Loaded(*load_over_ranks(config, LOADER))


Load = Callable[[WorkerConfig], Loaded]


def _load_in_background(config: WorkerConfig, load: Load) -> asyncio.Future[Loaded]:
    """Load on a daemon thread: one that is told to stop meanwhile need not load to the end first."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Loaded] = loop.create_future()

    def settle(result: Loaded | None, error: BaseException | None) -> None:
        if loaded.done():
            return
        if result is not None:
            loaded.set_result(result)
        elif error is not None:
            loaded.set_exception(error)
            loaded.exception()  # seen: if the worker is stopping, nobody asks for it

    def work() -> None:
        result, error = None, None
        try:
            result = load(config)
        except Exception as caught:  # noqa: BLE001  handed over to the event loop, where it ends the service
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has stopped
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=LOADER, daemon=True).start()
    return loaded


async def serve(config: WorkerConfig, stop: asyncio.Event, load: Load = load) -> None:
    name = config.worker_id or new_process_id("worker")
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, model_name(config.model, config.served_model_name))
    async with joined("worker", name, config, registry, config.metrics_host, config.metrics_port) as member:
        service = WorkerService(
            config, name, new_incarnation(), member.step_bus, member.bus, metrics, member.tracing
        )  # fmt: skip
        member.listener.add("/ready", lambda rest, query: _readiness(service))
        await service.listen()
        start_up.ended("bus")
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(service.run(stop))
            loading = _load_in_background(config, load)
            stopped = group.create_task(stop.wait())
            waiting: list[asyncio.Future[Any]] = [loading, stopped]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                gc.collect()
                gc.freeze()  # what was loaded stays: a full collection need not walk it
                loaded = loading.result()
                service.attach(loaded.runner, loaded.followers)
                log.info("worker %s serves %s", name, loaded.runner.capacity.model)
                log.info("%s", start_up.line())
            await serving
            stopped.cancel()


def _readiness(service: WorkerService) -> Page:
    """For whoever replaces workers one by one: 200 once the model is loaded, 503 before and while it drains."""
    return Page(b"ready\n", "text/plain") if service.ready else Page(b"not ready\n", "text/plain", 503)


def main(argv: Sequence[str] | None = None, load: Load = load) -> int:
    """``load``: what makes the runner, if not what the options ask for."""
    config = parse_service(WorkerConfig, "worker", "headrace worker", argv)
    setup_logging("worker", config.log_level)
    start_up.ended("imports")
    code = run(lambda stop: serve(config, stop, load))
    _leave_threads_behind(code)
    return code


def _leave_threads_behind(code: int) -> None:
    """End at once if the loader still runs, or a step that waits for a lost rank. The interpreter's own end would stop
    it inside of torch, whose functions then abort the process."""
    if any(thread.name in (LOADER, STEP_LOOP) for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
