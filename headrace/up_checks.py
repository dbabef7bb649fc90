"""What of ``headrace up``'s settings would only be found wrong by a service that has started: tried before any does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gateway.config_files import check_files
from headrace.gpus import shares
from headrace.settings import UpSettings
from shared.config import ConfigError
from shared.lifecycle import StartupError


def check(settings: UpSettings) -> None:
    """Raise ConfigError, one line that names the option, for a file that cannot be used or numbers that contradict."""
    gateway: Any = settings.services["gateway"]
    scheduler: Any = settings.services["scheduler"]
    try:
        check_files(gateway)
        scheduler.limits()
        scheduler.scaling()
    except (StartupError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if any(source.path != gateway.model for source in gateway.sources):
        raise ConfigError("--model: `headrace up` serves one model; several need services that are started one by one")
    worker: Any = settings.services["worker"]
    if worker.transfer_port and settings.workers > 1:
        raise ConfigError(f"--transfer-port {worker.transfer_port}: one port is not for {settings.workers} workers")
    shares(worker, settings.workers, os.environ)
    if scheduler.record and not Path(scheduler.record).parent.is_dir():
        raise ConfigError(f"--record {scheduler.record}: no such folder")
    if not settings.own_nats and gateway.nats_ca:
        try:
            Path(gateway.nats_ca).read_bytes()
        except OSError as error:
            raise ConfigError(f"--nats-ca {gateway.nats_ca}: {error.strerror}") from None
