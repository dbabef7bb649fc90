"""``headrace restart``: restart every process of a running ``headrace up``, one by one, while it serves."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.control import KINDS, Asked, Said
from headrace.runtime_folder import running
from shared.config import Parser

CONNECT_TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Exit 0: all is up again. 1: something could not be restarted, one line says what. 2: no such mesh, bad flags."""
    parser = Parser(
        prog="headrace restart",
        description="Restart the processes of a running `headrace up`, one by one, while it serves. Each replacement "
        "is started first, and the process that it replaces ends once it is up. Ctrl-C gives up a replacement that is "
        "not up yet, and what comes after it.",
    )
    parser.add_argument(
        "--port", type=int, default=None, metavar="N",
        help="port of the mesh's gateway (default: that of the only mesh that this user runs here)",
    )  # fmt: skip
    parser.add_argument(
        "--only", default=",".join(KINDS), metavar="KINDS", help=f"some of {','.join(KINDS)} (default: all)"
    )
    parser.add_argument(
        "--no-surge", action="store_true",
        help="stop a worker before its replacement starts, where memory is too small for two: its sequences wait",
    )  # fmt: skip
    args = parser.parse_args(argv)
    kinds = [kind.strip() for kind in args.only.split(",") if kind.strip()]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(KINDS)}")
    if not kinds:
        parser.error(f"--only: name some of {', '.join(KINDS)}")
    return _restart(parser, _found(parser, args.port), Asked(kinds, not args.no_surge))


def _found(parser: Parser, port: int | None) -> Path:
    meshes = running()
    if port is None and len(meshes) > 1:
        parser.error(f"several meshes run here; choose one with --port: {', '.join(map(str, sorted(meshes)))}")
    if not meshes or (port is not None and port not in meshes):
        where = f" at port {port}" if port is not None else ""
        parser.error(f"no `headrace up` of this user runs here{where}")
    return meshes[port] if port is not None else next(iter(meshes.values()))


def _restart(parser: Parser, path: Path, asked: Asked) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(path))
        except OSError as error:
            parser.error(f"{path}: {error.strerror}")
        connection.settimeout(None)  # a model may load for minutes
        connection.sendall(msgspec.json.encode(asked) + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                said = msgspec.json.decode(line, type=Said)
                if said.exit is not None:
                    return said.exit
                print(said.say, flush=True)
    print("headrace restart: `headrace up` ended meanwhile", file=sys.stderr)
    return 1
