"""Flags for every field of the core's Limits, made from the dataclass, so that a new limit has its flag at once."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from scheduler.core.limits import Limits
from shared.config import ConfigError

_UNITS = {
    "max_bypass_wait_s": ("max_bypass_wait_ns", 10**9),
    "priority_aging_s": ("priority_aging_ns", 10**9),
    "target_itl_ms": ("target_itl_ns", 10**6),
}
"""Options of the scheduler service -> the limit that each sets, and its nanoseconds."""

_LISTS = ("pools", "pool_overflow", "pool_lend")


class _InNs(argparse.Action):
    """Stores seconds or milliseconds as the limit's nanoseconds."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        name = str(option_string).removeprefix("--").replace("-", "_")
        try:
            setattr(namespace, self.dest, canonical(name, values)[1])
        except ConfigError as error:
            parser.error(str(error))


def canonical(name: str, value: str) -> tuple[str, Any]:
    """``("target_itl_ms", "30")`` -> ``("target_itl_ns", 30_000_000)``; any other name and value as they are, but that
    ``/`` stands for the comma between pools.

    Raises ConfigError if the value is no finite number.
    """
    if name in _LISTS:
        return name, value.replace("/", ",")
    if name not in _UNITS:
        return name, value
    limit, unit = _UNITS[name]
    try:
        return limit, int(float(value) * unit)
    except (ValueError, OverflowError):
        raise ConfigError(f"--{name.replace('_', '-')}: {value!r} is no finite number") from None


def fields() -> dict[str, type]:
    """Field name -> int, float, bool or str."""
    hints = typing.get_type_hints(Limits)
    return {field.name: _plain(hints[field.name]) for field in dataclasses.fields(Limits)}


def add_limit_flags(parser: argparse.ArgumentParser, defaults: Limits) -> None:
    group = parser.add_argument_group("limits of the scheduler core (see scheduler/core/limits.py)")
    for name, kind in fields().items():
        flag = "--" + name.replace("_", "-")
        default = getattr(defaults, name)
        if kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, dest=name, action=action, default=None, help=f"(default: {default})")
        else:
            text = f"{'nanoseconds ' if name.endswith('_ns') else ''}(default: {default})".replace("%", "%%")
            group.add_argument(flag, dest=name, default=None, metavar=kind.__name__.upper(), help=text)
    for short, (name, unit) in _UNITS.items():
        text = f"--{name.replace('_', '-')} in {short.rpartition('_')[2]}"
        group.add_argument(
            "--" + short.replace("_", "-"), dest=name, default=None, metavar="FLOAT", action=_InNs,
            help=f"{text}, as `headrace up` has it (default: {getattr(defaults, name) / unit:g})",
        )  # fmt: skip


def changed(limits: Limits, values: Mapping[str, Any]) -> Limits:
    """``limits`` with those of ``values`` that are given and are limits. Raises ConfigError for a bad value."""
    kinds = fields()
    changes = {
        name: parsed(name, kinds[name], value) for name, value in values.items() if name in kinds and value is not None
    }
    try:
        return dataclasses.replace(limits, **changes)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def parsed(name: str, kind: type, text: Any) -> Any:
    if kind is bool:
        if isinstance(text, bool):
            return text
        words = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
        if str(text).lower() in words:
            return words[str(text).lower()]
    else:
        try:
            return kind(text)
        except ValueError:
            pass
    raise ConfigError(f"--{name.replace('_', '-')}: {text!r} is no {kind.__name__}")


def _plain(hint: Any) -> type:
    """``int | None`` -> int, ``Literal["a"]`` -> str."""
    if typing.get_origin(hint) is typing.Literal:
        return type(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _plain(next(arg for arg in typing.get_args(hint) if arg is not type(None)))
    return hint if isinstance(hint, type) else str
