"""The load: streaming completions over HTTP, with the arrival time of every token chunk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from headrace.bench.workload import Shot


@dataclass
class Taken:
    """What one request took. Times in seconds."""

    prompt_tokens: int
    want_tokens: int
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)  # between chunks; a chunk is one token unless the client lagged
    e2e_s: float = 0.0
    completion_tokens: int = 0
    error: str = ""


async def fire(
    url: str, model: str, load: list[Shot], concurrency: int, done: Callable[[int], None]
) -> tuple[list[Taken], float]:
    """Send every shot, ``concurrency`` at most at once; returns what each took and the seconds in all.

    Latencies count from the shot's own arrival time where there is one, so that queueing at the client is not hidden.
    """
    places = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    finished = 0
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(600.0), limits=limits) as http:
        began = time.perf_counter()

        async def one(shot: Shot) -> Taken:
            nonlocal finished
            await asyncio.sleep(max(0.0, shot.at_s - (time.perf_counter() - began)))
            arrived = time.perf_counter() if shot.at_s else 0.0
            async with places:
                taken = await _stream(http, model, shot, arrived or time.perf_counter())
            finished += 1
            done(finished)
            return taken

        results = await asyncio.gather(*(one(shot) for shot in load))
        return list(results), time.perf_counter() - began


async def _stream(http: httpx.AsyncClient, model: str, shot: Shot, since: float) -> Taken:
    taken = Taken(len(shot.prompt), shot.max_tokens)
    body = {
        "model": model,
        "prompt": shot.prompt,
        "max_tokens": shot.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = 0.0
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                taken.error = f"HTTP {response.status_code}: {(await response.aread()).decode()[:200]}"
                return taken
            tail = b""
            async for chunk in response.aiter_raw():
                now = time.perf_counter()
                tail += chunk
                *frames, tail = tail.split(b"\n\n")
                for frame in frames:
                    if b'"usage":{' in frame.replace(b" ", b"") and b'"choices":[]' in frame.replace(b" ", b""):
                        taken.completion_tokens = json.loads(frame[6:])["usage"]["completion_tokens"]
                    elif frame.startswith(b'data: {"error"'):
                        taken.error = frame.decode()[:200]
                    elif frame.startswith(b"data: {"):
                        if not taken.ttft_s:
                            taken.ttft_s = now - since
                        else:
                            taken.itl_s.append(now - last)
                        last = now
    except httpx.HTTPError as error:
        taken.error = f"{type(error).__name__}: {error}"
    taken.e2e_s = time.perf_counter() - since
    if not taken.error and taken.completion_tokens != shot.max_tokens:
        taken.error = f"{taken.completion_tokens} tokens instead of {shot.max_tokens}"
    return taken
