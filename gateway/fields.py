"""Strict readers of a JSON object's fields: a bool is no number, null means absent, every refusal names the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gateway.errors import ApiError


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
            raise _refused(name, "is required", "missing_required_parameter")
        return value

    def integer(self, name: str, default: int, low: int, high: int, option: str = "") -> int:
        value = self.optional_integer(name, low, high, option)
        return default if value is None else value

    def optional_integer(self, name: str, low: int, high: int | None, option: str = "") -> int | None:
        """An integer in [low, high]; no upper bound with None. ``option``: the flag that sets ``high``, if one does."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refused(name, "must be an integer", "invalid_type")
        if value < low or (high is not None and value > high):
            bounds = f"be at least {low}" if high is None else f"be between {low} and {high}"
            bounds += f" ({option})" if option else ""
            side = "below_min" if value < low else "above_max"
            raise _refused(name, f"must {bounds}", f"integer_{side}_value")
        return value

    def number(self, name: str, default: float, low: float, high: float, above: bool = False) -> float:
        """A finite number in [low, high], or in (low, high] with ``above``. JSON itself has no NaN."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refused(name, "must be a number", "invalid_type")
        if not (low < value <= high if above else low <= value <= high):
            side = "above_max" if value > high else "below_min"
            least = "above" if above else "at least"
            raise _refused(name, f"must be {least} {low:g} and at most {high:g}", f"decimal_{side}_value")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _refused(name, "must be true or false", "invalid_type")
        return value

    def string(self, name: str, default: str, max_chars: int) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise _refused(name, "must be a string", "invalid_type")
        if len(value) > max_chars:
            raise _refused(name, f"must have at most {max_chars} characters", "string_above_max_length")
        return value

    def finish(self, ignored: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse every field that is neither read, nor ``ignored``, nor has a ``neutral`` value (null always is)."""
        for name, value in self._body.items():
            if name in self._read or name in ignored or value is None:
                continue
            if name not in neutral:
                raise unsupported(name, "unknown_parameter")
            if not any(_same(value, allowed) for allowed in neutral[name]):
                raise unsupported(name)


def unsupported(name: str, code: str = "unsupported_parameter") -> ApiError:
    return _refused(name, "is not supported", code)


def _refused(name: str, what: str, code: str) -> ApiError:
    """``code`` is one of those that OpenAI's API gives."""
    return ApiError(400, f"'{name}' {what}", param=name, code=code)


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and not a bool standing for a number."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
