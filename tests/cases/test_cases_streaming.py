"""Acceptance cases of kind S, streaming, detokenising and stop strings: B08 to B13."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from oracles import Streamed, open_stream, refused, streamed, strict_json, transport_parity
from tiny_models import make_tokenizer
from tokenizers import Tokenizer
from tokenizers_under_test import KINDS
from transformers import PreTrainedTokenizerFast
from whole_mesh import SIMULATED, VOCAB_SIZE, Mesh, at_once, eventually, memory_bytes, running_mesh

from worker.simulated import expected_tokens

pytestmark = pytest.mark.mesh

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
HF = make_tokenizer()

NEW_TOKENS = 'headrace_step_tokens_total{kind="new"}'


def ids_of(prompt: str) -> list[int]:
    ids: list[int] = HF.encode(prompt)
    return ids


def decoded(ids: list[int]) -> str:
    text: str = HF.decode(ids, skip_special_tokens=True)
    return text


# --- B08 --------------------------------------------------------------------------------------------------------------


def socket_stream(mesh: Mesh, path: str, body: dict[str, Any]) -> tuple[bytes, bytes]:
    """(head, body without its chunked framing) of an answer, as the bytes came off the socket."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n"
        "connection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", mesh.port), timeout=60) as connection:
        connection.sendall(head.encode() + payload)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head_bytes, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head_bytes.lower()
    pieces = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return head_bytes, b"".join(pieces)
        pieces.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]


@pytest.mark.parametrize("include_usage", [None, False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_b08_the_shape_of_a_chat_stream(mesh: Mesh, include_usage: bool | None, n: int) -> None:
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    body = {"messages": HELLO, "max_tokens": 12, "n": n, "stream": True, "ignore_eos": True, **options}
    head, content = socket_stream(mesh, CHAT, body)
    assert b"content-type: text/event-stream" in head.lower()
    assert b"\r" not in content and content.endswith(b"data: [DONE]\n\n") and content.count(b"[DONE]") == 1
    frames = content.split(b"\n\n")[:-1]
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    events = [strict_json(frame[6:]) for frame in frames[:-1]]
    assert len({(event["id"], event["object"], event["created"], event["model"]) for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    if include_usage:
        last = events.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12 * n
    for event in events:
        assert event["choices"] and not event.get("usage")
    for index in range(n):
        own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


@pytest.fixture(scope="module", autouse=True)
def late_answer(tiny: Path) -> Iterator[Future[tuple[list[str], float]]]:
    """What the official client makes of a first token after 20 s, in the background of the other tests."""
    slow = (*SIMULATED, "--simulate-base-us", "20000000")
    with ThreadPoolExecutor(1) as pool, running_mesh(tiny, worker=slow) as mesh:

        def ask() -> tuple[list[str], float]:
            began = time.monotonic()
            with openai.OpenAI(base_url=mesh.url + "/v1", api_key="unused", max_retries=0) as client:
                stream = client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=1, stream=True, temperature=0
                )
                ends = [chunk.choices[0].finish_reason or "" for chunk in stream]
            return ends, time.monotonic() - began

        yield pool.submit(ask)


# --- B09 --------------------------------------------------------------------------------------------------------------

CJK = "从前有座山 🏔️ 山里有座庙 👩‍👩‍👧 "


def exact_text(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """The text of ``output`` behind ``prompt``: decode(prompt + output) minus decode(prompt)."""
    before = tokenizer.decode(prompt)
    both = tokenizer.decode(prompt + output)
    assert both.startswith(before)
    return both[len(before) :]


def check_detokenizing(mesh: Mesh, tokenizer: Tokenizer, prompt: str, vocab_size: int) -> None:
    """O2 against the known tokens of a simulated worker, for 50 seeds."""
    ids = tokenizer.encode(prompt).ids

    def check(seed: int) -> None:
        body = {"prompt": prompt, "seed": seed, "max_tokens": 64, "ignore_eos": True}
        stream = transport_parity(mesh, **body)
        want = exact_text(tokenizer, ids, expected_tokens(ids, seed, 64, vocab_size))
        assert stream.text() == want
        end = 0
        for piece in stream.pieces[0]:
            end += len(piece)
            assert piece[-1] != "\ufffd" or want[end - 1] == "\ufffd"

    at_once([lambda seed=seed: check(seed) for seed in range(50)])


def test_b09_byte_level_text_is_exact(simulated: Mesh) -> None:
    check_detokenizing(simulated, HF.backend_tokenizer, CJK, VOCAB_SIZE)


def test_b09_a_model_at_temperature_one_streams_what_it_answers(mesh: Mesh) -> None:
    at_once([
        lambda seed=seed: transport_parity(mesh, prompt=CJK, seed=seed, temperature=1, max_tokens=32)
        for seed in range(12)
    ])  # fmt: skip


@pytest.mark.parametrize("kind", ["llama_style", "metaspace"])
def test_b09_sentencepiece_text_is_exact(simulated: Mesh, tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind]()
    folder = tmp_path / kind
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    vocab_size = tokenizer.get_vocab_size()
    flags = ("--simulate", "--simulate-vocab-size", str(vocab_size), "--simulate-base-us", "1000")
    beside = Mesh(simulated.nats, folder, worker=flags, model=kind, beside=simulated)
    with contextlib.closing(beside):
        beside.wait_ready()
        check_detokenizing(beside, tokenizer, "hello world. a hello", vocab_size)


# --- B10 --------------------------------------------------------------------------------------------------------------


def boundary_of(pieces: list[str]) -> tuple[int, str]:
    """(place, string) of two characters that two tokens of the text share, which occur nowhere before."""
    text = "".join(pieces)
    end = 0
    for left, right in itertools.pairwise(pieces):
        end += len(left)
        stop = left[-1] + right[0]
        if end > 12 and "\ufffd" not in stop and text.find(stop) == end - 1:
            return end - 1, stop
    raise AssertionError("no such place; take another prompt")


def test_b10_stop_strings_across_tokens(mesh: Mesh) -> None:
    body = {"prompt": "the beginning", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = transport_parity(mesh, **body)
    text = plain.text()
    place, stop = boundary_of(plain.pieces[0])
    earlier = next(text[at : at + 3] for at in range(3, place - 4) if text.find(text[at : at + 3]) == at)
    for stops, want in (([stop], text[:place]), ([stop, earlier], text[: text.find(earlier)])):
        stream = transport_parity(mesh, **body, stop=stops)
        assert (stream.text(), stream.finish()) == (want, "stop")
    included = transport_parity(mesh, **body, stop=stop, include_stop_str_in_output=True)
    assert (included.text(), included.finish()) == (text[:place] + stop, "stop")
    assert "beginning" not in text
    unmoved = transport_parity(mesh, **body, stop="beginning")
    assert (unmoved.text(), unmoved.finish()) == (text, "length")


# --- B11 --------------------------------------------------------------------------------------------------------------


def seed_with_eos_at(step: int, prompt: str) -> int:
    """A seed with which the simulated worker's first EOS (id 0) is token number ``step``, counted from 1."""
    ids = ids_of(prompt)
    for seed in range(100_000):
        tokens = expected_tokens(ids, seed, step, VOCAB_SIZE)
        if tokens[-1] == 0 and 0 not in tokens[:-1]:
            return seed
    raise AssertionError("no such seed")


@pytest.mark.parametrize(("step", "max_tokens"), [(1, 9), (5, 9), (5, 5), (1, 1)])
def test_b11_eos_ends_an_answer_and_is_not_shown(simulated: Mesh, step: int, max_tokens: int) -> None:
    seed = seed_with_eos_at(step, "an end")
    stream = transport_parity(simulated, prompt="an end", seed=seed, max_tokens=max_tokens)
    tokens = expected_tokens(ids_of("an end"), seed, step - 1, VOCAB_SIZE) if step > 1 else []
    assert (stream.text(), stream.finish()) == (decoded(tokens), "stop")
    assert stream.usage is not None and stream.usage["completion_tokens"] == step


def test_b11_ignore_eos_min_tokens_and_the_cap(simulated: Mesh) -> None:
    body = {"prompt": "an end", "seed": seed_with_eos_at(2, "an end"), "max_tokens": 9}
    ignored = transport_parity(simulated, **body, ignore_eos=True)
    assert ignored.finish() == "length" and ignored.usage is not None and ignored.usage["completion_tokens"] == 9
    held = transport_parity(simulated, **body, min_tokens=4)
    assert held.usage is not None and held.usage["completion_tokens"] > 4
    refused(simulated.post(**body, min_tokens=10))


def test_b11_min_tokens_are_exact_for_eos_and_for_stop_strings(mesh: Mesh) -> None:
    body = {"prompt": "an end", "temperature": 0, "max_tokens": 20, "logit_bias": {"0": 100}}
    at_once_over = transport_parity(mesh, **body)
    assert (at_once_over.text(), at_once_over.finish()) == ("", "stop")
    held = transport_parity(mesh, **body, min_tokens=4)
    assert held.finish() == "stop" and held.usage is not None and held.usage["completion_tokens"] == 5
    biased = {**body, "logit_bias": {str(ids_of("a")[0]): 100}}
    assert transport_parity(mesh, **biased, stop="a").text() == ""
    assert transport_parity(mesh, **biased, stop="a", min_tokens=4).text() == "aaaa"


# --- B12 --------------------------------------------------------------------------------------------------------------


def twenty_begun(mesh: Mesh, streams: contextlib.ExitStack, max_tokens: int) -> None:
    """Twenty streams, each with its third event read, which ``streams`` holds open."""
    for index in range(20):
        lines = streams.enter_context(open_stream(mesh, prompt=f"left {index}", max_tokens=max_tokens, ignore_eos=True))
        got = Streamed()
        while len(got.events) < 3:
            got.add(next(lines))


def test_b12_clients_that_leave_free_everything(simulated: Mesh) -> None:
    simulated.quiescence()
    aborted = 'headrace_gateway_requests_total{endpoint="completions",outcome="aborted"}'
    before = simulated.metrics(simulated.gateway).get(aborted, 0)
    with contextlib.ExitStack() as streams:
        twenty_begun(simulated, streams, 500)
    simulated.quiescence(within_s=2)
    assert simulated.metrics(simulated.gateway)[aborted] - before == 20
    # The worker stands still: the next tokens it makes are those of the next request.
    made = simulated.metrics(simulated.scheduler)[NEW_TOKENS]
    simulated.answer(prompt="after", max_tokens=4, ignore_eos=True)
    eventually(lambda: simulated.metrics(simulated.scheduler)[NEW_TOKENS] > made, "a count")
    simulated.quiescence()
    assert simulated.metrics(simulated.scheduler)[NEW_TOKENS] - made == 4


def test_b12_clients_that_leave_while_their_worker_is_away_free_everything(simulated: Mesh) -> None:
    simulated.quiescence()
    aborted = 'headrace_gateway_requests_total{endpoint="completions",outcome="aborted"}'
    before = simulated.metrics(simulated.gateway).get(aborted, 0)
    with contextlib.ExitStack() as streams:
        twenty_begun(simulated, streams, 1500)
        simulated.workers[0].kill()
        simulated.wait_ready(False)
    eventually(lambda: simulated.metrics(simulated.gateway).get(aborted, 0) - before == 20, "all have left")
    made = simulated.metrics(simulated.scheduler)[NEW_TOKENS]
    simulated.workers[0] = simulated.start_worker()
    simulated.wait_ready()
    simulated.answer(prompt="after", max_tokens=4, ignore_eos=True)
    simulated.quiescence()
    eventually(lambda: simulated.metrics(simulated.scheduler)[NEW_TOKENS] - made == 4, "nothing is made for them")


# --- B13 --------------------------------------------------------------------------------------------------------------


def neighbours(mesh: Mesh, round_: int) -> float:
    """Seconds that eight ordinary clients take, whose texts are checked."""

    def one(index: int) -> None:
        prompt = f"neighbour {index} of round {round_}"
        stream = streamed(mesh, prompt=prompt, max_tokens=200, seed=5, ignore_eos=True)
        assert stream.text() == decoded(expected_tokens(ids_of(prompt), 5, 200, VOCAB_SIZE))

    began = time.monotonic()
    at_once([lambda index=index: one(index) for index in range(8)])
    return time.monotonic() - began


def test_b13_a_slow_reader_gets_its_text_and_costs_nobody_anything(simulated: Mesh) -> None:
    tokens = 1900
    body = {"prompt": "slow", "max_tokens": tokens, "seed": 3, "ignore_eos": True, "stream": True}
    payload = json.dumps(body).encode()
    usual = min(neighbours(simulated, round_) for round_ in range(2))
    before = memory_bytes(simulated.gateway)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", simulated.port))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                     b"content-length: %d\r\n\r\n" % len(payload) + payload)  # fmt: skip
        taken = [slow.recv(1)]
        over = threading.Event()

        def sip() -> None:
            while not over.wait(1):
                taken.append(slow.recv(1))

        with ThreadPoolExecutor(1) as pool:
            sipping = pool.submit(sip)
            beside = min(neighbours(simulated, round_) for round_ in range(2, 5))
            # Its blocks come back although it has read next to nothing.
            eventually(
                lambda: simulated.metrics(simulated.scheduler)["vllm:kv_cache_usage_perc"] == 0, "the blocks are free"
            )
            grown = memory_bytes(simulated.gateway) - before
            over.set()
            sipping.result()
        assert len(b"".join(taken)) < 100
        answer = b"".join(taken) + b"".join(iter(lambda: slow.recv(65536), b""))
    pieces = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert text == decoded(expected_tokens(ids_of("slow"), 3, tokens, VOCAB_SIZE)) and b"[DONE]" in answer
    assert grown < 16 << 20
    assert beside < 1.2 * usual + 0.1, "eight neighbours are slowed down"


def test_b08_the_official_client_waits_for_a_late_first_token(late_answer: Future[tuple[list[str], float]]) -> None:
    ends, seconds = late_answer.result(120)
    assert seconds > 19 and [end for end in ends if end] == ["length"]
