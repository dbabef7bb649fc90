"""The three services as this package sees them: where each declares its options, and which module starts it.

Imported by name and only when asked for, so that a machine which lacks what one service needs (torch, a web server)
can run the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shared.config import MeshConfig, Option, options_of

OUR_PACKAGES = ("gateway", "headrace", "kernels", "observability", "scheduler", "shared", "worker")
"""The top-level import names of this distribution. They are common words: others may own one too (see doctor)."""


@dataclass(frozen=True)
class Service:
    """``name`` is the command, the TOML table, and the package."""

    name: str
    declaration_name: str

    def declaration(self) -> type[MeshConfig]:
        """The dataclass that declares its options. Light: no service's config module imports torch."""
        found: type[MeshConfig] = getattr(importlib.import_module(f"{self.name}.config"), self.declaration_name)
        return found

    def main(self) -> Callable[[Sequence[str]], int]:
        """What runs it: ``main(argv) -> exit code``. Raises ImportError where its extra is not installed."""
        found: Callable[[Sequence[str]], int] = importlib.import_module(f"{self.name}.__main__").main
        return found


SERVICES = {
    service.name: service
    for service in (
        Service("gateway", "GatewayConfig"),
        Service("scheduler", "SchedulerConfig"),
        Service("worker", "WorkerConfig"),
    )
}


def declarations() -> dict[str, type[MeshConfig]]:
    """TOML table -> declaration, for every service."""
    return {name: service.declaration() for name, service in SERVICES.items()}


def united_options(declared: Iterable[type]) -> list[Option]:
    """Every option once, by name, in order of first appearance."""
    options: dict[str, Option] = {}
    for declaration in declared:
        for option in options_of(declaration):
            options.setdefault(option.name, option)
    return list(options.values())
