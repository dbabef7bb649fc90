"""Strict readers of a JSON object's fields: a bool is no number, null means absent, every refusal names the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gateway.errors import ApiError, invalid


class Fields:
    """One request object. Reading a field marks it as honoured; :meth:`finish` refuses what nobody read."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        self._read.add(name)
        return self._body.get(name)

    def required(self, name: str) -> Any:
        value = self.raw(name)
        if value is None:
            raise invalid(f"'{name}' is required", name)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(f"'{name}' must be an integer", name)
        if not low <= value <= high:
            raise invalid(f"'{name}' must be between {low} and {high}", name)
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self.raw(name) is None else self.integer(name, 0, low, high)

    def number(self, name: str, default: float, low: float, high: float, above: bool = False) -> float:
        """A finite number in [low, high], or in (low, high] with ``above``. JSON itself has no NaN."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"'{name}' must be a number", name)
        if not (low < value <= high if above else low <= value <= high):
            raise invalid(f"'{name}' must be {'above' if above else 'at least'} {low:g} and at most {high:g}", name)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"'{name}' must be true or false", name)
        return value

    def string(self, name: str, default: str, max_chars: int) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise invalid(f"'{name}' must be a string", name)
        if len(value) > max_chars:
            raise invalid(f"'{name}' must have at most {max_chars} characters", name)
        return value

    def finish(self, ignored: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse every field that is neither read, nor ``ignored``, nor has a ``neutral`` value (null always is)."""
        for name, value in self._body.items():
            if name in self._read or name in ignored or value is None:
                continue
            if name not in neutral:
                raise unsupported(name)
            if not any(_same(value, allowed) for allowed in neutral[name]):
                raise unsupported(name)


def unsupported(name: str) -> ApiError:
    return ApiError(400, f"'{name}' is not supported", param=name, code="unsupported_field")


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and not a bool standing for a number."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
