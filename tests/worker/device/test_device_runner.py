"""The device runner behind the production step loop and scheduler core: right tokens whatever runs late."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batch_driver import BatchDriver
from device_box import LIMITS, DeviceBox
from hash_model import ADAPTERS, VOCAB, HashModel, Letters
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mesh_in_a_box import request
from rehearsal_port import RehearsalPort
from test_device_decoder import Loaded

from shared.grammar import Grammar, encode_grammar
from shared.messages import Sampling, Submit
from worker.batch import Row, Slot
from worker.device import flight
from worker.device.runner import DeviceRunner, first_slots
from worker.torch_runner import TorchRunner


def ask(name: str, prompt: int = 7, tokens: int = 9, n: int = 1, beams: int = 0, **how: object) -> Submit:
    seed = sum(name.encode())
    words = [(seed * 7 + 3 * place) % VOCAB for place in range(prompt)]
    submit = request(name, 0, tokens, seed=seed, n=n, beams=beams, ignore_eos=False, prompt=words)
    return msgspec.structs.replace(submit, sampling=msgspec.structs.replace(submit.sampling, **how))


def test_steps_overlap_and_tokens_are_those_of_the_plain_model() -> None:
    box = DeviceBox()
    for index in range(6):
        box.submit(ask(f"r{index}", 3 + 4 * index, 20))
    box.run()
    box.assert_tokens_right()
    assert box.overlaps and len(box.ends) == 6
    assert {len(got) for got in box.delivered.values()} != {20}, "nothing ended early: no row was ever run in vain"


HOW = {
    "temperature": (0.0, 0.7), "top_p": (0.8,), "top_k": (5,), "min_tokens": (6,), "want_score": (True,),
    "logprobs": (0, 3), "presence_penalty": (0.9,), "repetition_penalty": (1.3,), "logit_bias": ([(5, 1.5)],),
    "prompt_logprobs": (1,),
}  # fmt: skip
EXAMPLES = settings().max_examples


def some_request(rng: random.Random, name: str) -> Submit:
    beams = rng.choice((0, 0, 0, 0, 2))
    chosen = rng.sample(sorted(HOW), rng.choice((0, 1, 2)))
    how = {} if beams else {key: rng.choice(HOW[key]) for key in chosen}
    submit = ask(name, rng.randint(1, 30), rng.randint(1, 20), beams or rng.choice((1, 1, 1, 2, 3)), beams, **how)
    return msgspec.structs.replace(submit, adapter=("", *ADAPTERS)[sum(name.encode()) % 3])


@settings(max_examples=EXAMPLES // 8, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 1 << 30))
def test_random_schedules(seed: int) -> None:
    """Joins, leaves, chunks, forks, copies, swaps, preemptions, ends that a step in flight does not know of."""
    rng = random.Random(seed)
    box = DeviceBox(
        seed, num_blocks=rng.choice((12, 20, 64)), host_blocks=rng.choice((0, 16)), graph_rows=rng.choice((0, 3, 8))
    )
    for index in range(rng.randint(1, 8)):
        box.submit(some_request(rng, f"r{index}"))
        for _ in range(rng.randint(0, 4)):
            box.step()
        if rng.random() < 0.2:
            box.cancel(f"r{rng.randint(0, index)}")
    box.run()
    box.assert_tokens_right()


@pytest.mark.parametrize("most", [0, 40])
@pytest.mark.parametrize("graphs", [0, 8])
def test_a_step_that_lacks_memory_runs_again_and_nobody_notices(graphs: int, most: int) -> None:
    """Wherever it lacks it: at the upload, in the forward pass, or in the sampling, up to ``most`` operations in."""
    rng = random.Random(5)
    left = 10  # launches until the next one that lacks memory: never twice in a step

    def lacking() -> int | None:
        nonlocal left
        left -= 1
        if left:
            return None
        left = rng.randint(16, 24)
        return rng.randint(0, most)

    lacked = 0
    for seed in range(3):
        box = DeviceBox(seed, graph_rows=graphs)
        box.port.lacking = lacking
        for index in range(4):
            box.submit(ask(f"r{index}", 3 + 4 * index, 14, repetition_penalty=1 + index % 2, logprobs=index % 3 - 1))
        box.run()
        box.assert_tokens_right()
        assert len(box.ends) == 4
        lacked += box.runner.lacked_memory
    assert lacked > 3


REGEX = "([A-D]|[G-Z][AB])+(E[A-Z]?)?"


@pytest.mark.parametrize("seed", [None, 3, 4])
def test_grammar_rows_overlap_with_others_and_match(seed: int | None) -> None:
    """Sampled, forked, preempted and with penalties: a mask is of all tokens before, of which some are in flight."""
    text = encode_grammar(Grammar("regex", REGEX))
    box = DeviceBox(seed, num_blocks=20, host_blocks=8)
    for index in range(6):
        how = {"grammar": text} if index % 3 else {}
        penalty = 1.2 if index % 2 else 1.0
        box.submit(ask(f"r{index}", 3 + 4 * index, 12, 1 + (index == 4), repetition_penalty=penalty, **how))
    box.submit(ask("end", 9, 12, grammar=text, ignore_eos=True))
    box.run()
    box.assert_tokens_right()
    assert box.overlaps and len(box.ends) == 8
    whole = 0
    for (request_id, choice), got in box.delivered.items():
        if box.submits[request_id].sampling.grammar and box.ends[request_id, choice] == "stop":
            assert re.fullmatch(REGEX, "".join(Letters.tokens[token].decode() for token in got[:-1]))
            whole += 1
    assert whole


def test_a_grammar_that_fails_ends_its_sequence_alone() -> None:
    box = DeviceBox(5)
    box.submit(ask("r0", 5, 10))
    box.submit(ask("r1", 5, 10, grammar=encode_grammar(Grammar("regex", "[a-c]+"))))  # no token is a small letter
    box.run()
    assert box.ends["r1", 0] == "failed" and box.ends["r0", 0] in ("stop", "length")
    [entry] = [entry for entry in box.entries if entry.end == "failed"]
    assert "no token can follow" in entry.reason or "grammar" in entry.reason


@pytest.mark.parametrize("most", [0, 3])
def test_moves_of_pages_that_lack_memory_are_made_again(most: int) -> None:
    """Forks copy pages, preempted sequences take theirs to the host and back: each group of moves once."""
    rng = random.Random(3)
    lacked = copied = swapped = 0
    for seed in range(2):
        box = DeviceBox(seed, num_blocks=14 if seed % 2 else 40, host_blocks=16)
        moves = [0]

        def lacking(box: DeviceBox = box, moves: list[int] = moves) -> int | None:
            if sys._getframe(2).f_code.co_name not in ("_copy", "_leave", "_enter"):
                return None
            moves[0] += 1
            return rng.randint(0, most) if moves[0] % 2 else None  # its second run has what it needs

        box.port.lacking = lacking
        for index in range(5):
            box.submit(ask(f"r{index}", 3 + 4 * index, 14, n=1 + index % 3))
        box.run()
        box.assert_tokens_right()
        lacked += box.runner.lacked_memory
        copied += box.runner.kv_bytes_copied
        swapped += sum(executed.result.swap_us > 0 for executed in box.seen)
    assert lacked > 5 and copied and swapped


def test_what_is_fetched_finds_its_memory_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class AtOnce(RehearsalPort):
        """Runs work where it is launched, as far as the host sees it: so do errors come."""

        lacks = False

        def run(self, work: Callable[[], object], *, aside: bool = False) -> None:
            super().run(work, aside=aside)
            if not self._inside:
                self.synchronize()

        def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            if self._inside and self.lacks:
                self.lacks = False
                raise self.out_of_memory("CUDA error: out of memory")
            return super().pinned(shape, dtype)

    monkeypatch.setattr("device_box.RehearsalPort", AtOnce)
    box = DeviceBox()
    box.submit(ask("r0", tokens=6, repetition_penalty=1.3))
    while box.core.live_requests():
        box.port.lacks = True  # type: ignore[attr-defined]
        box.step()
    box.assert_tokens_right()
    assert box.runner.lacked_memory >= 3


def test_a_prompt_that_is_told_of_keeps_no_more_logits_than_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device.flight.PROMPT_PIECE", 5)
    told = []
    for most in (8, 1 << 20):
        monkeypatch.setattr("worker.device.flight.PROFILED_ROWS", most)
        box = DeviceBox(2, limits=dataclasses.replace(LIMITS, prefill_chunk_limit=24), graph_rows=2)
        assert isinstance(box.runner.model, HashModel)
        for index in range(5):
            box.submit(ask(f"r{index}", 5 + 9 * index, 6, prompt_logprobs=index % 3 - 1, logprobs=index % 2))
        box.run()
        box.assert_tokens_right()
        assert len(box.ends) == 5
        assert (max(box.runner.model.kept) <= 8) == (most == 8)
        told.append(
            {
                (entry.request_id, entry.prompt_offset + place): one
                for entry in box.entries
                for place, one in enumerate(entry.prompt_logprobs)
            }
        )
    assert told[0] == told[1] and {name for name, _ in told[0]} == {"r1", "r2", "r4"}


def test_no_pass_runs_beside_logits_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device.flight.PROMPT_PIECE", 5)
    monkeypatch.setattr("worker.device.flight.PROFILED_ROWS", 8)
    box = DeviceBox(2, limits=dataclasses.replace(LIMITS, prefill_chunk_limit=24), graph_rows=0)
    forward = box.runner.model.forward
    made: list[Any] = []
    beside: list[int] = []

    def watched(*args: Any) -> torch.Tensor:
        beside.append(sum(not torch.UntypedStorage._expired(one) for one in made))
        logits = forward(*args)
        made.append(logits.untyped_storage()._weak_ref())
        return logits

    monkeypatch.setattr(box.runner.model, "forward", watched)
    for index in range(3):
        box.submit(ask(f"r{index}", 20 + 9 * index, 4, prompt_logprobs=1))
    box.run()
    box.assert_tokens_right()
    assert len(beside) > 10 and set(beside) == {0}


@settings(max_examples=EXAMPLES)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 1), st.booleans()), max_size=6), st.integers(1, 20))
def test_rows_are_cut_and_none_is_lost(asked: list[tuple[int, int, bool]], most: int) -> None:
    rows = []
    for index, (count, logprobs, ends) in enumerate(asked):
        slot = Slot(index, "r", 1, 0, "g", Sampling(0, 4, prompt_logprobs=logprobs), 0, "", count + (not ends),
                    list(range(count + (not ends))), 0, 9, cached=0)  # fmt: skip
        rows.append(Row(slot, 0, count, sample=ends))
    early, rest = flight.cut_prompts(rows, most)
    for row in rows:
        parts = [one for rows in [*early, rest] for one in rows if one.slot is row.slot]
        assert [(one.start, one.count) for one in parts] == [
            (start, one.count)
            for one, start in zip(parts, itertools.accumulate([0, *(p.count for p in parts)]), strict=False)
        ]
        assert sum(one.count for one in parts) == row.count
        assert [one.sample for one in parts] == [False] * (len(parts) - 1) + [row.sample]
    if early:
        assert all(sum(row.count for row in rows) <= most for rows in early)
        assert not any(row.slot.prompt_rows(row.start, row.count) for row in rest)
    else:
        assert rest == rows


def test_a_step_that_lacks_memory_twice_fails_and_the_batch_starts_over() -> None:
    box = DeviceBox()
    box.submit(ask("r0"))
    box.plan()
    box.port.lacking = lambda: 0
    box.take()
    [failed] = box.executed
    assert "out of memory" in failed.fault and not box.loop._in_flight
    box.port.lacking = lambda: None
    box.restart()
    box.run()
    box.assert_tokens_right()
    assert box.runner.lacked_memory == 1


def test_what_a_step_had_in_hand_is_free_before_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    box = DeviceBox()
    in_hand: list[weakref.ref[torch.Tensor]] = []
    freed: list[bool] = []

    def work() -> None:
        if not in_hand:
            activations = torch.zeros(8)
            in_hand.append(weakref.ref(activations))
            raise box.port.out_of_memory("out of memory")

    monkeypatch.setattr(box.port, "give_back", lambda: freed.append(in_hand[0]() is None))
    box.runner.guarded(work, lambda: None)
    assert freed == [True]


def test_a_rank_that_lacks_memory_does_not_run_a_step_again() -> None:
    box = DeviceBox()
    runner = DeviceRunner(box.runner.model, box.port, box.runner.capacity, box.runner.grammars, alone=False)
    runs = []

    def work() -> None:
        runs.append(1)
        raise box.port.out_of_memory("out of memory")

    with pytest.raises(box.port.out_of_memory):
        runner.guarded(work, lambda: None)
    assert len(runs) == 1


def test_a_fault_of_the_device_comes_with_the_result_and_the_batch_starts_over() -> None:
    box = DeviceBox(graph_rows=0)
    for index in range(3):
        box.submit(ask(f"r{index}", 20, 20))
    for _ in range(4):
        box.step()
    assert isinstance(box.runner.model, HashModel)
    box.runner.model.faults = 1
    box.plan()
    box.plan()
    while box.queues["w0"]:
        box.take()
    box.loop._land_all()
    assert "illegal memory access" in box.executed[-2].fault and box.executed[-1].skipped
    box.restart()
    box.run()
    box.assert_tokens_right()
    assert len(box.ends) == 3


def test_a_pass_that_waits_for_the_device_is_found() -> None:
    box = DeviceBox()
    assert isinstance(box.runner.model, HashModel)
    box.runner.model.waits = True
    box.submit(ask("r0"))
    box.plan()
    box.take()
    box.land()
    assert "would wait for the device" in box.executed[0].fault


def test_more_slots_than_there_was_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device.runner.FIRST_SLOTS", 2)
    box = DeviceBox(1)
    for index in range(6):
        box.submit(ask(f"r{index}", 5, 12))
        box.step()
    box.run()
    box.assert_tokens_right()
    assert box.runner.state.num_slots >= 6


def test_a_batch_of_hundreds_has_room_before_anything_is_captured() -> None:
    box = DeviceBox()
    assert box.runner.state.num_slots == 1024 == first_slots(32_768 // 16) == first_slots(131_072 // 16)
    assert first_slots(1 << 20) == 256  # their tables are memory that nobody has measured


def test_tokens_of_a_real_model_are_those_of_the_torch_runner(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    reference = TorchRunner.load(folder, dtype="float64", block_size=4, num_blocks=60, self_check=False)
    loaded = Loaded(folder, torch.float64)
    loaded.steps((2,)).step({0: 1})  # a host looks some constants up once
    model = loaded.decoder()
    model.caches = [loaded.kernel.allocate(61) for _ in loaded.layers]
    capacity = msgspec.structs.replace(reference.capacity, max_model_len=64)
    device = DeviceRunner(model, RehearsalPort(4), capacity, reference.grammars, graph_rows=4)
    outcomes = []
    for runner in (reference, device):
        driver = BatchDriver(runner)  # type: ignore[arg-type]
        sequences = [
            driver.start(
                [3 + (7 * place * (index + 1)) % 200 for place in range(3 + 9 * index)],
                Sampling(index, 12, temperature=0.8 * (index % 2), ignore_eos=True, logprobs=2, prompt_logprobs=1),
            )
            for index in range(4)
        ]
        driver.run_to_end(chunk=7)
        outcomes.append([sequence.tokens for sequence in sequences])
        told = [driver.logprobs, driver.prompt_logprobs]
        outcomes.append(msgspec.to_builtins(told, str_keys=True))
    assert outcomes[0] == outcomes[2]
    assert device.graphs.replays and all(map(len, outcomes[0]))
    for one, other in zip(_numbers(outcomes[1]), _numbers(outcomes[3]), strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def _numbers(told: object) -> list[float]:
    if isinstance(told, dict):
        return [number for key in sorted(told) for number in _numbers(told[key])]
    if isinstance(told, list | tuple):
        return [number for one in told for number in _numbers(one)]
    return [told] if isinstance(told, int | float) else []


def test_decodes_with_adapters_and_without_are_graphs_of_their_own() -> None:
    box = DeviceBox(graph_rows=8)
    for adapter in ("", "y", ""):
        for index in range(3):
            name = f"{adapter or 'plain'}{len(box.submits)}"
            box.submit(msgspec.structs.replace(ask(name, 3 + index, 16), adapter=adapter))
        box.run()
    box.assert_tokens_right()
    kinds = {adapters for _, _, adapters in box.runner.graphs._graphs}
    assert kinds == {False, True} and box.runner.graphs.replays


def test_an_adapter_that_is_not_there_fails_the_step() -> None:
    box = DeviceBox()
    box.submit(ask("r"))
    plan, _ = box.core.plan("w0", box.now)
    assert plan is not None
    [start] = plan.starts
    box.queues["w0"].append(msgspec.structs.replace(plan, starts=[msgspec.structs.replace(start, adapter="z")]))
    box.take()
    box.land()
    assert "no adapter 'z'" in box.executed[-1].fault
