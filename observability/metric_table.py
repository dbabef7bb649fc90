"""What the metrics of a registry are called and mean: for their document, and for checks of rules and dashboards."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

_UNITS = (
    ("seconds", "seconds"), ("bytes", "bytes"), ("ratio", "ratio"), ("perc", "ratio"), ("tokens", "tokens"),
    ("queries", "tokens"), ("hits", "tokens"), ("blocks", "blocks"), ("copies", "blocks"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Described:
    """``name`` is what a query says (of a histogram, without ``_bucket``, ``_sum`` and ``_count``)."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus keeps it."""
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


def unit_of(name: str) -> str:
    """The unit that a metric's name tells; what is merely counted has none of its own."""
    parts = name.replace(":", "_").split("_")
    found = [unit for part, unit in _UNITS if part in parts]
    return found[0] if found else "count"


def described(registry: CollectorRegistry) -> list[Described]:
    """Every metric of the registry, by name. Labels are those it is declared with."""
    found = []
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            labels: tuple[str, ...] = getattr(collector, "label_names", ()) or getattr(collector, "_labelnames", ())
            name = family.name + ("_total" if family.type == "counter" else "")
            found.append(Described(name, family.type, unit_of(name), tuple(labels), family.documentation))
    return sorted(found, key=lambda one: (not one.name.startswith("headrace"), one.name))
