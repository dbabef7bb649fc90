"""What the options of pools mean, and which pool a request comes to."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_in_a_box import Box, capacity, request

from scheduler.core.limits import Limits
from scheduler.core.pools import SHORTER, PoolRules
from shared.messages import Outcome, SubmitReply

POOLS = "chat:-8,long:9-"


def test_pools_are_read() -> None:
    rules = PoolRules.parse("chat:-4096, long:4097-, batch", "chat>long,long>default, chat>batch", "long>chat")
    assert rules.names == ("chat", "long", "batch")
    assert [rules.by_length(tokens) for tokens in (0, 4096, 4097, 1 << 40)] == ["chat", "chat", "long", "long"]
    assert rules.overflow == {"chat": ("long", "batch"), "long": ("default",)}
    assert rules.lent == {"long": ("chat",)}
    assert rules.too_long_for("chat", 4097) and not rules.too_long_for("chat", 4096)
    assert not rules.too_long_for("batch", 1 << 40) and not rules.too_long_for("long", 0)


def test_longer_pools_lend_to_shorter_ones_the_nearest_first() -> None:
    rules = PoolRules.parse("long:1000-9999,chat:-99,batch,middle:100-999", lend=SHORTER)
    assert rules.lent == {"middle": ("chat",), "long": ("middle", "chat")}
    assert rules.by_length(10_000) is None
    assert PoolRules.parse(lend=SHORTER).lent == {} == PoolRules.parse("chat:-9,long:10-").lent


@pytest.mark.parametrize(
    ("pools", "overflow", "lend", "what"),
    [
        ("chat:5", "", "", r"pools \(chat:5\) is no NAME or NAME:LOW-HIGH"),
        ("a b", "", "", r"pools \(a b\) is no NAME"),
        ("chat:9-8", "", "", r"pools \(chat:9-8\) ends before it begins"),
        ("chat,chat", "", "", "pools: chat is declared twice"),
        ("chat:-8,long:8-", "", "", "pools: chat and long both take prompts of 8 tokens"),
        ("chat:-8,all:-", "", "", "pools: chat and all both take prompts of 0 tokens"),
        ("chat", "chat", "", r"pool_overflow \(chat\) is no FROM>TO"),
        ("chat", "chat>chat", "", r"pool_overflow \(chat>chat\) is no FROM>TO"),
        ("chat", "chat>long", "", r"pool_overflow \(chat>long\): long is none of the declared pools"),
        ("chat", "", "chat>", r"pool_lend \(chat>\): nothing is none of the declared pools"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(pools: str, overflow: str, lend: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as raised:
        Limits(pools=pools, pool_overflow=overflow, pool_lend=lend)
    assert "\n" not in str(raised.value)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_any_text_is_read_or_refused(pools: str, overflow: str, lend: str) -> None:
    try:
        PoolRules.parse(pools, overflow, lend)
    except ValueError as error:
        assert str(error)


def mesh(workers: str, **more: object) -> Box:
    """Workers of these pools, with the adapters after a slash, in order."""
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_limit=8, **more)  # type: ignore[arg-type]
    box = Box(limits, workers=0)
    for index, entry in enumerate(workers.split()):
        pool, _, adapter = entry.partition("/")
        box.add_worker(
            f"w{index}", capacity(pool="" if pool == "default" else pool, adapters=[adapter] if adapter else [])
        )
    return box


def submit(box: Box, name: str, tokens: int, pool: str = "", attempt: int = 1, **more: object) -> SubmitReply:
    made = request(name, tokens, attempt=attempt, **more)  # type: ignore[arg-type]
    return box.submit(msgspec.structs.replace(made, pool=pool))


def where(box: Box, name: str) -> str:
    (sequence,) = box.core.sequences_of(name)
    return sequence.home.key.pool


def test_a_request_goes_to_the_pool_of_its_length_or_to_the_one_it_asks_for() -> None:
    box = mesh("chat long batch", pools=POOLS)
    for name, tokens, pool, wanted in (
        ("short", 8, "", "chat"), ("longer", 9, "", "long"), ("asks", 8, "batch", "batch"),
        ("both", 30, "batch", "batch"), ("small", 3, "long", "long"),
    ):  # fmt: skip
        assert submit(box, name, tokens, pool).outcome is Outcome.ACCEPTED
        assert where(box, name) == wanted
    fills = submit(box, "fills", 9, "chat")
    assert fills.outcome is Outcome.TOO_LONG
    assert fills.reason == "the pool 'chat' takes prompts of at most 8 tokens; this one has 9"
    unknown = submit(box, "unknown", 3, "chta")
    assert (
        unknown.outcome is Outcome.INVALID
        and unknown.reason == "no pool 'chta' of the model 'm'; pools: batch, chat, long"
    )
    assert submit(box, "resumed", 3, "chta", attempt=2).outcome is Outcome.NO_WORKER, "it was let in once"
    box.run()
    box.assert_tokens_right()
    box.assert_idle()
    for name, worker in (("short", "w0"), ("longer", "w1"), ("asks", "w2"), ("both", "w2"), ("small", "w1")):
        assert box.core.sequences_of(name)[0].worker == worker


def test_a_pool_without_workers_gives_its_requests_away_by_rule_only() -> None:
    box = mesh("chat", pools=POOLS)
    refused = submit(box, "long", 30)
    assert (
        refused.outcome is Outcome.NO_WORKER
        and refused.reason == "no live worker of the pool 'long' serves the model 'm'"
    )
    assert refused.retry_after_ms == 1000
    ruled = mesh("chat default", pools=POOLS, pool_overflow="long>default")
    assert submit(ruled, "long", 30).outcome is Outcome.ACCEPTED and where(ruled, "long") == "default"
    box.add_worker("later", capacity(pool="long"))
    assert submit(box, "long", 30).outcome is Outcome.ACCEPTED and where(box, "long") == "long"
    box.core.worker_draining("later")
    assert submit(box, "late", 30).outcome is Outcome.NO_WORKER, "one that drains is none"


def test_what_no_worker_of_a_pool_can_hold_overflows_too() -> None:
    box = Box(Limits(max_num_seqs=4, max_num_batched_tokens=16, pools=POOLS, pool_overflow="chat>long"), workers=0)
    box.add_worker("chat", capacity(pool="chat", max_model_len=16))
    box.add_worker("long", capacity(pool="long"))
    assert submit(box, "a", 8, max_tokens=8).outcome is Outcome.ACCEPTED and where(box, "a") == "chat"
    assert submit(box, "b", 8, max_tokens=9).outcome is Outcome.ACCEPTED and where(box, "b") == "long"
    refused = submit(box, "c", 8, max_tokens=1000)
    assert refused.outcome is Outcome.TOO_LONG and "pool chat: " in refused.reason


def test_without_a_range_any_pool_takes_it_but_one_of_shorter_prompts() -> None:
    box = mesh("a b", pools="")
    for index in range(6):
        assert submit(box, f"r{index}", 4).outcome is Outcome.ACCEPTED
    assert [where(box, f"r{index}") for index in range(6)] == ["a", "b"] * 3
    unnamed = mesh("a default")
    assert submit(unnamed, "r", 4).outcome is Outcome.ACCEPTED and where(unnamed, "r") == "default"
    gap = mesh("chat batch", pools="chat:-8,long:20-")
    assert submit(gap, "r", 15).outcome is Outcome.ACCEPTED and where(gap, "r") == "batch"
    alone = mesh("chat", pools="chat:-8")
    refused = submit(alone, "r", 9)
    assert (
        refused.outcome is Outcome.TOO_LONG
        and refused.reason == "the prompt has 9 tokens; no pool of 'm' takes so many"
    )


def test_a_full_pool_passes_on_only_what_any_pool_may_take() -> None:
    box = mesh("a b", pools="a,b", pool_overflow="a>b", max_num_queued_reqs=1)
    assert [submit(box, name, 4).outcome for name in "xyz"] == [Outcome.ACCEPTED, Outcome.ACCEPTED, Outcome.QUEUE_FULL]
    assert submit(box, "asks", 4, "a").outcome is Outcome.QUEUE_FULL
    box.step("w0")
    assert submit(box, "asks", 4, "b").outcome is Outcome.QUEUE_FULL, "a has room, and was not asked for"
    assert submit(box, "long", 30).outcome is Outcome.ACCEPTED and where(box, "long") == "a"


def test_a_model_without_pools_keeps_its_one_queue_beside_the_ranges_of_others() -> None:
    box = mesh("default", pools=POOLS)
    assert submit(box, "r", 30).outcome is Outcome.ACCEPTED and where(box, "r") == "default"


def test_a_pool_may_be_there_for_its_adapters() -> None:
    box = mesh("chat long lora/x", pools=POOLS)
    assert submit(box, "r", 4, adapter="x").outcome is Outcome.ACCEPTED and where(box, "r") == "lora"
    assert submit(box, "plain", 4).outcome is Outcome.ACCEPTED and where(box, "plain") == "chat"
    assert submit(box, "unknown", 4, adapter="y").outcome is Outcome.UNKNOWN_MODEL
    assert submit(mesh("chat/x", pools=POOLS), "r", 30, adapter="x").outcome is Outcome.NO_WORKER
    ruled = mesh("chat/x long", pools=POOLS, pool_overflow="long>chat")
    assert submit(ruled, "r", 30, adapter="x").outcome is Outcome.ACCEPTED and where(ruled, "r") == "chat", "by rule"
    ranged = mesh("chat/x long/x", pools=POOLS)
    assert submit(ranged, "r", 30, adapter="x").outcome is Outcome.ACCEPTED and where(ranged, "r") == "long"
