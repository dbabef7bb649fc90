"""One gateway for several models and their LoRA adapters: which one a request means, and what each is told of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_mesh import MAX_MODEL_LEN, RunningGateway, running_gateway
from loopback_http import NO_AUTHORITIES
from tiny_models import make_tokenizer

from shared.messages import Outcome, SubmitReply, unpack_tokens

SHOUTING = "{% for message in messages %}{{ message['role'] | upper }}: {{ message['content'] }}\n{% endfor %}"
ASK = {"prompt": "the cat", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SHOUTING
    folder = tmp_path_factory.mktemp("tokenizer") / "other"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def both(tokenizer_folder: Path, other_folder: Path) -> Iterator[RunningGateway]:
    with running_gateway(tokenizer_folder, model=f"tiny={tokenizer_folder},other={other_folder}") as gateway:
        gateway.mesh.adapters = {"tiny": ["sql", "other"], "other": ["poems", "sql"]}
        gateway.until(lambda: "sql" in gateway.gateway.dispatch.mesh.adapters("tiny", time.monotonic()))
        yield gateway


@pytest.fixture
def client(both: RunningGateway) -> Iterator[httpx.Client]:
    both.mesh.submits.clear()
    with httpx.Client(verify=NO_AUTHORITIES, base_url=both.url, timeout=20) as client:
        yield client
    both.mesh.workers = 1
    both.mesh.refuse = lambda submit: None
    both.mesh.queue = {}
    both.call(both.mesh.beat())  # a gateway goes by what it was told last


def test_models_and_adapters_are_listed_and_told(client: httpx.Client) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "tiny", None), ("other", "other", None), ("sql", "sql", "tiny"), ("poems", "poems", "other")
    ]  # fmt: skip
    assert {card["max_model_len"] for card in cards} == {MAX_MODEL_LEN}
    assert client.get("/v1/models/poems").json() == cards[3]
    assert client.get("/v1/models/other").json() == cards[1]
    assert client.get("/v1/models/nope").status_code == 404


@pytest.mark.parametrize(
    ("name", "model", "adapter", "answers_as"),
    [
        (None, "tiny", "", "tiny"), ("tiny", "tiny", "", "tiny"), ("other", "other", "", "other"),
        ("sql", "tiny", "sql", "sql"), ("poems", "other", "poems", "poems"),
    ],
)  # fmt: skip
def test_the_name_says_which_model_and_which_adapter(
    both: RunningGateway, client: httpx.Client, name: str | None, model: str, adapter: str, answers_as: str
) -> None:
    answer = client.post("/v1/completions", json={**ASK, "model": name})
    assert (answer.status_code, answer.json()["model"]) == (200, answers_as)
    (submit,) = both.mesh.submits
    assert (submit.model, submit.adapter, submit.pool) == (model, adapter, "")
    streamed = client.post("/v1/completions", json={**ASK, "model": name, "stream": True}).text
    assert f'"model":"{answers_as}"' in streamed.replace(" ", "")


def test_an_unknown_name_is_a_404_as_openai_has_it(both: RunningGateway, client: httpx.Client) -> None:
    for path, body in (("/v1/completions", ASK), ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        answer = client.post(path, json={**body, "model": "gpt-4"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "the model 'gpt-4' does not exist; 'tiny', 'other', 'sql', 'poems' are served"
    assert not both.mesh.submits


def test_a_404_names_no_more_than_a_line_holds(both: RunningGateway, client: httpx.Client) -> None:
    mesh, adapters = both.gateway.dispatch.mesh, both.mesh.adapters
    try:
        both.mesh.adapters = {"tiny": [f"a{number}" for number in range(9)], "other": []}
        both.until(lambda: "a8" in mesh.adapters("tiny", time.monotonic()))
        message = client.get("/v1/models/gpt-4").json()["error"]["message"]
        assert message.endswith("; 'tiny', 'other', 'a0', 'a1', 'a2', 'a3', 'a4', 'a5', ... are served")
    finally:
        both.mesh.adapters = adapters
        both.until(lambda: "sql" in mesh.adapters("tiny", time.monotonic()))


def test_each_model_has_its_own_chat_template(both: RunningGateway, client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    texts = {}
    for name in ("tiny", "other", "poems"):
        assert client.post("/v1/chat/completions", json={**chat, "model": name}).status_code == 200
        texts[name] = both.tokenizer._backend.decode(unpack_tokens(both.mesh.submits[-1].prompt))
        tokens = client.post("/tokenize", json={"messages": chat["messages"], "model": name}).json()["tokens"]
        assert tokens == unpack_tokens(both.mesh.submits[-1].prompt)
    assert "user" in texts["tiny"]
    assert texts["other"] == texts["poems"] == "USER: hi\n"


def test_metrics_are_told_apart_by_model_and_adapters_count_for_theirs(
    both: RunningGateway, client: httpx.Client
) -> None:
    def generated(model: str) -> float:
        return both.metric("vllm:generation_tokens_total", model_name=model)

    before = generated("tiny"), generated("other")
    for name in ("other", "poems", "sql"):
        client.post("/v1/completions", json={**ASK, "model": name})
    assert (generated("tiny") - before[0], generated("other") - before[1]) == (3, 6)
    labels = {"gen_ai_operation_name": "text_completion", "gen_ai_provider_name": "headrace", "error_type": ""}
    name = "gen_ai_server_request_duration_seconds_count"
    both.until(lambda: both.metric(name, gen_ai_request_model="other", **labels) >= 2)
    client.post("/v1/completions", content=b"no json", headers={"content-type": "application/json"})
    unknown = {**labels, "error_type": "invalid", "gen_ai_request_model": ""}
    both.until(lambda: both.metric(name, **unknown) == 1)


def test_a_gateway_is_ready_while_some_model_is_and_says_which_is_not(
    both: RunningGateway, client: httpx.Client
) -> None:
    models, both.mesh.models = both.mesh.models, ["other"]
    try:
        both.until(lambda: both.gateway.dispatch.mesh.why_not_ready("tiny", time.monotonic()) is not None)
        assert client.get("/ready").status_code == 200
        assert client.post("/v1/completions", json={**ASK, "model": "other"}).status_code == 200
        both.call(_forget(both))
        refused = client.post("/v1/completions", json={**ASK, "model": "tiny"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "no ready worker serves the model 'tiny'; workers serve: other"
    finally:
        both.mesh.models = models
        both.until(lambda: both.gateway.dispatch.mesh.why_not_ready("tiny", time.monotonic()) is None)


async def _forget(gateway: RunningGateway) -> None:
    """As if whatever was ready lately had been so long ago: nobody waits for it then."""
    gateway.gateway.dispatch.mesh._ready_s.clear()


def test_an_adapter_whose_workers_are_away_is_a_503_and_one_that_is_gone_a_404(
    both: RunningGateway, client: httpx.Client
) -> None:
    mesh = both.gateway.dispatch.mesh
    try:
        both.mesh.workers = 0
        both.until(lambda: not mesh.adapters("tiny", time.monotonic()))
        both.call(_forget(both))
        gone = client.post("/v1/completions", json={**ASK, "model": "sql"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "no_worker")
        both.mesh.workers, both.mesh.adapters = 1, {"tiny": [], "other": []}
        both.until(lambda: mesh.why_not_ready("tiny", time.monotonic()) is None)
        assert client.post("/v1/completions", json={**ASK, "model": "sql"}).status_code == 404
    finally:
        both.mesh.adapters = {"tiny": ["sql", "other"], "other": ["poems", "sql"]}
        both.until(lambda: "sql" in mesh.adapters("tiny", time.monotonic()))


def test_a_name_that_may_be_an_adapters_is_a_503_until_a_worker_has_told_its_own(tokenizer_folder: Path) -> None:
    gateway = RunningGateway(tokenizer_folder)
    gateway.mesh.workers = 0
    gateway.mesh.adapters = {"tiny": ["sql"]}
    gateway.mesh.beating = False
    with gateway, httpx.Client(verify=NO_AUTHORITIES, base_url=gateway.url, timeout=20) as client:
        gateway.mesh.beating = True
        early = client.post("/v1/completions", json={**ASK, "model": "sql"})
        assert (early.status_code, early.json()["error"]["code"]) == (503, "no_worker")
        assert early.headers["retry-after"] and "'sql'" in early.json()["error"]["message"]
        gateway.mesh.workers = 1
        gateway.until(lambda: gateway.gateway.why_not_ready() is None)
        assert client.post("/v1/completions", json={**ASK, "model": "sql"}).status_code == 200
        assert client.post("/v1/completions", json={**ASK, "model": "gpt-4"}).status_code == 404


def test_a_full_queue_of_one_model_refuses_nobody_who_asks_for_another(
    both: RunningGateway, client: httpx.Client
) -> None:
    both.mesh.refuse = lambda submit: SubmitReply(Outcome.QUEUE_FULL, 7) if submit.model == "tiny" else None
    assert client.post("/v1/completions", json=ASK).status_code == 429
    assert client.post("/v1/completions", json={**ASK, "model": "other"}).status_code == 200
    both.mesh.queue = {"waiting": 9, "max_waiting": 9}
    both.until(lambda: client.post("/v1/completions", json={**ASK, "model": "other"}).status_code == 429)
    assert client.post("/v1/completions", content=b"{").status_code == 429, "when all are full nothing is parsed"


def test_the_openapi_document_has_no_limits_of_one_of_them(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert "parent" in document["components"]["schemas"]["Model"]["required"]
    parameters = document["paths"]["/v1/completions"]["post"]["parameters"]
    assert "X-Headrace-Pool" in [parameter["name"] for parameter in parameters]


def test_a_request_names_its_pool(both: RunningGateway, client: httpx.Client) -> None:
    for path, body in (("/v1/completions", ASK), ("/generate", ASK)):
        assert client.post(path, json=body, headers={"X-Headrace-Pool": "long.1"}).status_code == 200
        assert both.mesh.submits[-1].pool == "long.1"
    for bad in ("a b", "x" * 65, "ü", "a/b"):
        refused = client.post("/v1/completions", json=ASK, headers={"X-Headrace-Pool": bad.encode("utf-8")})
        assert refused.status_code == 400 and "X-Headrace-Pool" in refused.json()["error"]["message"]
