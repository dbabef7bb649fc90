"""Streams that are cut anywhere and resumed at another gateway, to which the tokens come in other groups."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest
from gateway_mesh import MODEL, FakeMesh, RunningGateway, Script, pseudo_random, running_gateway
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback_http import HTTP, NO_AUTHORITIES
from tool_templates import save_tokenizer

from gateway.idempotency import MAX_NUMBERED_CHOICES
from gateway.keys import digest_of
from shared.messages import Submit, TokenEntry

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = {"Idempotency-Key": "8e03978e-40d5-43e8-bc93-6894a57f9324"}
WHEN = re.compile(rb'-\d+-|"created":\d+')  # the first run began, in ids and chunks
MESSAGES = [{"role": "user", "content": "你好 😀"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}, {"type": "function", "function": {"name": "clock"}}]
CALLS = {
    "hermes": 'I look.<tool_call>{"name": "get_weather", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
    "mistral": 'I look.[TOOL_CALLS][{"name": "get_weather", "arguments": {"a": 1}}, '
    '{"name": "clock", "arguments": {}}]',
}


class Bursts:
    """Tokens on their way to a gateway, held back and put together as a random number generator says.

    Which choice goes first, how many tokens come at once, and whether the end comes with the last one or behind it are
    all arbitrary; each choice's own order is kept.
    """

    def __init__(self, mesh: FakeMesh) -> None:
        self._send = mesh.send
        self.random: random.Random | None = None  # as they are generated
        self._held: dict[tuple[str, int], list[TokenEntry]] = {}

    async def send(self, gateway: str, entries: list[TokenEntry], epoch: int | None = None) -> None:
        if self.random is None:
            await self._send(gateway, entries, epoch)
            return
        await self._send(gateway, [entry for entry in entries if entry.prompt_logprobs], epoch)
        for entry in entries:
            if not entry.prompt_logprobs:
                self._held.setdefault((entry.request_id, entry.choice), []).append(entry)
        places = list(self._held)
        self.random.shuffle(places)
        for place in places:
            if self._held[place][-1].end or self.random.random() < 0.3:
                await self._send(gateway, self._joined(self._held.pop(place)), epoch)

    def _joined(self, entries: list[TokenEntry]) -> list[TokenEntry]:
        assert self.random is not None
        first, last = entries[0], entries[-1]
        tokens = [token for entry in entries for token in entry.tokens]
        logprobs = [logprob for entry in entries for logprob in entry.logprobs]
        whole = TokenEntry(
            first.request_id, first.attempt, first.choice, first.offset, tokens, last.end, last.count,
            logprobs=logprobs, cached=first.cached,
        )  # fmt: skip
        if last.end != "length" or self.random.random() < 0.5:
            return [whole]
        end = msgspec.structs.replace(last, offset=last.count, tokens=[], logprobs=[], cached=-1)
        return [msgspec.structs.replace(whole, end="", count=0), end]


def script(submit: Submit, choice: int, position: int) -> int:
    """Greedy requests repeat themselves; of the sampled ones every second choice ends by itself."""
    if submit.sampling.temperature == 0:
        return 3 + (position * 7 + choice * 13) % 90
    return 0 if choice % 2 and position == 6 else pseudo_random(submit, choice, position)


def says(ids: list[list[int]]) -> Script:
    return lambda submit, choice, position: ids[choice][position]


class Mesh:
    """Two gateways. ``burst`` says how tokens come to the second one."""

    def __init__(self, first: RunningGateway, other: RunningGateway) -> None:
        self.first, self.other = first, other
        self.bursts = Bursts(other.mesh)
        other.mesh.send = self.bursts.send  # type: ignore[method-assign]
        self._clients = [
            httpx.Client(verify=NO_AUTHORITIES, base_url=gateway.url, timeout=60) for gateway in (first, other)
        ]

    def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] = KEY) -> bytes:
        """The whole stream from the first gateway."""
        answer = self._clients[0].post(path, json=body | {"stream": True}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.content

    def resume(self, path: str, body: dict[str, Any], last: str, burst: int | None = 1) -> bytes:
        """The rest from the other gateway, without its comments."""
        self.bursts.random = None if burst is None else random.Random(burst)
        answer = self._clients[1].post(path, json=body | {"stream": True}, headers=KEY | {"Last-Event-ID": last})
        assert answer.status_code == 200, answer.text
        return re.sub(rb"^:\n", b"", answer.content, flags=re.MULTILINE)

    def refusal(self, path: str, body: dict[str, Any], headers: Any) -> dict[str, Any]:
        answer = self._clients[1].post(path, json=body, headers=headers)
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error

    def close(self) -> None:
        for client in self._clients:
            client.close()


def mesh_of(folder: Path) -> Iterator[Mesh]:
    with ExitStack() as stack:
        mesh = Mesh(*(stack.enter_context(running_gateway(folder)) for _ in range(2)))
        stack.callback(mesh.close)
        for gateway in (mesh.first, mesh.other):
            gateway.mesh.script = script
            gateway.mesh.queue = {"grammars": True}
            gateway.until(gateway.takes_grammars)
        yield mesh


@pytest.fixture(scope="module")
def mesh(tokenizer_folder: Path) -> Iterator[Mesh]:
    yield from mesh_of(tokenizer_folder)


@pytest.fixture(scope="module", params=CALLS)
def tool_mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    for mesh in mesh_of(save_tokenizer(request.param, tmp_path_factory.mktemp(request.param) / "tiny")):
        texts = [CALLS[request.param], "No call at all."]
        mesh.first.mesh.script = mesh.other.mesh.script = says([[*mesh.first.encode(text), 2] for text in texts])
        yield mesh


def events_of(raw: bytes) -> list[bytes]:
    """The whole events; what is behind the last empty line was never dispatched."""
    return [event + b"\n\n" for event in raw.split(b"\n\n")[:-1]]


def id_of(event: bytes) -> str:
    match = re.fullmatch(rb"id: ([^\n]+)\ndata: [^\n]+\n\n", event)
    assert match, event
    return match[1].decode()


def place_of(event: bytes) -> int:
    """Whose event it is; -1 behind all choices."""
    data = event.split(b"data: ")[1]
    choices = json.loads(data)["choices"] if data != b"[DONE]\n\n" else []
    return int(choices[0]["index"]) if choices else -1


def check_ids(events: list[bytes]) -> None:
    """Each id counts the events of each choice up to it."""
    counts = [0] * (id_of(events[0]).split("-")[2].count(".") + 1)
    for event in events:
        counts[place_of(event)] += 1
        assert id_of(event).split("-")[2] == ".".join(map(str, counts))
        assert id_of(event).split("-")[:2] == id_of(events[0]).split("-")[:2]


def check_same(whole: list[bytes], joined: list[bytes]) -> None:
    """Byte for byte; choices may interleave otherwise, which also shows in the ids."""
    places = sorted({place_of(event) for event in whole})
    check_ids(joined)
    if len(places) <= 2:
        assert joined == whole
        return
    data = [[(place_of(event), event.split(b"data: ")[1]) for event in events] for events in (whole, joined)]
    for place in places:
        assert [one for one in data[0] if one[0] == place] == [one for one in data[1] if one[0] == place]
    assert id_of(joined[-1]) == id_of(whole[-1])


def check_tells_all(mesh: Mesh, path: str, body: dict[str, Any], events: list[bytes]) -> None:
    """Joined, the events are the reply of the same request that is not streamed."""
    unstreamed = {name: value for name, value in body.items() if name != "stream_options"}
    reply = HTTP.post(mesh.first.url + path, json=unstreamed, headers=KEY).json()
    chunks = [json.loads(event.split(b"data: ")[1]) for event in events[:-1]]
    if "stream_options" in body:
        assert chunks[-1]["usage"] == reply["usage"]
    for expected in reply["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        own = [choice for choice in own if choice["index"] == expected["index"]]
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == expected["finish_reason"]
        if path == CHAT:
            text = "".join(choice["delta"].get("content", "") for choice in own)
            assert text == (expected["message"]["content"] or "")
            deltas = [call for choice in own for call in choice["delta"].get("tool_calls", ())]
            for index, call in enumerate(expected["message"].get("tool_calls", ())):
                parts = [delta for delta in deltas if delta["index"] == index]
                assert parts[0]["function"]["name"] == call["function"]["name"]
                assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
        else:
            assert "".join(choice["text"] for choice in own) == expected["text"]
        told = [choice["logprobs"] for choice in own if choice["logprobs"]]
        for name, values in (expected["logprobs"] or {}).items():
            if values is not None:
                assert list(itertools.chain.from_iterable(part[name] for part in told)) == values
        ids = [token for choice in own for token in choice.get("token_ids", ())]
        assert ids == expected.get("token_ids", [])


USAGE = {"stream_options": {"include_usage": True}}
EACH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat sampled": (CHAT, {"messages": MESSAGES, "max_tokens": 14}),
    "chat greedy": (CHAT, {"messages": MESSAGES, "max_tokens": 10, "temperature": 0, **USAGE}),
    "chat n": (CHAT, {"messages": MESSAGES, "max_tokens": 9, "n": 2, **EACH_USAGE}),
    "chat logprobs": (CHAT, {"messages": MESSAGES, "max_tokens": 9, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "chat ids": (CHAT, {"messages": MESSAGES, "max_tokens": 9, "return_token_ids": True, **EACH_USAGE}),
    "chat structured": (CHAT, {"messages": MESSAGES, "max_tokens": 9, "response_format": {"type": "json_object"}}),
    "chat last": (CHAT, {"messages": MESSAGES, "max_tokens": 1, **USAGE}),
    "text sampled": (COMPLETIONS, {"prompt": "abc", "max_tokens": 14, "seed": 5}),
    "text penalties": (COMPLETIONS, {"prompt": "abc", "max_tokens": 9, "presence_penalty": 1, "logit_bias": {"7": 3}}),
    "text batch": (COMPLETIONS, {"prompt": ["abc", "de"], "n": 2, "max_tokens": 8, **USAGE}),
    "text echo": (COMPLETIONS, {"prompt": "abc", "n": 2, "max_tokens": 8, "echo": True, "logprobs": 1}),
    "text only the prompt": (COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}),
    "text ids": (COMPLETIONS, {"prompt": "abc", "n": 2, "max_tokens": 8, "return_token_ids": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_cut_after_every_event(mesh: Mesh, kind: str) -> None:
    path, body = KINDS[kind]
    whole = events_of(mesh.stream(path, body))
    assert len(whole) > 2 or "only" in kind
    check_ids(whole)
    check_tells_all(mesh, path, body, whole)
    for cut in range(1, len(whole) + 1):
        rest = mesh.resume(path, body, id_of(whole[cut - 1]), burst=cut)
        check_same(whole, whole[:cut] + events_of(rest))


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_stop_strings(mesh: Mesh, logprobs: bool, n: int) -> None:
    """What is held back, what the match swallows, and the cancel, which does not wait for anything."""
    text = mesh.first.decode([3 + position * 7 % 90 for position in range(30)])
    body = {
        "messages": MESSAGES, "max_tokens": 30, "temperature": 0, "n": n, "stop": [text[8:11], text[4:6] + "never"],
        "logprobs": logprobs, **EACH_USAGE,
    }  # fmt: skip
    whole = events_of(mesh.stream(CHAT, body))
    shown = [json.loads(event.split(b"data: ")[1]) for event in whole[:-2]]
    own = [event["choices"][0] for event in shown if event["choices"][0]["index"] == 0]
    assert "".join(choice["delta"].get("content", "") for choice in own) == text[:8]
    assert own[-1]["finish_reason"] == "stop"
    for cut in range(1, len(whole) + 1):
        mesh.other.mesh.cancels.clear()
        rest = mesh.resume(CHAT, body, id_of(whole[cut - 1]), burst=cut)
        check_same(whole, whole[:cut] + events_of(rest))
    mesh.other.until(lambda: not mesh.other.mesh.running)


@pytest.mark.parametrize("logprobs", [False, True])
def test_tool_calls(tool_mesh: Mesh, logprobs: bool) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "n": 2, "max_tokens": 400, "logprobs": logprobs, **USAGE}
    whole = events_of(tool_mesh.stream(CHAT, body))
    raw = b"".join(whole)
    assert raw.count(b'"id":"call_') + len(re.findall(rb'"id":"[0-9a-f]{9}"', raw)) == 2
    assert b"clock" in raw and b'"finish_reason":"tool_calls"' in raw and b'"finish_reason":"stop"' in raw
    check_tells_all(tool_mesh, CHAT, body, whole)
    for cut in range(1, len(whole) + 1):
        rest = tool_mesh.resume(CHAT, body, id_of(whole[cut - 1]), burst=cut)
        check_same(whole, whole[:cut] + events_of(rest))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(KINDS)), cuts=st.lists(st.floats(0, 1), min_size=1, max_size=4), burst=st.integers(0)
)
def test_cut_anywhere_again_and_again(mesh: Mesh, kind: str, cuts: list[float], burst: int) -> None:
    """At any byte, several times: a client has only the events that came whole."""
    path, body = KINDS[kind]
    whole = events_of(mesh.stream(path, body))
    seen = whole[:1]
    for cut in [*cuts, 1.0]:
        raw = mesh.resume(path, body, id_of(seen[-1]), burst)
        seen += events_of(raw[: round(cut * len(raw))])
    assert mesh.resume(path, body, id_of(seen[-1]), burst) == b""
    check_same(whole, seen)


def test_two_runs_differ_in_nothing_but_the_time(mesh: Mesh) -> None:
    path, body = KINDS["chat n"]
    runs = [WHEN.sub(b"", mesh.stream(path, body)) for _ in range(2)]
    assert sorted(runs[0].split(b"\n")) == sorted(runs[1].split(b"\n"))


def test_the_key_settles_the_seed(mesh: Mesh) -> None:
    body = {"prompt": "abc", "max_tokens": 8}

    def answer(key: str, body: dict[str, Any], path: str = COMPLETIONS) -> tuple[str, int, Any]:
        reply = HTTP.post(mesh.first.url + path, json=body, headers={"Idempotency-Key": key}).json()
        return reply.get("id", ""), mesh.first.mesh.submits[-1].sampling.seed, reply.get("choices", reply.get("text"))

    first = answer("a", body)
    assert answer("a", body) == first, "whole replies too are the same"
    assert 0 <= first[1] < 2**63
    other = answer("b", body)
    assert other[0] != first[0] and other[1] != first[1]
    assert answer("a", body | {"seed": None})[1] == first[1], "null is absent"
    assert answer("a", body | {"seed": 5})[1] == 5, "the body's own counts"
    assert answer("a", body, "/generate") == answer("a", body, "/generate")
    unkeyed = [HTTP.post(mesh.first.url + COMPLETIONS, json=body).json()["id"] for _ in range(2)]
    assert unkeyed[0] != unkeyed[1]


def test_a_stream_without_a_key_is_as_ever(mesh: Mesh) -> None:
    raw = mesh.stream(*KINDS["chat n"], headers={})
    assert b"id: " not in raw
    assert b"id: " not in mesh.stream("/generate", {"prompt": "abc", "max_tokens": 3})


def test_usage_told_with_every_event_is_that_of_its_choice(mesh: Mesh) -> None:
    events = events_of(mesh.stream(*KINDS["chat n"]))
    told = [json.loads(event.split(b"data: ")[1]) for event in events[:-1]]
    for index in range(2):
        own = [
            event["usage"]["completion_tokens"]
            for event in told[2:]
            if event["choices"] and event["choices"][0]["index"] == index
        ]
        assert own == sorted(own) and own[-1] == (9, 7)[index]
    assert told[-1]["usage"]["completion_tokens"] == 16


def test_an_error_has_no_id_and_what_came_before_it_stands(mesh: Mesh) -> None:
    path, body = KINDS["chat sampled"]
    whole = events_of(mesh.stream(path, body))
    gateway = mesh.first
    gateway.mesh.stepping = False
    try:
        with HTTP.stream("POST", gateway.url + path, json=body | {"stream": True}, headers=KEY, timeout=30) as answer:
            gateway.until(lambda: bool(gateway.mesh.running))
            for _ in range(4):
                gateway.call(gateway.mesh.step())
            gateway.call(gateway.mesh.event(gateway.mesh.running[0].submit, "failed", "by the test"))
            raw = answer.read()
    finally:
        gateway.mesh.stepping = True
    events = events_of(raw)
    assert events[-1].startswith(b'data: {"error":')
    seen = events[:-1]
    rest = events_of(mesh.resume(path, body, id_of(seen[-1])))
    assert WHEN.sub(b"", b"".join(seen + rest)) == WHEN.sub(b"", b"".join(whole))


def test_comments_while_what_was_seen_is_made_again(mesh: Mesh) -> None:
    path, body = KINDS["chat sampled"]
    whole = events_of(mesh.stream(path, body))
    mesh.bursts.random = None
    headers = KEY | {"Last-Event-ID": id_of(whole[-3])}
    raw = HTTP.post(mesh.other.url + path, json=body | {"stream": True}, headers=headers).content
    assert raw.startswith(b":\n") and b":\n\n" not in raw
    assert re.sub(rb"^:\n", b"", raw, flags=re.MULTILINE) == b"".join(whole[-2:])


def test_the_official_client_goes_on(mesh: Mesh) -> None:
    with openai.OpenAI(base_url=f"{mesh.other.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 14, "stream": True}
        with client.chat.completions.with_streaming_response.create(**asked, extra_headers=KEY) as answer:
            whole = events_of(answer.read())
        headers = KEY | {"Last-Event-ID": id_of(whole[3])}
        mesh.bursts.random = None
        chunks = [chunk.to_json() for chunk in client.chat.completions.create(**asked, extra_headers=headers)]
    expected = [json.loads(event.split(b"data: ")[1]) for event in whole[4:-1]]
    assert [json.loads(chunk) for chunk in chunks] == expected


# --- headers that cannot be honoured ---------------------------------------------------------------------------------

ASK: dict[str, Any] = {"prompt": "abc", "max_tokens": 6, "stream": True}


@pytest.mark.parametrize("key", [b"", b"a b", b"\xe9", b"x" * 256, "ключ".encode()])
def test_keys_that_are_none(mesh: Mesh, key: bytes) -> None:
    assert "Idempotency-Key" in mesh.refusal(COMPLETIONS, ASK, [("Idempotency-Key", key)])["message"]


@pytest.mark.parametrize("key", ["a", "x" * 255, '"8e03978e"', "!~"])
def test_keys_that_are_some(mesh: Mesh, key: str) -> None:
    assert mesh.stream(COMPLETIONS, ASK, {"Idempotency-Key": key}).startswith(b"id: ")


@pytest.mark.parametrize("name", ["Idempotency-Key", "Last-Event-ID"])
def test_a_header_that_is_there_twice(mesh: Mesh, name: str) -> None:
    headers = [*KEY.items(), (name, "b"), *([(name, "c")] if name == "Last-Event-ID" else [])]
    assert f"{name} is there 2 times" in mesh.refusal(COMPLETIONS, ASK, headers)["message"]


def test_an_event_id_needs_the_key_a_stream_and_an_endpoint_with_ids(mesh: Mesh) -> None:
    last = {"Last-Event-ID": id_of(events_of(mesh.stream(COMPLETIONS, ASK))[1])}
    assert "needs the Idempotency-Key" in mesh.refusal(COMPLETIONS, ASK, last)["message"]
    error = mesh.refusal(COMPLETIONS, ASK | {"stream": False}, KEY | last)
    assert error["param"] == "stream" and "'stream': true" in error["message"]
    for stream in (False, True):
        assert "have no ids" in mesh.refusal("/generate", ASK | {"stream": stream}, KEY | last)["message"]


def test_an_empty_event_id_says_that_nothing_was_seen(mesh: Mesh) -> None:
    runs = [mesh.stream(COMPLETIONS, ASK, KEY | more) for more in ({}, {"Last-Event-ID": ""})]
    assert WHEN.sub(b"", runs[0]) == WHEN.sub(b"", runs[1])
    assert mesh.stream(COMPLETIONS, ASK, {"Last-Event-ID": ""}).startswith(b"data: ")


@pytest.mark.parametrize(
    "wrong",
    [
        "x", "5", "3.5.0", "{digest}", "{digest}-{created}", "{digest}-{created}-", "{digest}-{created}-1",
        "{digest}-{created}-1.0.0", "{digest}-{created}-1.2", "{digest}-{created}-01.0", "{digest}-{created}-1.-1",
        "{digest}-{created}-1.0.", "{digest}--1-1.0", "{digest}-{created}-1.0 ,", "{digest}-123456789012-1.0",
        "{digest}-{created}-99999999999.0", "{digest}-{created}-" + "1." * 5000 + "0", "0123456789abcdef-{created}-1.0",
        "{digest}-{created}-1.0\t1", "{DIGEST}-{created}-1.0", "{digest}-{created}-١.0",
    ],
)  # fmt: skip
def test_event_ids_that_were_never_sent(mesh: Mesh, wrong: str) -> None:
    digest, created, _ = id_of(events_of(mesh.stream(COMPLETIONS, ASK))[1]).split("-")
    last = wrong.format(digest=digest, created=created, DIGEST=digest.upper())
    if last == f"{digest}-{created}-1.0":
        pytest.skip("a digest of digits only has no other case")
    before = len(mesh.other.mesh.submits)
    error = mesh.refusal(COMPLETIONS, ASK, [*KEY.items(), ("Last-Event-ID", last.encode())])
    assert error["code"] == "invalid_event_id"
    assert len(mesh.other.mesh.submits) == before, "nothing is generated for it"


@pytest.mark.parametrize(
    ("path", "change", "headers"),
    [
        (COMPLETIONS, {"prompt": "abd"}, {}), (COMPLETIONS, {"max_tokens": 7}, {}), (COMPLETIONS, {"n": 2}, {}),
        (COMPLETIONS, {"stop": "x"}, {}), (COMPLETIONS, {"stream_options": {"include_usage": True}}, {}),
        (COMPLETIONS, {}, {"Idempotency-Key": "another"}),
        (CHAT, {"prompt": None, "messages": MESSAGES}, {}),
    ],
)  # fmt: skip
def test_an_event_id_of_another_stream(mesh: Mesh, path: str, change: dict[str, Any], headers: dict[str, str]) -> None:
    last = {"Last-Event-ID": id_of(events_of(mesh.stream(COMPLETIONS, ASK))[1])}
    error = mesh.refusal(path, ASK | change, KEY | last | headers)
    assert error["code"] == "invalid_event_id" and "another body" in error["message"]


def test_a_key_is_its_tenants_own(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Also a tenant's other API key goes on with it; somebody else's does not."""
    tenants = {"sk-1": "a", "sk-2": "a", "sk-3": "b"}
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(
            f'[[key]]\nid = "{key}"\nsha256 = "{digest_of(key).hex()}"\ntenant = "{tenant}"\n'
            for key, tenant in tenants.items()
        )
    )
    with running_gateway(tokenizer_folder, api_keys=str(file)) as gateway:

        def post(key: str, last: str = "") -> httpx.Response:
            headers = KEY | {"Authorization": f"Bearer {key}", "Last-Event-ID": last}
            return HTTP.post(gateway.url + COMPLETIONS, json=ASK, headers=headers)

        whole = events_of(post("sk-1").content)
        assert events_of(post("sk-2", id_of(whole[2])).content)[-1] == whole[-1]
        assert post("sk-3", id_of(whole[2])).json()["error"]["code"] == "invalid_event_id"
        post("sk-3")
        seeds = [submit.sampling.seed for submit in gateway.mesh.submits]
        assert seeds[0] == seeds[1] != seeds[2]


def test_a_place_beyond_the_end_is_an_error_in_the_stream(mesh: Mesh) -> None:
    for path, body in (KINDS["text sampled"], KINDS["chat n"]):
        whole = events_of(mesh.stream(path, body))
        head, _, counts = id_of(whole[-1]).rpartition("-")
        first, *others = counts.split(".")
        last = f"{head}-{'.'.join([str(int(first) + 1), *others[:-1], '0'])}"
        events = events_of(mesh.resume(path, body, last))
        error = json.loads(events[-1].removeprefix(b"data: "))["error"]
        assert error["code"] == "invalid_event_id" and "beyond the end" in error["message"]
        assert not any(place_of(event) == -1 for event in events[:-1]), "no usage, no [DONE]"


def test_choices_are_bounded(mesh: Mesh) -> None:
    body = ASK | {"prompt": ["a", "b"], "n": MAX_NUMBERED_CHOICES // 2, "max_tokens": 1}
    raw = events_of(mesh.stream(COMPLETIONS, body))
    assert events_of(mesh.resume(COMPLETIONS, body, id_of(raw[-2]))) == raw[-1:]
    error = mesh.refusal(COMPLETIONS, body | {"prompt": ["a", "b", "c"]}, KEY)
    assert error["param"] == "n" and str(MAX_NUMBERED_CHOICES) in error["message"]
    assert HTTP.post(mesh.other.url + COMPLETIONS, json=body | {"prompt": ["a", "b", "c"]}).status_code == 200


# --- the client of docs/api.md ---------------------------------------------------------------------------------------


class CuttingProxy:
    """Forwards to the gateways in turn, and cuts each answer behind so many bytes as ``budgets`` says."""

    def __init__(self, ports: list[int], budgets: list[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._budgets = iter(budgets)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, socket.create_connection(("127.0.0.1", next(self._ports)), timeout=30) as gateway:
                client.settimeout(30)
                self.connections += 1
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(65536)
                length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])  # type: ignore[index]
                left = length - len(head.split(b"\r\n\r\n", 1)[1])
                while left > 0:
                    part = client.recv(65536)
                    head += part
                    left -= len(part)
                gateway.sendall(re.sub(rb"(?i)connection: keep-alive", b"Connection: close", head))
                budget = next(self._budgets, 1 << 30)
                while budget > 0 and (part := gateway.recv(min(budget, 65536))):
                    client.sendall(part)
                    budget -= len(part)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.mark.parametrize("kind", ["chat sampled", "text batch"])
def test_the_documented_client(mesh: Mesh, kind: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Last-Event-ID" in block]
    program: dict[str, Any] = {}
    exec(code[: code.index("\nbody = ")], program)  # what asks a gateway at the usual port is left out
    program["time"] = SimpleNamespace(sleep=lambda seconds: None)
    program["uuid"] = SimpleNamespace(uuid4=lambda: KEY["Idempotency-Key"])
    path, body = KINDS[kind]
    mesh.bursts.random = random.Random(3)
    proxy = CuttingProxy([mesh.first.port, mesh.other.port], [0, 100, 700, 900, 1100, 1300, 500, 1700])
    try:
        chunks = list(program["chunks"](proxy.url + path, body))
    finally:
        proxy.close()
    assert proxy.connections > 4

    content = json.dumps(body | {"stream": True})
    headers = KEY | {"Content-Type": "application/json"}
    raw = HTTP.post(mesh.first.url + path, content=content, headers=headers).content
    whole = [json.loads(event.split(b"data: ")[1]) for event in events_of(raw)[:-1]]
    assert len({chunk.pop("created") for chunk in chunks}) == 1
    assert len({chunk.pop("created") for chunk in whole}) == 1
    for index in {place_of(event) for event in events_of(raw)}:
        own = [
            [chunk for chunk in told if [choice["index"] for choice in chunk["choices"]] == [index] * (index >= 0)]
            for told in (chunks, whole)
        ]
        assert own[0] == own[1]
    assert len(chunks) == len(whole)
