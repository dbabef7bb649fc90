"""A steady load of streams and plain requests, from clients that keep their connections; every failure is told."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import httpx

TOKENS = 150


@dataclass
class Load:
    """``failures`` are said one by one; ``gaps_s`` lie between the events of the streams."""

    url: str
    streams: int
    plain: int
    failures: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    finished: int = 0
    texts: set[str] = field(default_factory=set)  # of equal requests

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``; requests that are open then end by themselves."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for ask in [self._stream] * self.streams + [self._plain] * self.plain:
                group.create_task(self._again(ask, client, stop))

    async def _again(self, ask, client: httpx.AsyncClient, stop: asyncio.Event) -> None:  # type: ignore[no-untyped-def]
        while not stop.is_set():
            try:
                self.texts.add(await ask(client))
                self.finished += 1
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{ask.__name__}: {type(error).__name__} {error}")

    def _body(self, stream: bool) -> dict[str, object]:
        return {
            "model": "tiny", "prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True, "seed": 7, "temperature": 1,
            "stream": stream,
        }  # fmt: skip

    async def _stream(self, client: httpx.AsyncClient) -> str:
        text, last, finished = "", 0.0, ""
        async with client.stream("POST", "/v1/completions", json=self._body(stream=True)) as answer:
            assert answer.status_code == 200, f"{answer.status_code} {(await answer.aread())!r}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    finished += line.removeprefix("data: ")
                    continue
                now = time.monotonic()
                if last:
                    self.gaps_s.append(now - last)
                last = now
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, line
                text += event["choices"][0]["text"]
        assert finished == "[DONE]", finished
        return text

    async def _plain(self, client: httpx.AsyncClient) -> str:
        answer = await client.post("/v1/completions", json=self._body(stream=False))
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
        return str(answer.json()["choices"][0]["text"])


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
