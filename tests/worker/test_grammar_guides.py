"""Grammars at the worker: what comes out matches, whatever the model, the sampling, the batch and the interruptions."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_driver import BatchDriver, Sequence
from llguidance import LLTokenizer
from tiny_models import make_tiny_model, make_tokenizer

from shared.grammar import Grammar, GrammarError, encode_grammar
from shared.messages import Sampling, SlotStart, StepPlan, pack_tokens
from worker import grammar as worker_grammar
from worker.batch import Batch
from worker.grammar import Grammars
from worker.torch_runner import TorchRunner

MakeModel = Callable[..., Path]

TOKENIZER = make_tokenizer()

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "age", "tags"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 150
        and isinstance(value["age"], int) and len(value["tags"]) <= 2 and set(value["tags"]) <= {"a", "b"}
    )  # fmt: skip


KINDS: dict[str, tuple[Grammar, Callable[[str], bool]]] = {
    "json_schema": (Grammar("json_schema", PERSON), is_person),
    "regex": (Grammar("regex", "(ab|[0-9]{2}/)+x?"), lambda text: bool(re.fullmatch("(ab|[0-9]{2}/)+x?", text))),
    "choice": (Grammar("choice", ["yes", "no, not\nnow", "é", ""]), {"yes", "no, not\nnow", "é", ""}.__contains__),
    "lark": (
        Grammar("lark", 'start: sum\nsum: NUM | sum "+" NUM\nNUM: /[1-9][0-9]?/'),
        lambda text: bool(re.fullmatch(r"[1-9]\d?(\+[1-9]\d?)*", text)),
    ),
}

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.2},
    "min-p": {"temperature": 1.0, "min_p": 0.9},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    "bias against it": {"temperature": 1.0, "logit_bias": [(token, -100.0) for token in range(3, 296)]},
    "no EOS": {"temperature": 1.0, "ignore_eos": True},
}


def text_of(sequence: Sequence) -> str:
    return str(TOKENIZER.decode(sequence.tokens, skip_special_tokens=True))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchRunner]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=4)
    threads = torch.get_num_threads()
    yield TorchRunner.load(folder, dtype="float32", num_blocks=400, num_threads=1, self_check=False)
    torch.set_num_threads(threads)


def start(driver: BatchDriver, grammar: Grammar, seed: int, max_tokens: int = 200, **how: Any) -> Sequence:
    prompt = [3 + (seed * 7 + n) % 250 for n in range(5)]
    return driver.start(prompt, Sampling(seed, max_tokens, grammar=encode_grammar(grammar), **how))


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_ends_matches(kind: str, how: str, runner: TorchRunner) -> None:
    grammar, valid = KINDS[kind]
    driver = BatchDriver(runner)
    max_tokens = 200 if kind == "json_schema" else 24
    sequences = [start(driver, grammar, seed, max_tokens, **SAMPLINGS[how]) for seed in range(8)]
    driver.run_to_end()
    stopped = [text_of(sequence) for sequence in sequences if sequence.ended == "stop"]
    assert [text for text in stopped if not valid(text)] == []
    assert {sequence.ended for sequence in sequences} <= {"stop", "length"}
    if kind in ("json_schema", "choice"):
        assert len(stopped) == len(sequences)


def test_json_object_is_valid_so_far_at_every_token(runner: TorchRunner) -> None:
    driver = BatchDriver(runner)
    sequences = [start(driver, Grammar("json_object"), seed, 40, temperature=1.0) for seed in range(20)]
    driver.run_to_end()
    for sequence in sequences:
        text = text_of(sequence)
        assert text.startswith("{")
        if sequence.ended == "stop":
            assert isinstance(json.loads(text), dict)


def test_eos_comes_only_where_the_grammar_is_complete(runner: TorchRunner) -> None:
    driver = BatchDriver(runner)
    wanting = [(0, 100.0), (2, 100.0)]  # the ids that end
    sequences = [start(driver, Grammar("regex", "abc(def)?"), seed, logit_bias=wanting) for seed in range(4)]
    driver.run_to_end()
    assert {text_of(sequence) for sequence in sequences} == {"abc"} and {s.ended for s in sequences} == {"stop"}


@pytest.mark.parametrize("min_tokens", [3, 5, 100])
def test_min_tokens_holds_until_the_grammar_is_complete(min_tokens: int, runner: TorchRunner) -> None:
    driver = BatchDriver(runner)
    how = {"min_tokens": min_tokens, "logit_bias": [(0, 50.0), (2, 50.0)]}
    open_ended = start(driver, Grammar("regex", "[0-9]*"), 1, max_tokens=120, **how)
    closed = start(driver, Grammar("choice", ["9"]), 2, max_tokens=120, **how)
    driver.run_to_end()
    assert open_ended.ended == closed.ended == "stop"
    assert len(open_ended.tokens) == min_tokens + 1 and text_of(closed) == "9"


def test_company_and_interruptions_change_nothing(runner: TorchRunner) -> None:
    """Alone, in a batch, and started again in the middle: the same tokens, with everything at once (CASES B16)."""
    asked = [
        (kind, dict(SAMPLINGS[how], logprobs=3))
        for kind in KINDS
        for how in ("greedy", "sampled", "penalties", "bias against it")
    ]
    alone = []
    for seed, (kind, how) in enumerate(asked):
        driver = BatchDriver(runner)
        sequence = start(driver, KINDS[kind][0], seed, 24, **how)
        driver.run_to_end()
        alone.append((sequence.tokens, driver.logprobs[sequence.slot]))
    driver = BatchDriver(runner)
    together = [start(driver, KINDS[kind][0], seed, 24, **how) for seed, (kind, how) in enumerate(asked)]
    driver.run_to_end(chunk=3)
    assert [(one.tokens, driver.logprobs[one.slot]) for one in together] == alone
    rng = random.Random(1)
    driver = BatchDriver(runner)
    live = {}
    for seed, (kind, how) in enumerate(asked):
        live[seed] = start(driver, KINDS[kind][0], seed, 24, **how)
    preempted = 0
    while driver.live:
        driver.step({slot: min(one.to_run, 4) for slot, one in driver.live.items()})
        for seed, one in live.items():
            if not one.ended and one.tokens and rng.random() < 0.15:
                preempted += 1
                driver.drop(one)
                kind, how = asked[seed]
                sampling = Sampling(seed, 24, grammar=encode_grammar(KINDS[kind][0]), **how)
                live[seed] = driver.start(one.prompt, sampling, generated=one.tokens)
    assert preempted > 10
    assert [one.tokens for one in live.values()] == [tokens for tokens, _ in alone]


def test_forks_go_their_own_ways_through_the_grammar(runner: TorchRunner) -> None:
    batch = Batch(16, 400, 256, frozenset({0, 2}))
    prompt = list(range(3, 20))
    sampling = Sampling(5, 8, temperature=3.0, grammar=encode_grammar(Grammar("regex", "[a-d]{3}")))
    starts = [SlotStart(0, "r", 1, 0, "g", pack_tokens(prompt), 17, [1, 2], sampling)]
    starts += [
        SlotStart(n, "r", 1, n, "g", b"", 17, [], sampling, computed=17, parent=0) for n in range(1, 5)
    ]  # fmt: skip
    plan = StepPlan(0, "w", 0, 1, starts=starts, chunks=[(0, 17)])
    step = batch.stage(plan)
    batch.settle(step, runner.forward(batch, step))
    replaces = [(n, 1, 10 + n) for n in range(1, 5)]
    copies = [(2, 10 + n) for n in range(1, 5)]
    for step in range(2, 5):
        more = {"replaces": replaces, "copies": copies} if step == 2 else {}
        plan = StepPlan(0, "w", 0, step, decodes=list(range(5)), **more)  # type: ignore[arg-type]
        step = batch.stage(plan)
        batch.settle(step, runner.forward(batch, step))
    texts = [TOKENIZER.decode(slot.tokens[17:], skip_special_tokens=True) for slot in batch.slots.values()]
    assert all(re.fullmatch("[a-d]{3}", text) for text in texts) and len(set(texts)) > 1
    assert {slot.ended for slot in batch.slots.values()} == {"stop"}


BAD: dict[str, str] = {
    "noise": "{",
    "unknown kind": '{"kind":"nonsense"}',
    "no regex": encode_grammar(Grammar("regex", "a(")),
    "look-ahead": encode_grammar(Grammar("regex", "(?=a)b")),
    "unsatisfiable": encode_grammar(Grammar("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]})),
    "no lark": encode_grammar(Grammar("lark", "begin: nothing")),
    "too big": encode_grammar(Grammar("lark", "start: " + " | ".join(f'"v{n}"' for n in range(5000)))),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_grammar_that_fails_ends_its_own_sequence_only(bad: str, runner: TorchRunner) -> None:
    driver = BatchDriver(runner)
    alone = driver.start([5, 6, 7], Sampling(1, 6, ignore_eos=True))
    driver.run_to_end()
    driver = BatchDriver(runner)
    beside = driver.start([5, 6, 7], Sampling(1, 6, ignore_eos=True))
    failing = driver.start([5, 6, 7], Sampling(1, 6, grammar=BAD[bad]))
    fine = start(driver, *[KINDS["choice"][0]], 3)
    driver.run_to_end()
    assert failing.ended == "failed" and beside.tokens == alone.tokens and fine.ended == "stop"
    [entry] = [entry for entry in driver.entries if entry.end == "failed"]
    assert entry.reason and "\n" not in entry.reason and not entry.tokens


def test_a_slow_compile_fails_the_one_that_waits(runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    inner = runner.grammars.matcher
    monkeypatch.setattr(worker_grammar, "COMPILE_WAIT_S", 0.05)
    monkeypatch.setattr(runner.grammars, "matcher", lambda *given: (gate.wait(30), inner(*given))[1])
    driver = BatchDriver(runner)
    slow = start(driver, Grammar("choice", ["slow"]), 1)
    try:
        driver.run_to_end()
    finally:
        gate.set()
    assert slow.ended == "failed" and "within" in driver.entries[-1].reason


def test_a_kept_grammar_that_ran_out_of_room_is_compiled_again() -> None:
    """Copies of one compiled grammar share its lexer, whose states are limited: that must not fail the next ones."""
    grammars = Grammars(lambda: LLTokenizer(TOKENIZER.backend_tokenizer.to_str(), eos_token=[0]))
    text = encode_grammar(Grammar("regex", "ab+"))
    grammars.begin_step()
    guide = grammars.guide(text, [])
    guide.mask()
    guide.accept(TOKENIZER.encode("a")[0])
    wanted = guide.mask()
    assert guide._matcher is not None
    guide._matcher.consume_token(TOKENIZER.encode("z")[0])  # what is no part of the output: an error
    assert guide._matcher.is_error()
    assert (guide.mask() == wanted).all()


def test_without_a_tokenizer_there_are_no_grammars(tmp_path: Path) -> None:
    grammars = Grammars(lambda: worker_grammar.load_engine_tokenizer(str(tmp_path), 320, [0]))
    for _ in range(2):
        grammars.begin_step()
        with pytest.raises(GrammarError, match="tokenizer"):
            grammars.guide(encode_grammar(Grammar("choice", ["a"])), []).mask()
