"""Requests whose answers are known to the last token, and a client that reads them while faults are done to the mesh.

What a client got is reduced to what must be the same with and without a fault: :meth:`Answer.content`.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from loopback_http import NO_AUTHORITIES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CLIENT_TIMEOUT_S = 180.0  # between two bytes: catches hangs
RETRY_S = 0.05
GIVE_UP_S = 180.0  # a client that comes again and again
BUSY = (429, 503)
SCHEMA = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 150, "maxItems": 170}},
    "required": ["tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Ask:
    """One request. ``resumes``: its client has an Idempotency-Key, and comes again when the connection breaks."""

    name: str
    path: str
    body: Mapping[str, Any]
    resumes: bool = False
    key: str = ""

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass
class Answer:
    """What one client got so far. ``came_s``: when each piece of the answer came (monotonic)."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: str = ""
    whole: bool = False
    came_s: list[float] = field(default_factory=list)
    last_id: str = ""
    connections: int = 0

    def content(self) -> dict[str, Any]:
        """All that a fault must not change."""
        return {
            "texts": self.texts, "tokens": self.tokens, "logprobs": self.logprobs, "finishes": self.finishes,
            "usage": self.usage, "whole": self.whole, "error": self.error,
        }  # fmt: skip

    def add_event(self, event: dict[str, Any]) -> None:
        """One event of a stream."""
        if "error" in event:
            self.error = str(event["error"]["message"])
            return
        self._count(event)
        if event["choices"]:
            self.came_s.append(time.monotonic())
        for choice in event["choices"]:
            self._add(choice, choice["text"] if "text" in choice else choice["delta"].get("content"))

    def add_body(self, body: dict[str, Any]) -> None:
        """The whole of an answer that was not streamed."""
        self._count(body)
        for choice in body["choices"]:
            self._add(choice, choice["text"] if "text" in choice else choice["message"]["content"])
        self.whole = True

    def _count(self, body: dict[str, Any]) -> None:
        if body.get("usage"):  # but not how much of a prompt was in the cache
            self.usage = {name: count for name, count in body["usage"].items() if isinstance(count, int)}

    def _add(self, choice: dict[str, Any], text: str | None) -> None:
        index = choice["index"]
        self.texts[index] = self.texts.get(index, "") + (text or "")
        self.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
        said = choice.get("logprobs") or {}
        self.logprobs.setdefault(index, []).extend(
            said.get("content") or zip(said.get("tokens", ()), said.get("token_logprobs", ()), strict=True)
        )
        if choice["finish_reason"] is not None:
            self.finishes.setdefault(index, []).append(choice["finish_reason"])

    def gaps_s(self) -> list[float]:
        """The times between two pieces."""
        return [later - sooner for sooner, later in zip(self.came_s, self.came_s[1:], strict=False)]

    def pause_s(self) -> float:
        """How much longer the longest gap between two pieces was than the usual one."""
        gaps = self.gaps_s()
        return max(gaps) - statistics.median(gaps) if gaps else 0.0


def verdict(got: Answer, want: Answer) -> str:
    """'' if a client got what it must; else failed, missing, doubled or wrong."""
    if got.content() == want.content():
        return ""
    if got.error or not got.whole:
        prefix = all(want.texts.get(index, "").startswith(text.rstrip("\ufffd")) for index, text in got.texts.items())
        return "failed" if prefix else "wrong"
    for index, text in want.texts.items():
        have = got.texts.get(index, "")
        same = next(
            (at for at, (a, b) in enumerate(zip(have, text, strict=False)) if a != b), min(len(have), len(text))
        )
        if have != text:
            if len(have) < len(text) and text.endswith(have[same:]):
                return "missing"
            return "doubled" if len(have) > len(text) and have.endswith(text[same:]) else "wrong"
    return "wrong"


def difference(got: Answer, want: Answer) -> str:
    """Where an answer first differs, for whoever has to find out why."""
    for name, wanted in want.content().items():
        had = getattr(got, name)
        if had == wanted or not isinstance(wanted, dict):
            continue
        for key, value in wanted.items():
            other = had.get(key)
            if other != value and hasattr(value, "__len__") and other is not None:
                at = next((at for at, (a, b) in enumerate(zip(other, value, strict=False)) if a != b), len(other))
                return f"{name}[{key}] at {at} of {len(value)}: {other[at : at + 3]!r}, not {value[at : at + 3]!r}"
        return f"{name}: {str(had)[:200]}, not {str(wanted)[:200]}"
    return got.error or "whole" if got.whole != want.whole else ""


def asks(length: int) -> list[Ask]:
    """24 streams and four answers that are not streamed, of about ``length`` tokens for each choice. Where a stop
    string is to stop one, see :func:`with_stops`."""
    usual = {"max_tokens": length, "ignore_eos": True}

    def text(name: str, **body: Any) -> Ask:
        said = {"prompt": f"Tell me of {name}.", "return_token_ids": True} | usual | body
        return Ask(name, COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}} | said)

    def chat(name: str, **body: Any) -> Ask:
        said = {"messages": [{"role": "user", "content": f"Tell me of {name}."}]} | usual | body
        return Ask(name, CHAT, {"stream": True, "stream_options": {"include_usage": True}} | said)

    ruled = {"ignore_eos": False, "max_tokens": 2 * length}
    form = {"type": "json_schema", "json_schema": {"name": "tags", "strict": True, "schema": SCHEMA}}
    return [
        text("greed", temperature=0),
        text("greed of two kinds", temperature=0, prompt=["One kind of greed.", "Another kind."]),
        chat("greed in a chat", temperature=0),
        text("greed with a long prompt", temperature=0, prompt="A word and another. " * 20),
        text("seed 1", seed=1),
        text("seed 2", seed=2, top_p=0.9),
        text("seed 3", seed=3, top_k=20, min_p=0.02, temperature=1.3),
        chat("seed 4", seed=4),
        chat("seed 5", seed=5, top_p=0.8),
        text("a pair", seed=6, n=2),
        text("a pair of pairs", seed=7, n=2, prompt=["One pair.", "Another pair."], max_tokens=length // 2),
        chat("a pair in a chat", seed=8, n=2),
        text("presence", seed=9, presence_penalty=1.1),
        text("frequency", temperature=0, frequency_penalty=0.6),
        chat("repetition", seed=10, repetition_penalty=1.2),
        text("bias", seed=11, logit_bias={"40": 3, "41": -100}, presence_penalty=0.4, n=2),
        text("a stop string", seed=12, stop=[]),
        text("a stop string for a pair", seed=13, n=2, stop=[]),
        text("a stop string that is shown", seed=14, include_stop_str_in_output=True, stop=[]),
        text("a rule", seed=15, structured_outputs={"regex": f"[a-p ]{{{length},{2 * length}}}"}, **ruled),
        chat("a schema", seed=16, response_format=form, **ruled),
        text("a rule for a pair", seed=17, n=2, structured_outputs={"regex": "([a-f]{2}-){100,300}z"}, **ruled),
        text("log-probabilities", seed=18, logprobs=3),
        chat("log-probabilities in a chat", temperature=0, logprobs=True, top_logprobs=2),
        text("the best of three", seed=19, best_of=3, stream=False, stream_options=None),
        text("beams", use_beam_search=True, best_of=3, stream=False, stream_options=None, max_tokens=length // 4),
        text("a pair at once", seed=20, n=2, logprobs=1, stream=False, stream_options=None),
        chat("a chat at once", seed=21, stream=False, stream_options=None),
    ]


def with_stops(plain: Sequence[Ask], answer_of: Callable[[Ask], Answer]) -> list[Ask]:
    """Where ``stop`` is empty: a string that the answer has for the first time some two thirds along."""
    made = []
    for ask in plain:
        if ask.body.get("stop") == []:
            text = answer_of(ask).texts[0]
            at = next(at for at in range(2 * len(text) // 3, len(text)) if _new_at(text, at))
            ask = replace(ask, body={**ask.body, "stop": [text[at : at + 3]]})
        made.append(ask)
    return made


def _new_at(text: str, at: int) -> bool:
    word = text[at : at + 3]
    return len(word) == 3 and "\ufffd" not in word and text.find(word) == at


def resuming(plain: Sequence[Ask]) -> list[Ask]:
    """The same requests of clients that come again; what is sampled there has its seed from the key."""
    made = []
    for ask in plain:
        body = {name: value for name, value in ask.body.items() if name != "seed"}
        made.append(replace(ask, body=body, resumes=True, key=ask.name.replace(" ", "-")))
    return made


class Client:
    """Reads answers; of one that resumes, at one gateway after another."""

    def __init__(self, model: str) -> None:
        self._model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(verify=NO_AUTHORITIES, timeout=CLIENT_TIMEOUT_S, limits=limits, trust_env=False)
        self._over = threading.Event()

    def close(self) -> None:
        """What is being read ends as broken."""
        self._over.set()
        self._http.close()

    def read(self, urls: Sequence[str], ask: Ask, answer: Answer) -> None:
        """Read to the end. ``urls``: the gateways, in the order they are tried, over and over."""
        until_s = time.monotonic() + GIVE_UP_S
        for url in itertools.cycle(urls):
            answer.connections += 1
            broken = self._read_once(url, ask, answer)
            if not broken or not ask.resumes or time.monotonic() > until_s or self._over.wait(RETRY_S):
                answer.error = answer.error or broken
                return

    def _read_once(self, url: str, ask: Ask, answer: Answer) -> str:
        """'' when the answer is complete or has ended with an error of the mesh; else how the connection broke."""
        headers = {"Idempotency-Key": ask.key} if ask.key else {}
        if answer.last_id:
            headers["Last-Event-ID"] = answer.last_id
        body = {name: value for name, value in ask.body.items() if value is not None} | {"model": self._model}
        event_id = ""
        try:
            with self._http.stream("POST", url + ask.path, json=body, headers=headers) as reply:
                if reply.status_code != 200 or not ask.streams:
                    reply.read()
                    if reply.status_code == 200:
                        answer.add_body(reply.json())
                        return ""
                    said = f"{reply.status_code}: {reply.text[:200]}"
                    if ask.resumes and reply.status_code in BUSY:
                        return said
                    answer.error = said
                    return ""
                for line in reply.iter_lines():
                    if line.startswith("id: "):
                        event_id = line[4:]
                    elif line == "data: [DONE]":
                        answer.whole = True
                    elif line.startswith("data: "):
                        answer.add_event(json.loads(line[6:]))
                        answer.last_id = event_id  # only now is the event here
        except (httpx.TransportError, RuntimeError) as error:  # the latter: closed
            return f"{type(error).__name__}: {error}"
        return "" if answer.whole or answer.error else "the stream ended without an end"


class Reading:
    """All of ``asks`` at once, each by a client of its own that begins at the first of ``urls``."""

    def __init__(self, urls: Sequence[str], wanted: Sequence[Ask], model: str) -> None:
        self.answers = [Answer() for _ in wanted]
        self._wanted = wanted
        self._client = Client(model)
        self._pool = ThreadPoolExecutor(len(wanted))
        pairs = zip(wanted, self.answers, strict=True)
        self._reads = [self._pool.submit(self._client.read, urls, ask, answer) for ask, answer in pairs]

    def begun(self, pieces: int) -> bool:
        """Every stream has had so many pieces. An assertion fails if one has ended before."""
        for ask, answer, read in zip(self._wanted, self.answers, self._reads, strict=True):
            if read.done():
                read.result()
            if ask.streams and len(answer.came_s) < pieces:
                assert not read.done(), f"{ask.name} ended after {len(answer.came_s)} pieces: {answer.error}"
                return False
        return True

    def open(self) -> int:
        """Streams that have not ended."""
        pairs = zip(self._wanted, self._reads, strict=True)
        return sum(ask.streams and not read.done() for ask, read in pairs)

    def result(self) -> list[Answer]:
        """All answers, complete or ended by an error."""
        try:
            for read in self._reads:
                read.result()
            return self.answers
        finally:
            self.close()

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown(cancel_futures=True)
