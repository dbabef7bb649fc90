"""Recording, reading, replaying and tapping."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from headrace import __main__ as cli
from headrace.simulate.engine import Simulation, simulated_capacity
from headrace.simulate.hardware import Deployment, gpu_named, model_named
from headrace.simulate.scenario import Scenario, run
from headrace.simulate.step_time import Roofline
from headrace.simulate.worker import Population, SimulatedWorker
from headrace.simulate.workload import LENGTHS, Request, stream
from headrace.trace.measured import measure
from headrace.trace.recorded import feed, header
from headrace.trace.stream import BadTrace, message, records, same_bytes
from headrace.trace.tap import Tap, TapConfig, line
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from scheduler.recording import RecordingCore, TraceWriter
from shared.messages import Cancel, Fetched, Outcome, Role, Sampling, StepPlan, StepResult, Submit, encode, pack_tokens
from shared.page_hash import extend_chain, root_hash

LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=256, growth_aware_admission=False, max_num_queued_reqs=1 << 20)


def requests() -> list[Request]:
    """Enough for a pool of 1,400 tokens to preempt; some clients leave."""
    made = stream(LENGTHS["mixed"], 60, 1, 20.0, n=2, longest=1024)
    return [
        dataclasses.replace(one, cancel_ns=500_000_000) if index % 7 == 3 else one for index, one in enumerate(made)
    ]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a scheduler recorded while it drove simulated workers."""
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    writer = TraceWriter(path)
    core = RecordingCore(LIMITS, "continuous", writer)
    population = Population(requests())
    timing = Roofline(Deployment(model_named("llama-3.1-8b"), gpu_named("a100-80")))
    capacity = simulated_capacity(1400, 16, 1024)
    workers = [SimulatedWorker(f"w{index}", capacity, timing, population) for index in range(2)]
    Simulation(core, workers, population).run()
    writer.close()
    assert core.counters.preemptions > 0 and core.counters.cancelled > 0 and core.counters.forks > 0
    return path


def test_a_replay_gives_the_same_plans_byte_for_byte(trace: Path) -> None:
    found = header(trace)
    assert (found.policy, found.limits) == ("continuous", LIMITS)
    outcome = feed(trace, SchedulerCore(found.limits, found.policy, found.epoch))
    assert outcome.difference == ""
    planned = [record for record in records(trace) if record[1] == "plan" and record[3] is not None]
    assert outcome.plans == len(planned) > 100


def test_losses_resumes_and_handovers_replay_as_well(tmp_path: Path) -> None:
    """Whose pages were taken over, who was suspect and was tried in halves, who moved: all of it is in the trace."""
    path = tmp_path / "t"
    writer = TraceWriter(path)
    core = RecordingCore(LIMITS, "continuous", writer)
    capacity = simulated_capacity(1600, 16, 1024)
    prompt = list(range(40))
    hashes: list[bytes] = []
    extend_chain(hashes, root_hash(capacity.model, f"{capacity.dtype}/16"), prompt, 16, 2)
    clock = itertools.count(1, 1_000_000)

    def submit(attempt: int) -> None:
        for index in range(4):
            sampling = Sampling(seed=index, max_tokens=30)
            one = Submit(f"r{index}", attempt, "g", capacity.model, pack_tokens(prompt), sampling, index)
            assert core.submit(one, next(clock)).outcome is Outcome.ACCEPTED

    def step(worker: str) -> None:
        plan, _ = core.plan(worker, next(clock))
        if plan is not None:
            tokens = [7] * len(core.workers[worker].in_flight[0].sampled)
            core.apply(StepResult(core.epoch, worker, plan.incarnation, plan.step, tokens), next(clock))

    core.worker_up("w0", 1, capacity, next(clock), 1, [(9, hashes[0]), (4, hashes[1])])
    submit(1)
    step("w0")
    assert core.counters.prefix_hits > 0
    assert core.plan("w0", next(clock))[0] is not None
    core.worker_lost("w0", "gone", next(clock))  # in that step, so that all are suspects
    core.worker_up("w0", 2, capacity, next(clock))
    submit(2)
    alone = set()
    for _ in range(12):
        step("w0")
        alone.add(core.workers["w0"].trial)
    assert len(alone) > 2, "two groups, and nobody"
    core.worker_up("w1", 1, capacity, next(clock))
    core.worker_draining("w0")
    assert len(core.hand_over("w0", next(clock))) == 4
    submit(3)
    for _ in range(5):
        step("w0")
        step("w1")
    core.worker_lost("w1", "a cut network", next(clock), suspect=False)
    writer.close()
    outcome = feed(path, SchedulerCore(LIMITS))
    assert outcome.difference == "" and outcome.plans > 12
    assert {record[1] for record in records(path)} >= {"worker_lost", "worker_draining", "hand_over"}

    forgetful = tmp_path / "forgetful"
    with forgetful.open("wb") as file:
        for record in records(path):
            if record[1] == "worker_lost":
                record[4] = False
            file.write(msgpack.packb(record))
    assert feed(forgetful, SchedulerCore(LIMITS)).difference


def test_moves_replay_as_well(tmp_path: Path) -> None:
    """Who computed prompts and who decoded, what was fetched and what came of it, and a change of roles."""
    path = tmp_path / "t"
    writer = TraceWriter(path)
    core = RecordingCore(LIMITS, "continuous", writer)
    clock = itertools.count(1, 1_000_000)
    for name, role in (("w0", Role.PREFILL), ("w1", Role.DECODE)):
        capacity = msgspec.structs.replace(simulated_capacity(1600, 16, 1024), role=role, transfer=[f"x://{name}"])
        core.worker_up(name, 1, capacity, next(clock))

    def step() -> None:
        for worker in ("w0", "w1"):
            plan, _ = core.plan(worker, next(clock))
            if plan is not None:
                tokens = [7] * len(core.workers[worker].in_flight[0].sampled)
                core.apply(StepResult(core.epoch, worker, plan.incarnation, plan.step, tokens), next(clock))
                for number, fetch in enumerate(plan.fetches):
                    reason = "a cut cable" if fetch.fetch % 3 == 2 else ""
                    answer = Fetched(core.epoch, worker, plan.incarnation, fetch.fetch, reason, 64, 20 + number, "x")
                    core.fetched(answer, next(clock))

    for index in range(4):
        sampling = Sampling(seed=index, max_tokens=60)
        submit = Submit(f"r{index}", 1, "g", capacity.model, pack_tokens(range(40)), sampling, index)
        assert core.submit(submit, next(clock)).outcome is Outcome.ACCEPTED
    for _ in range(20):
        step()
    core.set_role("w0", Role.DECODE, next(clock))
    core.set_role("w1", Role.PREFILL, next(clock))
    for _ in range(20):
        step()
    writer.close()
    assert core.counters.moves > 0 and core.counters.failed_moves > 0
    again = SchedulerCore(LIMITS)
    outcome = feed(path, again)
    assert outcome.difference == "" and outcome.plans > 40
    assert again.counters == core.counters
    assert {record[1] for record in records(path)} >= {"fetched", "set_role"}


@pytest.mark.parametrize(
    "change", [{"prefill_chunk_limit": 64}, {"admission_watermark": 0.2}, {"enable_prefix_caching": False}]
)
def test_another_configuration_decides_otherwise(trace: Path, change: dict[str, Any]) -> None:
    outcome = feed(trace, SchedulerCore(dataclasses.replace(LIMITS, **change), "continuous"))
    assert outcome.difference.startswith("plan ")


def test_a_plan_that_was_tampered_with_is_named(trace: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.trace"
    done = False
    with changed.open("wb") as file:
        for record in records(trace):
            if not done and record[1] == "plan" and record[3] and record[3][8]:  # its decodes
                record[3][8].reverse()
                done = len(record[3][8]) > 1
            file.write(msgpack.packb(record))
    outcome = feed(changed, SchedulerCore(LIMITS))
    assert outcome.difference.endswith("differs in decodes")


def test_the_plain_package_reads_what_was_written(trace: Path) -> None:
    with trace.open("rb") as file:
        kinds = {record[1] for record in msgpack.Unpacker(file)}
    assert kinds == {"trace", "epoch", "worker_up", "submit", "cancel", "result", "plan", "tick"}


def test_messages_survive_the_way_there_and_back(tmp_path: Path) -> None:
    sampling = Sampling(seed=2**62, max_tokens=9, temperature=0.3, stop_token_ids=[1, 70000])
    submit = Submit("r", 1, "g", "m", pack_tokens([1, 2**31]), sampling, 12345678901234, tenant="té")
    path = tmp_path / "t"
    writer = TraceWriter(path)
    writer.put(5, "submit", submit)
    writer.put(6, "cancel", Cancel("r", 1))
    writer.close()
    first, second = records(path)
    assert message(first[2]) == submit and same_bytes(first[2], msgspec.msgpack.encode(submit))
    assert message(second[2]) == Cancel("r", 1)


def test_a_record_that_was_cut_off_is_left_out(trace: Path, tmp_path: Path) -> None:
    whole = trace.read_bytes()
    cut = tmp_path / "cut.trace"
    cut.write_bytes(whole[: len(whole) // 2])
    outcome = feed(cut, SchedulerCore(LIMITS))
    assert outcome.difference == "" and outcome.plans > 10


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93\x01\x02\x03", msgpack.packb([1, "trace", 99, {}])])
def test_what_is_no_trace_is_refused_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(BadTrace):
        header(path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", str(path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_recorded_run_is_measured_as_the_run_itself(trace: Path) -> None:
    """The trace knows when the scheduler heard of a token, the simulator when the client did: the same, here."""
    found = measure(trace, header(trace))
    live = run(
        Scenario(limits=LIMITS, kv_tokens=1400, max_model_len=1024, workers=2), requests(), "live"
    ).figures  # fmt: skip
    assert found.outcome.difference == ""
    for name in ("served", "cancelled", "steps", "preemptions", "computed_tokens", "itl_p99", "useful_slot_share"):
        assert getattr(found.figures, name) == pytest.approx(getattr(live, name), rel=0.02), name
    assert found.figures.ttft_p50 == pytest.approx(live.ttft_p50, rel=0.05)
    assert found.figures.tokens_per_s == pytest.approx(live.tokens_per_s, rel=0.02)


def test_the_workload_of_a_trace_is_what_was_asked(trace: Path) -> None:
    found, asked = measure(trace, header(trace)), requests()
    assert len(found.requests) == len(asked)
    ends = {one.at_ns: one.outputs for one in asked if not one.cancel_ns}
    first = asked[0].at_ns - found.requests[0].at_ns
    for got, want in zip(found.requests, asked, strict=True):
        assert got.at_ns + first == pytest.approx(want.at_ns, abs=1_000_000)
        assert got.prompt_len == want.prompt_len
        if want.at_ns in ends:
            assert got.outputs == want.outputs


def test_replay_says_that_nothing_changed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(trace)]) == 0
    assert "every plan is the recorded one, byte for byte" in capsys.readouterr().out


def test_replay_under_other_limits_compares(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(trace), "--max-num-seqs", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["variant"] for one in shown["runs"]] == [
        "recorded",
        "recorded configuration, simulated",
        "max-num-seqs=2",
    ]
    recorded, simulated, narrow = shown["runs"]
    assert simulated["itl_p50"] == pytest.approx(recorded["itl_p50"], rel=0.1)
    assert simulated["ttft_p50"] == pytest.approx(
        recorded["ttft_p50"], rel=0.5
    )  # (throughput hangs on the last to end)
    assert narrow["tokens_per_s"] < 0.8 * simulated["tokens_per_s"]


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(tmp_path / "t")

    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...
        def write(self, _: bytes) -> None:
            raise OSError(28, "No space left on device")

    writer._file.close()
    monkeypatch.setattr(writer, "_file", Full())
    core = RecordingCore(LIMITS, "continuous", writer)
    core.tick(1)
    writer.close()
    core.tick(2)
    assert "recording stopped: [Errno 28] No space left on device" in caplog.text


def test_a_line_of_the_tap_says_what_differs_from_the_defaults() -> None:
    plan = StepPlan(3, "w", 7, 12, decodes=list(range(100)))
    shown = line(1_700_000_000_123_000_000, "step", encode(plan))
    assert ".123 step " in shown
    assert "plan(epoch=3, worker='w', incarnation=7, step=12, decodes=[0, 1, 2, " in shown
    assert "copies" not in shown and len(shown) < 250
    assert "copies=[]" in line(0, "step", encode(plan), full=True)
    assert line(0, "step", b"\xc1").endswith("no message of ours: 1 bytes")


def test_a_tap_that_nobody_reads_any_more_stops() -> None:
    tried: list[str] = []

    def gone(text: str) -> None:
        tried.append(text)
        raise BrokenPipeError

    tap = Tap(TapConfig(), gone, None)
    for _ in range(3):
        tap.take("step", b"", 0)
    assert tap.stop.is_set() and len(tried) == 1


def test_the_tap_prints_a_recorded_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tap", "--read", str(trace), "--only", "worker_up", "--count", "1"]) == 0
    (shown,) = capsys.readouterr().out.splitlines()
    assert " worker_up 'w0' " in shown
