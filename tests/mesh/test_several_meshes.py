"""Two meshes, each with a scheduler of its own, and two models, behind one gateway: real processes around one NATS."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from loopback_http import HTTP, NO_AUTHORITIES
from mesh_stack import DEADLINE_S, Stack, stack
from tiny_models import make_tokenizer
from whole_mesh import SIMULATED, eventually, free_port

from gateway.mesh_choice import Candidate, choose, content_of
from headrace.bench.probe import read_metrics
from shared.messages import Sampling, Submit, pack_tokens

pytestmark = [pytest.mark.mesh]

EAST, WEST = "east", "west"
ASK = {"model": "chat", "ignore_eos": True, "seed": 5}
LONG = 100


class TwoMeshes:
    """Both serve chat; only the west has the model code, with an adapter."""

    def __init__(self, running: Stack, folder: Path) -> None:
        self.schedulers = {name: running.start("scheduler", "--mesh", name) for name in (EAST, WEST)}
        slow = (*SIMULATED, "--simulate-base-us", "20000", "--model", str(folder))
        for mesh, model, more in ((EAST, "chat", ()), (WEST, "chat", ()), (WEST, "code", ("--lora", "poems=anywhere"))):
            running.start("worker", "--mesh", mesh, "--served-model-name", model, *slow, *more)
        port = free_port()
        running.start(
            "gateway", "--mesh", f"{EAST},{WEST}", "--model", f"chat={folder},code={folder}", "--mesh-away-s", "1",
            "--port", str(port),
        )  # fmt: skip
        self.http = httpx.Client(verify=NO_AUTHORITIES, base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)

    def serves(self, **body: object) -> bool:
        try:
            return self.http.post("/v1/completions", json={**ASK, "prompt": "x", "max_tokens": 1, **body}).is_success
        except httpx.TransportError:
            return False

    def ended_in(self, mesh: str) -> float:
        """Sequences that its scheduler has seen the end of."""
        port = re.search(r"metrics on http://[^:]+:(\d+)/", self.schedulers[mesh].output())
        assert port is not None
        page = HTTP.get(f"http://127.0.0.1:{port.group(1)}/metrics").text
        return read_metrics([page]).get("headrace_sequences_ended_total", 0.0)

    def home_of(self, prompt: str) -> str:
        """Where the request goes while nobody waits anywhere."""
        tokens = self.http.post("/tokenize", json={"model": "chat", "prompt": prompt}).json()["tokens"]
        submit = Submit("r", 1, "g", "chat", pack_tokens(tokens), Sampling(1, 1), 0)
        best = choose([Candidate(EAST, 1), Candidate(WEST, 1)], content_of(submit))
        assert best is not None
        return best.name

    def stream(self, prompt: str) -> Iterator[str]:
        body = {**ASK, "prompt": prompt, "max_tokens": LONG, "stream": True}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoMeshes]:
    folder = tmp_path / "tiny"
    make_tokenizer().save_pretrained(folder)
    with stack() as running:
        meshes = TwoMeshes(running, folder)
        yield meshes
        meshes.http.close()


def test_a_scheduler_is_killed_and_what_it_ran_goes_on_in_the_other_mesh(two: TwoMeshes) -> None:
    eventually(lambda: two.serves(model="poems"), "the west serves")
    cards = two.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("chat", None), ("code", None), ("poems", "code")]
    ask = {**ASK, "prompt": "x"}
    texts = [two.http.post("/v1/completions", json={**ask, "model": name}).json() for name in ("code", "poems")]
    assert texts[0]["choices"][0]["text"] != texts[1]["choices"][0]["text"]
    assert two.serves(model="gpt-4") is False
    prompt = next(prompt for prompt in map(str, range(100)) if two.home_of(prompt) == EAST)

    eventually(lambda: two.serves(prompt=prompt) and two.ended_in(EAST), "the east serves")
    pieces = two.stream(prompt)
    begun = [next(pieces) for _ in range(3)]
    ended = two.ended_in(WEST)
    two.schedulers[EAST].kill()
    text = "".join([*begun, *pieces])
    eventually(lambda: two.ended_in(WEST) == ended + 1, "the west has seen its end")
    assert text == "".join(two.stream(prompt)), "which the west answers all of"
