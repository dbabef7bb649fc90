"""Whoever names no limit gets one that the workers take to which the scheduler will give the request."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from gateway_mesh import MAX_MODEL_LEN, MODEL, RunningGateway
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.context_length import context_of, default_answer
from gateway.mesh_choice import candidate
from observability.tracing import Tracing
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from scheduler.metrics import SchedulerMetrics
from scheduler.reporting import Reporter
from shared.messages import Capacity, ModelInfo, Outcome, PoolInfo, Sampling, Submit, pack_tokens
from shared.subjects import Subjects

POOLS = [
    PoolInfo("chat", 1, max_model_len=100, longest_prompt=60, adapters=[("sql", 80)], overflow=["long"]),
    PoolInfo("long", 1, max_model_len=900, shortest_prompt=61, longest_prompt=1 << 62),
    PoolInfo("small", 1, max_model_len=50),
]
INFO = ModelInfo("m", 900, 50, 3, adapters=["sql"], pools=POOLS)


# --- as the scheduler decides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "pool", "adapter", "context"),
    [
        (10, "", "", 100), (60, "", "", 100), (61, "", "", 900),  # by the range that it is in
        (10, "long", "", 900), (10, "small", "", 50), (50, "small", "", 0),  # by the pool that it asks for
        (99, "chat", "", 100), (100, "chat", "", 900),  # by overflow
        (10, "", "sql", 80), (10, "chat", "sql", 80), (80, "chat", "sql", 0),
        (10, "met by nobody", "", 50), (70, "met by nobody", "", 100), (900, "", "", 0),
    ],
)  # fmt: skip
def test_the_pool_says_how_long(prompt: int, pool: str, adapter: str, context: int) -> None:
    assert context_of(INFO, prompt, pool, adapter) == context


def test_of_pools_without_ranges_the_nameless_is_asked_first_and_else_what_all_take_is_promised() -> None:
    pools = [PoolInfo("a", 1, max_model_len=200), PoolInfo("b", 1, max_model_len=100)]
    info = ModelInfo("m", 900, 50, 3, pools=pools)
    assert [context_of(info, prompt) for prompt in (10, 150, 250)] == [100, 200, 0]
    with_default = ModelInfo("m", 900, 50, 3, pools=[*pools, PoolInfo("default", 1, max_model_len=150)])
    assert [context_of(with_default, prompt) for prompt in (10, 149, 150)] == [150, 150, 200]


def test_a_scheduler_of_before_tells_the_models_alone() -> None:
    info = ModelInfo("m", 900, 50, 3, adapters=["sql"], pools=[PoolInfo("chat", 1), PoolInfo("long", 1)])
    assert context_of(info, 10, "chat") == context_of(info, 10, "", "sql") == 900
    assert default_answer([info], [10], "chat", "", 2048) == 890


def test_of_several_meshes_the_least_that_has_room_counts_and_those_that_have_the_pool() -> None:
    other = ModelInfo("m", 40, 50, 1, pools=[PoolInfo("default", 1, max_model_len=40)])
    assert default_answer([INFO, other], [10], "", "", 2048) == 30
    assert default_answer([INFO, other], [10], "long", "", 2048) == 890
    assert default_answer([INFO, other], [50], "", "", 2048) == 50, "the other one has no room for such a prompt"
    assert default_answer([INFO, other], [50, 10], "", "", 2048) == 30, "the limit is one for all prompts"
    assert default_answer([INFO, other], [10], "", "", 16) == 16
    assert default_answer([INFO], [900], "", "", 2048) == 1, "it is refused for its prompt"
    assert default_answer([], [10], "", "", 16) == 16


def test_a_mesh_whose_pool_is_too_short_comes_behind_one_where_it_fits() -> None:
    def submit(most: int) -> Submit:
        return Submit("r", 1, "g", "m", pack_tokens([1] * 10), Sampling(1, most), 0, pool="small")

    assert candidate("a", INFO, submit(40)).fits and not candidate("a", INFO, submit(41)).fits


NAMES = ["", "a", "b", "c"]
WORKERS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(2, 40), st.integers(1, 5), st.sampled_from([[], ["x"], ["x", "y"]])),
    min_size=1, max_size=5,
)  # fmt: skip
RULES = st.sampled_from(
    [
        ("", ""),
        ("a,b,c", "a>b,b>c"),
        ("a:-5,b:6-15,c", ""),
        ("a:-5,b:6-,c", "a>b,a>c"),
        ("a:-5,b:9-,c", "b>c,a>default"),
    ]
)


@given(WORKERS, RULES, st.integers(1, 40), st.sampled_from([*NAMES, "default"]), st.sampled_from(["", "x", "y"]))
@settings(max_examples=400, deadline=None)
def test_the_scheduler_takes_what_it_is_told_by_its_beats(
    workers: list[tuple[str, int, int, list[str]]], rules: tuple[str, str], prompt: int, pool: str, adapter: str
) -> None:
    core = SchedulerCore(Limits(max_num_seqs=4, max_num_batched_tokens=64, pools=rules[0], pool_overflow=rules[1]))
    for index, (its_pool, longest, blocks, adapters) in enumerate(workers):
        capacity = Capacity("m", longest, 8, blocks, 50, [], pool=its_pool, adapters=adapters)
        core.worker_up(f"w{index}", 1, capacity, 0)
    reporter = Reporter(
        core, Subjects("blue"), lambda subject, payload: None, SchedulerMetrics(CollectorRegistry()),
        Tracing("scheduler", "s", "", 0.0), 0,
    )  # fmt: skip
    (info,) = reporter.beat("s", False).models

    def outcome(name: str, most: int) -> Outcome:
        tokens = pack_tokens([1] * prompt)
        submit = Submit(name, 1, "g", "m", tokens, Sampling(1, most), 0, pool=pool, adapter=adapter)
        return core.submit(submit, 0).outcome

    if outcome("one more token", 1) is Outcome.ACCEPTED:
        assert outcome("the default", default_answer([info], [prompt], pool, adapter, 2048)) is Outcome.ACCEPTED


# --- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pooled(gw: RunningGateway) -> Iterator[RunningGateway]:
    pools = [
        PoolInfo("chat", 1, max_model_len=96, longest_prompt=64, adapters=[("sql", 80)]),
        PoolInfo("long", 1, max_model_len=MAX_MODEL_LEN, shortest_prompt=65, longest_prompt=1 << 62),
    ]
    gw.mesh.adapters = {MODEL: ["sql"]}
    gw.mesh.queue = {"pools": pools}
    gw.mesh.script = lambda submit, choice, position: 0
    gw.call(gw.mesh.beat())
    yield gw
    gw.mesh.adapters, gw.mesh.queue = {}, {}


CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_a_chat_without_a_limit_gets_the_room_that_its_pool_or_its_adapter_has(
    pooled: RunningGateway, http: httpx.Client
) -> None:
    def limit(pool: str = "", **body: str) -> int:
        assert http.post("/v1/chat/completions", json={**CHAT, **body}, headers={"x-headrace-pool": pool}).is_success
        submit = pooled.mesh.submits[-1]
        return submit.sampling.max_tokens + len(pooled.prompt_of(submit))

    assert limit() == limit("chat") == 96
    assert limit(model="sql") == 80
    assert limit("long") == MAX_MODEL_LEN


def test_a_completion_gets_less_than_16_tokens_where_its_pool_has_not_so_many(
    pooled: RunningGateway, http: httpx.Client
) -> None:
    for prompts in ([5] * 90, [[5], [5] * 90]):
        assert http.post("/v1/completions", json={"prompt": prompts}, headers={"x-headrace-pool": "chat"}).is_success
        assert pooled.mesh.submits[-1].sampling.max_tokens == 6
    http.post("/v1/completions", json={"prompt": [5] * 90, "max_tokens": 9}, headers={"x-headrace-pool": "chat"})
    assert pooled.mesh.submits[-1].sampling.max_tokens == 9, "what the client asks for the scheduler judges"


def test_an_adapters_limit_is_told(pooled: RunningGateway, http: httpx.Client) -> None:
    cards = http.get("/v1/models").json()["data"]
    assert {card["id"]: card["max_model_len"] for card in cards} == {MODEL: MAX_MODEL_LEN, "sql": 80}
    assert http.get("/v1/models/sql").json()["max_model_len"] == 80
    assert http.post("/tokenize", json={"prompt": "x", "model": "sql"}).json()["max_model_len"] == 80
    refused = http.post("/v1/completions", json={"prompt": "x", "model": "sql", "max_tokens": 80})
    assert refused.status_code == 400 and "context of 80 tokens" in refused.json()["error"]["message"]
