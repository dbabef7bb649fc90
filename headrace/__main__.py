"""The ``headrace`` command. Each subcommand is imported only when it is used."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.services import OUR_PACKAGES, SERVICES, Service
from shared.config import Parser, parse_service
from shared.model_name import GGUF_SUFFIX

COMMANDS = {
    "up": "run a whole mesh on this machine: NATS, scheduler, workers, gateway",
    "restart": "restart every process of a running `headrace up`, one by one, while it serves",
    "gateway": "run one gateway (HTTP API)",
    "scheduler": "run one scheduler",
    "worker": "run one worker (a model on a GPU or CPU)",
    "explain": "why a request took its time: a waterfall with causes",
    "bench": "measure throughput and latency, and compare scheduling policies",
    "profile": "where the time of one step of a model goes, beside this machine's limits",
    "simulate": "run the scheduler in virtual time on modelled hardware; `simulate figures` checks claims",
    "capacity": "how many sequences a model and a GPU hold: weights, KV cache, pages",
    "tap": "print live bus traffic, and record it",
    "replay": "run a recorded trace under the same or another configuration and compare",
    "fetch-model": "fetch a model into the cache and print its folder",
    "keys": "make API keys for a gateway",
    "doctor": "check this installation and say what is wrong",
    "config-docs": "print docs/configuration.md",
    "metrics-docs": "print docs/metrics.md",
    "version": "print the version",
}


CLOSED_PIPE, INTERRUPTED = 141, 130
"""What a shell reports of a program that SIGPIPE or SIGINT ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of ``headrace ARGV...``; a bad command line is exit 2, a reader that left (``| head``) 141."""
    try:
        try:
            return _command(argv)
        finally:
            sys.stdout.flush()  # that nobody reads may show only now
    except* BrokenPipeError:
        code = CLOSED_PIPE
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except* KeyboardInterrupt:
        code = INTERRUPTED
    return code


def _command(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="headrace",
        description="An LLM serving mesh with continuous batching.",
        epilog="commands:\n" + "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    args = parser.parse_args(argv[:1] or ["--help"])
    try:
        return _dispatch(args.command)(argv[1:])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in OUR_PACKAGES:
            raise
        extra = {"tap": "simulate", "replay": "simulate"}.get(args.command, args.command)
        extra = extra if extra in (*SERVICES, "simulate") else "all"
        parser.error(f"{error.name} is not installed; pip install 'headrace[{extra}]'")


def _dispatch(command: str) -> Callable[[Sequence[str]], int]:
    if command in SERVICES:
        return lambda argv: _service(SERVICES[command], argv)
    if command == "up":
        from headrace.up import main as up

        return up
    if command == "restart":
        from headrace.restart import main as restart

        return restart
    if command == "doctor":
        from headrace.doctor import main as doctor

        return doctor
    if command == "keys":
        from headrace.keys_command import main as keys

        return keys
    if command == "config-docs":
        from headrace.config_docs import main as config_docs

        return config_docs
    if command == "metrics-docs":
        from headrace.metrics_docs import main as metrics_docs

        return metrics_docs
    if command == "bench":
        from headrace.bench import main as bench

        return bench
    if command == "profile":
        from headrace.profile.main import main as profile

        return profile
    if command == "simulate":
        from headrace.simulate.main import main as simulate

        return simulate
    if command == "explain":
        from headrace.explain import main as explain

        return explain
    if command == "capacity":
        from headrace.capacity import main as capacity

        return capacity
    if command == "tap":
        from headrace.trace.tap import main as tap

        return tap
    if command == "replay":
        from headrace.trace.replay import main as replay

        return replay
    return {"fetch-model": _fetch_model, "version": _version}[command]


def _service(service: Service, argv: Sequence[str]) -> int:
    """Run one service. ``default`` or a GGUF file as its model is made a folder here: services know folders and ids."""
    config: Any = parse_service(service.declaration(), service.name, f"headrace {service.name}", argv)
    extra: list[str] = []
    if getattr(config, "simulate", False):
        from headrace.launch import simulated_flags

        extra = simulated_flags(config)
    elif _is_made_here(model := getattr(config, "model", "")):
        extra = ["--model", _fetched(model, f"headrace {service.name}")]
    return service.main()([*argv, *extra])


def _is_made_here(model: str) -> bool:
    return model == "default" or model.endswith(GGUF_SUFFIX) or (bool(model) and Path(model).expanduser().is_file())


def _fetch_model(argv: Sequence[str]) -> int:
    prog = "headrace fetch-model"
    parser = Parser(prog=prog, description="Fetch a model into the cache and print its folder.")
    parser.add_argument(
        "model", nargs="?", default="default", help="'default', a Hugging Face id, or a GGUF file to convert"
    )
    print(_fetched(parser.parse_args(argv).model, prog))
    return 0


def _fetched(model: str, prog: str) -> str:
    from headrace.models import ModelError, resolve_model

    try:
        return resolve_model(model)[0]
    except ModelError as error:
        Parser(prog=prog).error(str(error))


def _version(argv: Sequence[str]) -> int:
    Parser(prog="headrace version", description="Print the version.").parse_args(argv)
    print(f"headrace {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
