"""One loader for every service's configuration: defaults, then a TOML file, then the environment, then flags.

A service declares its options once, as a frozen dataclass whose fields are made by :func:`option`. From that come the
command line flags (``--max-num-seqs``), the environment variables (``HEADRACE_MAX_NUM_SEQS``), the TOML keys
(``max-num-seqs`` or ``max_num_seqs`` in the service's table), ``--help`` and ``docs/configuration.md``.
An unknown key is an error wherever it is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ENV_PREFIX = "HEADRACE_"
CONFIG_FILE_ENV = "HEADRACE_CONFIG"
MAX_FILE_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line and names the setting and where it was written."""


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    check: Callable[[Any], str | None] | None = None,
    secret: bool = False,
) -> Any:
    """Declare one option. ``check`` returns what is wrong with a value, or None."""
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "check": check, "secret": secret}
    )


def at_least(low: float) -> Callable[[Any], str | None]:
    return lambda value: None if value is None or value >= low else f"must be at least {low:g}"


def between(low: float, high: float) -> Callable[[Any], str | None]:
    return lambda value: None if value is None or low <= value <= high else f"must be between {low:g} and {high:g}"


def size_bytes(text: str) -> int:
    """``"1GiB"``, ``"512MiB"``, ``"2G"`` (binary, as people mean it) or a plain number of bytes."""
    units = {"k": 10, "m": 20, "g": 30, "t": 40}
    body = text.strip().lower().removesuffix("ib").removesuffix("b")
    shift = 0
    if body and body[-1] in units:
        shift = units[body[-1]]
        body = body[:-1]
    try:
        value = float(body) * (1 << shift)
    except ValueError:
        raise ConfigError(f"{text!r} is no size; write e.g. 1GiB, 512MiB or a number of bytes") from None
    if not 0 <= value < 1 << 62:
        raise ConfigError(f"{text!r} is no usable size")
    return int(value)


def is_size(text: str) -> str | None:
    """A check: what is wrong with a size as :func:`size_bytes` reads it."""
    try:
        size_bytes(text)
    except ConfigError as error:
        return str(error).removeprefix(f"{text!r} ")
    return None


@dataclasses.dataclass(frozen=True)
class Option:
    """One declared option, as read from its field."""

    name: str  # max_num_seqs
    type: Any
    default: Any
    help: str
    choices: Sequence[str] | None
    check: Callable[[Any], str | None] | None
    secret: bool

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return "--" + self.key

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def base_type(self) -> type:
        """The type without ``| None``."""
        if isinstance(self.type, types.UnionType):
            return next(arg for arg in typing.get_args(self.type) if arg is not type(None))
        return self.type

    def parse(self, value: Any, where: str) -> Any:
        """``value`` (a string, or a TOML value) as this option's type, checked."""
        kind = self.base_type
        try:
            if value is None:
                if self.base_type is self.type:
                    raise ValueError
                parsed: Any = None
            elif kind is bool:
                parsed = _parse_bool(value)
            elif _wrong_kind(value, kind):
                raise ValueError
            else:
                parsed = kind(value)
        except (ValueError, TypeError):
            raise ConfigError(f"{where}: {value!r} is no {kind.__name__}") from None
        if self.choices is not None and parsed not in self.choices:
            raise ConfigError(f"{where}: {value!r} is none of {', '.join(self.choices)}")
        if isinstance(parsed, float) and parsed != parsed:
            raise ConfigError(f"{where}: not a number")
        problem = self.check(parsed) if self.check is not None else None
        if problem:
            raise ConfigError(f"{where}: {value!r} {problem}")
        return parsed


def _wrong_kind(value: Any, kind: type) -> bool:
    """True if a TOML value must not be read as ``kind`` although ``kind(value)`` would take it."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return True
    return (kind is int and isinstance(value, float)) or (kind is str and not isinstance(value, str))


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        lowered = value.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
    raise ValueError


def options_of(declaration: type) -> list[Option]:
    hints = typing.get_type_hints(declaration)
    return [
        Option(
            name=field.name,
            type=hints[field.name],
            default=field.default,
            help=field.metadata["help"],
            choices=field.metadata["choices"],
            check=field.metadata["check"],
            secret=field.metadata["secret"],
        )
        for field in dataclasses.fields(declaration)
    ]


class Parser(argparse.ArgumentParser):
    """argparse in this project's manner: a bad command line is one line on stderr and exit 2."""

    def error(self, message: str) -> NoReturn:
        hint = f"; see {self.prog} --help" if message.startswith("unrecognized") else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n")


def add_flags(parser: argparse.ArgumentParser, declaration: type, skip: Iterable[str] = ()) -> None:
    """Add a flag for each option. Values stay strings here; :meth:`Option.parse` judges them."""
    for opt in options_of(declaration):
        if opt.name in set(skip):
            continue
        text = opt.help.replace("%", "%%") + ("" if opt.default in (None, "") else f" (default: {opt.default})")
        if opt.base_type is bool:
            parser.add_argument(opt.flag, dest=opt.name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            metavar = "{" + ",".join(opt.choices) + "}" if opt.choices else opt.base_type.__name__.upper()
            parser.add_argument(opt.flag, dest=opt.name, default=None, metavar=metavar, help=text)


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML configuration file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        tables = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:  # no TOML, no UTF-8, a number of too many digits, a name with a NUL
        raise ConfigError(f"{path}: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name!r} stands outside a table; write it under e.g. [gateway]")
    return tables


def resolve(
    declaration: type[T],
    table: str,
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Build ``declaration`` from its defaults, ``[mesh]`` and ``[table]`` of the file, the environment and the flags.

    ``flags`` maps option names to given values; None means that the flag was not given. ``[mesh]`` holds what
    several services share; keys there that this service lacks are left to the others.
    """
    environ = os.environ if environ is None else environ
    opts = {opt.name: opt for opt in options_of(declaration)}
    values: dict[str, Any] = {}
    if file is None and environ.get(CONFIG_FILE_ENV):
        file = Path(environ[CONFIG_FILE_ENV])
    if file is not None:
        tables = read_file(file)
        for key, value in tables.get("mesh", {}).items():
            name = key.replace("-", "_")
            if name in opts:
                values[name] = opts[name].parse(value, f"{file}: [mesh] {key}")
        for key, value in tables.get(table, {}).items():
            name = key.replace("-", "_")
            if name not in opts:
                raise ConfigError(f"{file}: unknown key {key!r} in [{table}]")
            values[name] = opts[name].parse(value, f"{file}: [{table}] {key}")
    for opt in opts.values():
        if opt.env in environ:
            values[opt.name] = opt.parse(environ[opt.env], opt.env)
    for name, value in flags.items():
        if value is not None and name in opts:
            values[name] = opts[name].parse(value, opts[name].flag)
    return declaration(**values)


def check_keys(
    declarations: Mapping[str, type], *, file: Path | None, environ: Mapping[str, str], extra_env: Iterable[str] = ()
) -> None:
    """Refuse unknown tables and keys of the file and unknown ``HEADRACE_*`` variables, over all services at once.

    Only a program that knows every service can do this; a single service checks its own table in :func:`resolve`.
    """
    known = {table: {opt.name for opt in options_of(decl)} for table, decl in declarations.items()}
    everything = set().union(*known.values())
    if file is not None:
        for table, keys in read_file(file).items():
            if table != "mesh" and table not in known:
                raise ConfigError(f"{file}: unknown table [{table}]")
            allowed = everything if table == "mesh" else known[table]
            for key in keys:
                if key.replace("-", "_") not in allowed:
                    raise ConfigError(f"{file}: unknown key {key!r} in [{table}]")
    allowed_env = {ENV_PREFIX + name.upper() for name in everything} | {CONFIG_FILE_ENV} | set(extra_env)
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in allowed_env:
            raise ConfigError(f"unknown environment variable {name}")


def is_one_name(text: str) -> str | None:
    """A check: what is wrong with a name where others take several, separated by commas."""
    return "must be one name: only a gateway joins several meshes" if "," in text else None


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """What every service needs to join a mesh. Services inherit it."""

    nats: str = option("nats://127.0.0.1:4222", "NATS server(s), comma-separated; tls:// insists on TLS")
    nats_token: str = option("", "token for NATS; better given by the environment than as a flag", secret=True)
    nats_user: str = option("", "user for NATS, with a password; empty: the service's kind, e.g. gateway")
    nats_password: str = option("", "password for NATS; better given by the environment than as a flag", secret=True)
    nats_ca: str = option("", "PEM file with the CA that NATS's certificate must be of; empty: the system's CAs")
    mesh: str = option(
        "default",
        "name of the mesh; services meet only inside one, but a gateway joins several, comma-separated",
        check=is_one_name,
    )
    log_level: str = option("info", "least severe log lines shown", choices=("debug", "info", "warning", "error"))
    otlp_endpoint: str = option("", "OTLP/HTTP endpoint for traces, e.g. http://127.0.0.1:4318; empty: no traces")
    trace_sampling: float = option(
        0.1, "share of requests traced where the caller sent no traceparent", check=between(0, 1)
    )


def parse_service(declaration: type[T], table: str, prog: str, argv: Sequence[str] | None = None) -> T:
    """Command line of one service: its flags plus ``--config FILE``. Bad settings are one line and exit 2."""
    parser = Parser(prog=prog, description=(declaration.__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--config", type=Path, default=None, help="TOML configuration file")
    add_flags(parser, declaration)
    args = parser.parse_args(argv)
    try:
        return resolve(declaration, table, vars(args), file=args.config)
    except ConfigError as error:
        parser.error(str(error))
