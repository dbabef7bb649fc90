"""What a mesh says of itself under load: its services' metrics, and what Linux knows of their processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from headrace.bench.mesh import MeshFailed, RunningMesh
from headrace.services import SERVICES

SAMPLE_EVERY_S = 0.5
CLIENT = "client"
"""This process, beside the services."""


@dataclass(frozen=True)
class Sample:
    """One look at everything. ``metrics``: name -> sum over processes and labels; ``cpu_s``: service -> CPU seconds."""

    at_s: float  # time.perf_counter
    metrics: Mapping[str, float]
    cpu_s: Mapping[str, float]
    gateway_rss_bytes: int

    @property
    def at_work(self) -> float:
        """Sequences that run, wait, or were preempted and wait to resume."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "headrace_num_requests_preempted")
        return sum(self.metrics.get(name, 0.0) for name in names)


def read_metrics(texts: Iterable[str]) -> dict[str, float]:
    """Pages of Prometheus text -> value by name, summed over pages; with its labels, and summed over them without."""
    found: defaultdict[str, float] = defaultdict(float)
    for text in texts:
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            bare = name.partition("{")[0]
            if line.startswith("#") or not bare or bare.endswith("_bucket"):
                continue
            found[bare] += float(value)
            if name != bare:
                found[name] += float(value)
    return dict(found)


class Probe:
    def __init__(self, mesh: RunningMesh, http: httpx.AsyncClient) -> None:
        self._mesh = mesh
        self._http = http

    async def sample(self) -> Sample:
        """Raises MeshFailed if a service is gone, or has not said where its metrics are."""
        urls = [url for service in SERVICES for url in await self._mesh.metrics_of(service)]
        cpu_s = defaultdict(float, {CLIENT: time.process_time()})
        rss = 0
        try:
            answers = await asyncio.gather(*(self._http.get(url) for url in urls))
            for service, pid in _services_of(self._mesh.pid):
                cpu_s[service] += _cpu_s(pid)
                if service == "gateway":
                    rss += _rss_bytes(pid)
        except (OSError, httpx.HTTPError) as error:
            raise MeshFailed(f"a service cannot be asked for its metrics: {error or type(error).__name__}") from None
        return Sample(time.perf_counter(), read_metrics(answer.text for answer in answers), cpu_s, rss)

    async def watch(self, until_s: float) -> AsyncIterator[Sample]:
        """Samples from now to ``until_s`` (time.perf_counter), both ends included."""
        yield await self.sample()
        while (left_s := until_s - time.perf_counter()) > 0:
            await asyncio.sleep(min(left_s, SAMPLE_EVERY_S))
            yield await self.sample()


def _services_of(pid: int) -> list[tuple[str, int]]:
    """(service, process id) of every child of ``headrace up`` that is one."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace").split("\0")
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        if module in SERVICES:
            found.append((module, int(child)))
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()  # proc(5): from field 3 on
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
