"""The dashboard: the last minute in figures and the last steps as film strips, kept up to date from poll to poll.

Nothing here runs unless somebody looks: a poll takes in the steps that came since the one before, and the page
(``dashboard.html``) draws. Percentiles are read from histograms of 2 % wide buckets, so that a poll costs what is new
and not what is remembered.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from observability.page_style import STYLE
from shared.flight_record import StepTrace

FILM_STEPS = 120
"""Columns of a film strip."""

MINUTE = 60
RATE_S = 10
"""Rates and busy shares are those of so many whole seconds."""

_WIDTH = math.log(1.02)
_QUANTILES = (0.5, 0.9, 0.99)


def dashboard_page() -> bytes:
    """The page. It needs ``/debug/state`` beside it and nothing else."""
    text = files("observability").joinpath("dashboard.html").read_text("utf-8")
    return text.replace("/*STYLE*/", STYLE).encode()


@dataclass(slots=True)
class _Second:
    """What results came in within one second of the scheduler's clock."""

    second: int
    new_tokens: int = 0
    prefill: int = 0
    recompute: int = 0
    preemptions: int = 0
    busy_us: Counter[str] = field(default_factory=Counter)
    step_us: Counter[int] = field(default_factory=Counter)  # by bucket
    gap_us: Counter[int] = field(default_factory=Counter)


class Dashboard:
    """What polls have taken in so far. Not for two threads at once."""

    def __init__(self) -> None:
        self.taken = 0  # steps with results that were taken in, as the recorder counts them
        self._seconds: deque[_Second] = deque()
        self._films: dict[str, deque[tuple[int, StepTrace]]] = {}
        self._last_result: dict[str, int] = {}

    def take(self, steps: Sequence[StepTrace], settled: int) -> None:
        """The steps that got their results since the last poll, in that order; ``settled``: how many ever did."""
        for number, one in enumerate(steps, settled - len(steps) + 1):
            film = self._films.get(one.worker)
            if film is None:
                film = self._films[one.worker] = deque(maxlen=FILM_STEPS)
            film.append((number, one))
            second = self._second(one.result_ns // 1_000_000_000)
            second.new_tokens += one.new_tokens
            second.prefill += one.prefill
            second.recompute += one.recompute
            second.preemptions += len(one.preempted)
            second.busy_us[one.worker] += one.forward_us
            second.step_us[_bucket(one.forward_us)] += 1
            last = self._last_result.get(one.worker)
            if one.decodes and last is not None:
                second.gap_us[_bucket((one.result_ns - last) // 1000)] += one.decodes
            self._last_result[one.worker] = one.result_ns
        self.taken = settled

    def keep(self, workers: Iterable[str], now_ns: int) -> None:
        """Forget workers that are gone, and what is older than a minute."""
        known = set(workers)
        for gone in [worker for worker in self._films if worker not in known]:
            del self._films[gone]
            self._last_result.pop(gone, None)
        while self._seconds and self._seconds[0].second < now_ns // 1_000_000_000 - MINUTE:
            self._seconds.popleft()

    def film(self, worker: str, since: int) -> list[dict[str, Any]]:
        """The worker's last steps, those that came after result ``since`` only: a page keeps what it has had."""
        return [_frame(one) for number, one in self._films.get(worker, ()) if number > since]

    def busy(self, worker: str, now_ns: int) -> float:
        """Share of the last whole seconds in which the worker computed (0..1)."""
        busy_us = sum(one.busy_us[worker] for one in self._lately(now_ns))
        return min(1.0, busy_us / (RATE_S * 1e6))

    def figures(self, first_tokens: Sequence[tuple[int, int]], now_ns: int) -> dict[str, Any]:
        """Rates, percentiles and the last minute second by second. ``first_tokens``: (when, ns since its submit)."""
        lately = self._lately(now_ns)
        whole = [one for one in self._seconds if one.second < now_ns // 1_000_000_000]
        prefill, recompute = sum(one.prefill for one in whole), sum(one.recompute for one in whole)
        begin_ns = now_ns - MINUTE * 1_000_000_000
        waits = sorted(took for when, took in first_tokens if when >= begin_ns)
        return {
            "tokens_per_s": round(sum(one.new_tokens for one in lately) / RATE_S, 1),
            "prompt_tokens_per_s": round(sum(one.prefill for one in lately) / RATE_S, 1),
            "preemptions_per_min": sum(one.preemptions for one in whole),
            "recompute_share": round(recompute / prefill, 4) if prefill else 0.0,
            "seconds": self._series(now_ns),
            "percentiles": {
                "ttft": {
                    "count": len(waits),
                    **{_name(q): round(waits[_rank(len(waits), q)] / 1e6, 3) for q in _QUANTILES if waits},
                },
                "itl": _percentiles(sum((one.gap_us for one in whole), Counter())),
                "step": _percentiles(sum((one.step_us for one in whole), Counter())),
            },
        }

    def _series(self, now_ns: int) -> dict[str, list[int]]:
        last = now_ns // 1_000_000_000
        by_second = {one.second: one for one in self._seconds}
        nothing = _Second(0)
        line = [by_second.get(second, nothing) for second in range(last - MINUTE, last)]
        return {
            "new_tokens": [one.new_tokens for one in line],
            "prefill": [one.prefill for one in line],
            "preemptions": [one.preemptions for one in line],
        }

    def _lately(self, now_ns: int) -> list[_Second]:
        last = now_ns // 1_000_000_000
        return [one for one in self._seconds if last - RATE_S <= one.second < last]

    def _second(self, second: int) -> _Second:
        """Results come in the order of time."""
        if not self._seconds or self._seconds[-1].second < second:
            self._seconds.append(_Second(second))
        return self._seconds[-1]


def _frame(one: StepTrace) -> dict[str, Any]:
    prompts = sorted(one.chunks, key=lambda chunk: -chunk[2])[:4]
    return {
        "step": one.step, "us": one.forward_us, "wait_us": one.wait_us, "decodes": one.decodes,
        "prefill": one.prefill - one.recompute, "recompute": one.recompute, "padding": one.padding,
        "prompts": [[name, tokens] for name, _, tokens in prompts], "more_prompts": len(one.chunks) - len(prompts),
        "preempted": [list(victim) for victim in one.preempted[:4]], "preemptions": len(one.preempted),
        "admitted": len(one.admitted), "waiting": one.waiting,
    }  # fmt: skip


def _percentiles(buckets: Counter[int]) -> dict[str, Any]:
    count = sum(buckets.values())
    found: dict[str, Any] = {"count": count}
    if not count:
        return found
    ranks = [(_rank(count, q), _name(q)) for q in _QUANTILES]
    seen = 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        while ranks and ranks[0][0] < seen:
            found[ranks.pop(0)[1]] = round(math.exp((bucket + 0.5) * _WIDTH) / 1000, 3)
    return found


def _bucket(us: int) -> int:
    return int(math.log(us) / _WIDTH) if us > 1 else 0


def _rank(count: int, quantile: float) -> int:
    """Index of the nearest rank."""
    return max(0, math.ceil(count * quantile) - 1)


def _name(quantile: float) -> str:
    return f"p{quantile * 100:g}"
