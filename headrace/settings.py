"""What ``headrace up`` is asked for: one configuration per service, from one command line, file and environment.

A flag goes to every service that has the option. What only ``up`` decides (model folder, NATS address, free ports)
is laid over the services' configurations by :mod:`headrace.launch`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.cache import CACHE_ENV
from headrace.services import declarations, united_options
from kernels.cpu.library import ISA_ENV
from shared.config import CONFIG_FILE_ENV, MeshConfig, Parser, add_flags, check_keys, read_file, resolve

DEFAULT_SCHEDULER = "http://127.0.0.1:9401"
SCHEDULER_ENV = "HEADRACE_SCHEDULER"
"""Where ``headrace explain`` asks; no service reads it."""

LOCAL_FILE = Path("headrace.toml")
"""Read by ``up`` where it is run, unless a file is named."""

MOST_WORKERS, MOST_SCHEDULERS = 64, 8


@dataclass(frozen=True)
class UpSettings:
    """Everything ``up`` was asked for, checked."""

    services: dict[str, MeshConfig]
    workers: int
    schedulers: int  # one leads, the others stand by
    model: str  # as given: "default", a folder or a Hugging Face id
    served_model_name: str  # as given; empty: made from the model
    own_nats: bool  # no server was named: run one
    file: Path | None


def up_parser(prog: str = "headrace up") -> Parser:
    parser = Parser(
        prog=prog,
        description="Run a whole mesh on this machine: an embedded NATS server, a scheduler, workers and a gateway.",
    )
    parser.add_argument("--config", type=Path, default=None, help=f"TOML configuration file (default: ./{LOCAL_FILE})")
    parser.add_argument(
        "--workers", default="1", metavar="N", help=f"worker processes, 1 to {MOST_WORKERS} (default: 1)"
    )
    parser.add_argument(
        "--schedulers", default="1", metavar="N",
        help=f"scheduler processes, 1 to {MOST_SCHEDULERS}: one leads, the others stand by (default: 1)",
    )  # fmt: skip
    seen: set[str] = set()
    for name, declaration in declarations().items():
        add_flags(parser.add_argument_group(f"{name} options"), declaration, skip=seen)  # type: ignore[arg-type]
        seen |= {option.name for option in united_options([declaration])}
    return parser


def read_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> UpSettings:
    """Settings from the command line. A bad one is one line on stderr and exit 2 (SystemExit)."""
    environ = os.environ if environ is None else environ
    parser = up_parser()
    args = parser.parse_args(argv)
    try:
        return _settings(args, environ)
    except ValueError as error:  # ConfigError is one
        parser.error(str(error))


def _settings(args: argparse.Namespace, environ: Mapping[str, str]) -> UpSettings:
    flags: dict[str, Any] = vars(args)
    file: Path | None = args.config
    if file is None and environ.get(CONFIG_FILE_ENV):
        file = Path(environ[CONFIG_FILE_ENV])
    if file is None and LOCAL_FILE.is_file():
        file = LOCAL_FILE
    declared = declarations()
    check_keys(declared, file=file, environ=environ, extra_env={CACHE_ENV, SCHEDULER_ENV, ISA_ENV})
    services = {
        name: resolve(declaration, name, flags, file=file, environ=environ) for name, declaration in declared.items()
    }
    return UpSettings(
        services=services,
        workers=_count("--workers", args.workers, MOST_WORKERS),
        schedulers=_count("--schedulers", args.schedulers, MOST_SCHEDULERS),
        model=_agreed("model", services) or "default",
        served_model_name=_agreed("served_model_name", services),
        own_nats=not _names_nats(flags, file, environ),
        file=file,
    )


def _count(flag: str, text: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(f"{flag}: {text!r} must be a number from 1 to {most}")
    return int(text)


def _agreed(name: str, services: Mapping[str, MeshConfig]) -> str:
    """The one value that was given for a shared option; a service that has its default follows the others."""
    given = {
        getattr(config, name)
        for config in services.values()
        if hasattr(config, name) and getattr(config, name) != getattr(type(config), name)
    }
    if len(given) > 1:
        raise ValueError(f"{name} differs between services: {', '.join(sorted(given))}")
    return str(given.pop()) if given else ""


def _names_nats(flags: Mapping[str, Any], file: Path | None, environ: Mapping[str, str]) -> bool:
    """True if a NATS server was named anywhere, even the default address."""
    if flags.get("nats") is not None or "HEADRACE_NATS" in environ:
        return True
    return file is not None and any("nats" in table for table in read_file(file).values())
