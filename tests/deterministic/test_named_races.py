"""The races that are easy to get wrong, each as a schedule of its own in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from simulated_clients import Ask, Client
from simulated_mesh import SimulatedMesh, Violation
from virtual_time import START_NS

from scheduler.config import SchedulerConfig
from shared.messages import Cancel, RequestEvent, Reset, StepPlan, StepResult, Submit, TokenBatch, decode
from worker import simulated

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def ask(
    mesh: SimulatedMesh, name: str = "r", at_s: float = 1.0, max_tokens: int = 12, n: int = 1, **more: object
) -> Client:
    seed = sum(name.encode())
    return mesh.ask(Ask(name, at_s, 0, (*PROMPT, seed % 60), seed, max_tokens, n, ignore_eos=True, **more))  # type: ignore[arg-type]


def counted(mesh: SimulatedMesh, kind: type) -> list[Any]:
    """Every message of that kind that anybody sends from now on."""
    seen: list[Any] = []

    def look(sender: object, subject: str, payload: bytes) -> None:
        message = decode(payload)
        if isinstance(message, kind):
            seen.append(message)

    mesh.server.taps.append(look)
    return seen


@pytest.mark.parametrize("step", [5, 12])
@pytest.mark.parametrize("spare", [False, True])
def test_result_in_tokens_lost_worker_dead(step: int, spare: bool) -> None:
    """The scheduler has counted tokens that the gateway never gets, and whoever made them is gone. ``step`` 12: the
    last ones, so that the scheduler has nothing left that could be lost."""
    mesh = SimulatedMesh(1, workers=1 + spare)
    client = ask(mesh)
    lost = mesh.lose_once(TokenBatch, lambda batch: batch.step == step)
    mesh.on(
        StepResult, lambda result: result.step == step,
        lambda: [mesh.agenda.after(0.003, worker.kill, 0.5) for worker in mesh.workers],
    )  # fmt: skip
    mesh.run()
    assert lost and client.outcome == "finished"


@pytest.mark.parametrize("spare", [False, True])
def test_a_worker_wrongly_declared_dead_that_comes_back(spare: bool) -> None:
    """Stopped for longer than a worker may be silent, it goes on with its queued plans where it was."""
    mesh = SimulatedMesh(2, workers=1 + spare, step_ms=50.0)
    clients = [ask(mesh, f"r{index}", max_tokens=20) for index in range(3)]
    lost = counted(mesh, RequestEvent)
    mesh.at(1.4, lambda: [worker.hang(7.0) for worker in mesh.workers[:1]], lasts_s=7.0)
    mesh.run()
    assert {event.kind for event in lost} == {"lost"}
    assert [client.outcome for client in clients] == ["finished"] * 3
    assert mesh.workers[0].starts == 1


def test_plan_lost_next_one_in() -> None:
    mesh = SimulatedMesh(3)
    client = ask(mesh)
    lost = mesh.lose_once(StepPlan, lambda plan: plan.step == 6)
    events = counted(mesh, RequestEvent)
    mesh.run()
    assert lost and not events and client.outcome == "finished"


def test_a_restarted_worker_with_the_same_id() -> None:
    """The results of the process before come after the new one has shown up."""
    mesh = SimulatedMesh(4, step_ms=30.0)
    clients = [ask(mesh, f"r{index}") for index in range(3)]
    late = counted(mesh, StepResult)
    mesh.at(1.15, lambda: setattr(mesh.workers[0].link, "delay_s", 1.5))
    mesh.at(1.25, mesh.workers[0].kill, 0.01)
    mesh.at(1.255, lambda: setattr(mesh.workers[0].link, "delay_s", 0.0))
    mesh.run()
    assert len({result.incarnation for result in late}) == 2
    assert [client.outcome for client in clients] == ["finished"] * 3


def test_a_restarted_worker_whose_clock_was_set_back() -> None:
    mesh = SimulatedMesh(5, step_ms=30.0)
    client = ask(mesh)
    mesh.at(1.2, lambda: setattr(mesh.workers[0], "unix_offset_ns", -3600 * 10**9))
    mesh.at(1.25, mesh.workers[0].kill, 0.01)
    mesh.run()
    assert client.outcome == "finished"


def test_a_stopped_leader_that_wakes_after_its_lease() -> None:
    """It has plans in its hands and results to read; the standby leads meanwhile, and the worker has heard it."""
    mesh = SimulatedMesh(6, schedulers=2, step_ms=50.0)
    clients = [ask(mesh, f"r{index}", max_tokens=60) for index in range(3)]
    mesh.at(1.3, lambda: mesh.leaders()[0].hang(3.0), lasts_s=3.0)
    mesh.run()
    assert [client.outcome for client in clients] == ["finished"] * 3
    assert mesh.epochs == [1, 2] and len(set(mesh._planners.values())) == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_the_jetstream_store_lost(restarted: bool) -> None:
    """Lost under the leader, with or without the server; and then the leader is killed. No epoch comes twice."""
    mesh = SimulatedMesh(7, schedulers=2, step_ms=50.0, num_blocks=128)
    clients = [ask(mesh, f"r{index}", max_tokens=110) for index in range(3)]
    if restarted:
        mesh.at(1.3, mesh.restart_server, 0.3, True, lasts_s=1.5)
    else:
        mesh.at(1.3, mesh.lose_store)
    mesh.at(5.0, lambda: mesh.leaders()[0].kill(0.5), lasts_s=0.5)
    mesh.run()
    assert [client.outcome for client in clients] == ["finished"] * 3
    assert mesh.epochs == [1, 2]


def test_cancel_before_submit() -> None:
    """The client leaves at once, and the cancel overtakes the submit: nothing runs."""
    mesh = SimulatedMesh(8)
    client = ask(mesh, leaves_s=0.0001)
    mesh.server.lag_s = lambda subject, payload: 1.5 if ".submit." in subject else 0.0
    sent = [counted(mesh, kind) for kind in (Submit, Cancel, StepPlan)]
    mesh.run()
    assert client.outcome == "left"
    assert [len(messages) > 0 for messages in sent] == [True, True, False]


@pytest.mark.parametrize("kill_at_s", [0.0, 1.1, 1.3])
def test_a_stop_string_in_one_of_n_choices(kill_at_s: float) -> None:
    """The others go on, through the death of the worker before and after it."""
    mesh = SimulatedMesh(9, step_ms=25.0)
    client = ask(mesh, max_tokens=16, n=3, stops={1: 5})
    if kill_at_s:
        mesh.at(kill_at_s, mesh.workers[0].kill, 0.2, lasts_s=0.2)
    mesh.run()
    assert client.outcome == "finished"


def test_the_cancel_of_a_stopped_choice_lost() -> None:
    """The request lives on in the beats, which name no choices: tokens that still come show that it is to be said
    again, and no more often than it takes to be heard."""
    mesh = SimulatedMesh(9, step_ms=25.0, num_blocks=128)
    client = ask(mesh, max_tokens=120, n=3, stops={1: 5})
    lost = mesh.lose_once(Cancel, lambda cancel: cancel.choice == 1)
    cancels, batches = counted(mesh, Cancel), counted(mesh, TokenBatch)
    mesh.run()
    assert lost and client.outcome == "finished"
    assert [cancel.choice for cancel in cancels] == [1, 1]
    reached = max(entry.offset for batch in batches for entry in batch.entries if entry.choice == 1)
    assert 5 + 0.8 / 0.025 < reached < 5 + 1.5 / 0.025


def test_a_finished_entry_lost() -> None:
    """Nothing follows that could show the gap."""
    mesh = SimulatedMesh(10)
    client = ask(mesh)
    lost = mesh.lose_once(TokenBatch, lambda batch: bool(batch.entries[0].end))
    mesh.run()
    assert lost and client.outcome == "finished"


def test_a_reset_lost_and_a_snapshot_lost() -> None:
    mesh = SimulatedMesh(11, schedulers=2)
    client = ask(mesh, max_tokens=30)
    lost = mesh.lose_once(Reset, lambda reset: reset.epoch == 2)
    mesh.at(1.1, lambda: mesh.leaders()[0].kill(0.5), lasts_s=0.5)
    mesh.run()
    assert lost and client.outcome == "finished"


def test_a_request_that_ends_its_worker_fails_alone() -> None:
    mesh = SimulatedMesh(12, step_ms=20.0)
    clients = [ask(mesh, f"r{index}", max_tokens=20) for index in range(5)]
    mesh.make_deadly(clients[3].ask)
    mesh.run(patience_s=60)
    assert [client.outcome for client in clients] == ["finished"] * 3 + ["convicted", "finished"]


def test_two_thousand_streams_resuming_into_a_full_queue() -> None:
    """More than the next scheduler's queue takes at once: all of them come through, none is refused."""
    count = 2000
    options = {"max_num_seqs": 4096, "max_num_batched_tokens": 65_536, "max_num_queued_reqs": 4096}
    mesh = SimulatedMesh(13, num_blocks=16_384, step_ms=500.0, check_every=5000, scheduler_options=options)
    clients = [ask(mesh, f"r{index}", at_s=1.0 + index / 2000, max_tokens=6) for index in range(count)]

    def restart_with_a_short_queue() -> None:
        mesh.scheduler_config = SchedulerConfig(**options | {"max_num_queued_reqs": 300})  # type: ignore[arg-type]
        mesh.schedulers[0].kill(0.2)

    mesh.at(3.4, restart_with_a_short_queue)
    mesh.run()
    assert Counter(client.outcome for client in clients) == {"finished": count}


def test_a_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks themselves: a worker that samples something else is not believed."""
    mesh = SimulatedMesh(14)
    ask(mesh)
    monkeypatch.setattr(simulated, "pick", lambda *key: 3)
    with pytest.raises(Violation, match="token 0 is 3"):
        mesh.run()


def test_the_store_lost_and_a_scheduler_that_has_heard_nobody_yet() -> None:
    """It starts while NATS is away, has the bus before all others, finds no lease, and takes an epoch that has been.

    The workers, which know it, would take its resets for those of old.
    """
    mesh = SimulatedMesh(15, workers=2, step_ms=50.0)
    client = ask(mesh, max_tokens=40)
    mesh.at(1.5, mesh.restart_server, 3.0, True, lasts_s=4.5)
    mesh.at(1.6, lambda: mesh.schedulers[0].kill(4.5 - 1.6 + 0.001), lasts_s=3.0)
    mesh.run()
    assert client.outcome == "finished"


def test_past_the_resume_timeout_streams_end_with_an_error() -> None:
    """The only worker stays away: nobody waits for ever, and nobody is given up before the time."""
    mesh = SimulatedMesh(16, step_ms=50.0, gateway_options={"resume_timeout_s": 30.0})
    clients = [ask(mesh, f"r{index}", max_tokens=30) for index in range(3)]
    mesh.at(1.5, mesh.workers[0].kill, 80.0, lasts_s=80.0)
    with pytest.raises(Violation, match=r"it was given up.*within 30 s"):
        mesh.run()
    assert "failed" in {client.outcome for client in clients}
    assert 31 < (mesh.clock.now_ns - START_NS) / 1e9 < 36


def test_every_process_restarted_in_turn() -> None:
    """A rolling restart under load, twice, with a spare of each kind: nothing is refused and nothing fails."""
    mesh = SimulatedMesh(17, schedulers=2, workers=2, gateways=2, step_ms=20.0)
    clients = [ask(mesh, f"r{index}", at_s=1.0 + index * 0.3, max_tokens=30, n=1 + index % 2) for index in range(60)]
    for turn, node in enumerate([*mesh.schedulers, *mesh.workers] * 2):
        mesh.at(2.0 + 2.0 * turn, node.terminate)
    mesh.run()
    assert {client.outcome for client in clients} == {"finished"}


def test_a_worker_that_dies_before_it_is_greeted_and_comes_back_with_its_clock_set_back() -> None:
    """The reset of the process before is never answered, and must not stand in the way of the new one."""
    mesh = SimulatedMesh(18, workers=2)
    client = ask(mesh, at_s=9.0)
    mesh.server.lose = lambda sender, subject, payload: (
        isinstance(decode(payload), Reset) and mesh.workers[0].starts == 1
    )
    mesh.at(2.0, lambda: setattr(mesh.workers[0], "unix_offset_ns", -3600 * 10**9))
    mesh.at(2.1, mesh.workers[0].kill, 0.1)
    mesh.run()
    assert client.outcome == "finished"


@pytest.mark.parametrize("whole", [False, True])
def test_a_mesh_stays_away_and_its_requests_go_on_in_the_other(whole: bool) -> None:
    """Its worker, or its scheduler too; both come back, and nothing is left there of what ran."""
    mesh = SimulatedMesh(30, shards=2, schedulers=2, workers=2, step_ms=50.0, gateway_options={"mesh_away_s": 2.0})
    clients = [ask(mesh, f"r{index}", max_tokens=60) for index in range(6)]
    mesh.at(2.0, mesh.workers[0].kill, 12.0, lasts_s=12.0)
    if whole:
        mesh.at(2.0, mesh.schedulers[0].kill, 12.0, lasts_s=12.0)
    subjects: dict[str, set[str]] = {}  # request -> where it was submitted

    def look(sender: object, subject: str, payload: bytes) -> None:
        if ".submit." in subject:
            subjects.setdefault(decode(payload).request_id, set()).add(subject.split(".")[1])  # type: ignore[union-attr]

    mesh.server.taps.append(look)
    mesh.run()
    assert [client.outcome for client in clients] == ["finished"] * 6
    assert sorted(map(len, subjects.values())) == [1, 1, 1, 2, 2, 2], "those that the first mesh ran, and no others"
