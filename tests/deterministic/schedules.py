"""Random schedules: a mesh, a load and faults, all from one seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from simulated_clients import Ask
from simulated_mesh import SimulatedMesh
from simulated_nodes import VOCAB, Node

from shared.messages import Role

KINDS = (
    "kill", "kill", "kill", "hang", "hang", "partition", "partition", "cut", "server", "slow", "delay", "clock",
    "terminate", "store",
)  # fmt: skip


ROLES = (
    (Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.DECODE, Role.MIXED),
    (Role.MIXED, Role.MIXED), (Role.MIXED, Role.MIXED, Role.MIXED),
)  # fmt: skip


def random_moves(seed: int, verbose: bool = False) -> SimulatedMesh:
    """As :func:`random_mesh`, with workers that have roles and hand over sequences by their KV blocks."""
    rng = random.Random(f"moves {seed}")
    mesh = _random_mesh(seed, rng, verbose, rng.choice(ROLES))
    mesh.roads.failure = rng.choice((0.0, 0.0, 0.05, 0.3))
    mesh.roads.delay_s = rng.choice((0.001, 0.01, 0.1, 1.0))
    if rng.random() < 0.5 and mesh.clients:
        at_s = rng.choice(mesh.clients).ask.at_s + rng.uniform(0.0, 0.5)
        mesh.at(at_s, rng.choice(mesh.workers).terminate, lasts_s=6.0)
    return mesh


def random_meshes(seed: int, verbose: bool = False) -> SimulatedMesh:
    """As :func:`random_mesh`, with two meshes behind the gateways, and faults that last while requests are open."""
    rng = random.Random(f"meshes {seed}")
    mesh = _random_mesh(seed, rng, verbose, (), shards=2)
    mesh.gateway_config = dataclasses.replace(mesh.gateway_config, mesh_away_s=rng.choice((0.5, 1.5, 4.0)))
    if rng.random() < 0.5 and mesh.clients:
        at_s, down_s = rng.choice(mesh.clients).ask.at_s + rng.uniform(0.0, 0.5), rng.uniform(2.0, 8.0)
        mesh.at(at_s, rng.choice([*mesh.workers, *mesh.schedulers]).kill, down_s, lasts_s=down_s)
    return mesh


def random_mesh(seed: int, verbose: bool = False) -> SimulatedMesh:
    return _random_mesh(seed, random.Random(seed), verbose, ())


def _random_mesh(seed: int, rng: random.Random, verbose: bool, roles: Sequence[Role], shards: int = 1) -> SimulatedMesh:
    block_size = rng.choice((2, 4, 4, 8))
    mesh = SimulatedMesh(
        seed,
        schedulers=shards * rng.choice((1, 2, 2)),
        workers=shards * rng.choice((1, 1, 2, 2, 3)),
        gateways=rng.choice((1, 1, 2)),
        block_size=block_size,
        num_blocks=rng.choice((12, 20, 40, 80)) * 4 // block_size,
        step_ms=rng.choice((5.0, 20.0, 60.0)),
        verbose=verbose,
        overlapping=seed % 2 == 1,
        scheduler_options={
            "max_num_seqs": rng.choice((2, 4, 16)),
            "max_num_batched_tokens": rng.choice((16, 32, 256)),
            "run_ahead": rng.choice((1, 2, 2, 3)),
            "enable_prefix_caching": rng.random() < 0.85,
            "max_num_queued_reqs": rng.choice((6, 1024, 1024, 1024)),
        },
        host_blocks=rng.choice((0, 0, 0, 16)),
        max_payload=rng.choice((4096, 1 << 20, 1 << 20)),
        roles=roles,
        shards=shards,
    )
    span_s = rng.choice((0.2, 1.5, 3.0))
    _load(mesh, rng, span_s)
    _faults(mesh, rng, span_s)
    return mesh


def _load(mesh: SimulatedMesh, rng: random.Random, span_s: float) -> None:
    room = mesh.capacity.num_blocks * mesh.capacity.block_size
    shared = [rng.randrange(VOCAB) for _ in range(rng.randrange(4, 24))]
    for index in range(rng.randrange(3, 9)):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14))]
        prompt = shared[: rng.randrange(len(shared) + 1)] + own if rng.random() < 0.5 else own
        n = rng.choice((1, 1, 1, 2, 3))
        max_tokens = min(rng.randrange(3, 31), room // n - len(prompt) - mesh.capacity.block_size * n)
        if max_tokens < 1:
            continue
        beams = n if rng.random() < 0.06 and mesh.scheduler_config.max_num_seqs >= n else 0
        if beams:
            max_tokens = min(max_tokens, 8)
        logprobs = not beams and rng.random() < 0.1
        stops = {choice: rng.randrange(1, max_tokens + 1) for choice in range(n) if rng.random() < 0.15}
        mesh.ask(
            Ask(
                f"r{index}",
                1.0 + rng.random() * span_s,
                rng.randrange(2),
                tuple(prompt),
                rng.randrange(1 << 40),
                max_tokens,
                n,
                min_tokens=rng.choice((0, 0, max_tokens // 2)),
                ignore_eos=rng.random() < 0.5,
                priority=rng.choice((0, 0, 0, 1)),
                tenant=rng.choice(("", "", "a", "b")),
                stops={} if beams else stops,
                beam_width=beams,
                scored=not beams and rng.random() < 0.1,
                logprobs=logprobs,
                prompt_logprobs=logprobs and rng.random() < 0.5,
                leaves_s=rng.uniform(0.01, 1.5) if rng.random() < 0.12 else 0.0,
            )
        )


def _faults(mesh: SimulatedMesh, rng: random.Random, span_s: float) -> None:
    if rng.random() < 0.05:
        return
    weather = mesh.server.weather
    if rng.random() < 0.3:
        weather.jitter_s = rng.choice((0.002, 0.02, 0.1))
    if rng.random() < 0.25:
        weather.loss = rng.choice((0.01, 0.05, 0.2))
        mesh.at(rng.uniform(1.0, 1.5 + span_s), _calm, mesh)
    if rng.random() < 0.25:
        weather.repetition = rng.choice((0.05, 0.5))
    if rng.random() < 0.1 and mesh.clients:
        ask = rng.choice(mesh.clients).ask
        if not ask.leaves_s:
            mesh.make_deadly(ask)
    for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 7))):
        # While somebody is served, most often.
        at_s = rng.choice(mesh.clients).ask.at_s + rng.uniform(-0.1, 0.7) if mesh.clients else 1.0
        kind = rng.random()
        if kind < 0.1:
            node = rng.choice(mesh.gateways)
        elif kind < 0.6:
            node = rng.choice(mesh.workers)
        else:
            node = rng.choice(mesh.schedulers)
        _fault(mesh, rng, at_s, node)


def _on(node: Node, action: Callable[..., None], *args: Any) -> None:
    """A fault of a scheduler is one of whichever leads then."""
    leaders = node.mesh.leaders()
    action(leaders[0] if node.kind == "scheduler" and leaders else node, *args)


def _partition(node: Node, seconds: float, up: bool, down: bool) -> None:
    node.mesh.note(node.name, f"PARTITION for {seconds:.2f} s: up {up}, down {down}")
    node.mesh.seeming_crashes += 1
    node.link.partition(seconds, up, down)


def _calm(mesh: SimulatedMesh) -> None:
    mesh.server.weather.loss = 0.0


def _fault(mesh: SimulatedMesh, rng: random.Random, at_s: float, node: Node) -> None:
    kind = rng.choice(KINDS)
    lasts_s = rng.choice((0.1, 0.5, 1.2, 2.5, 6.0, 10.0)) * rng.uniform(0.8, 1.2)
    if kind == "kill":
        down_s = rng.choice((0.05, 0.5, 2.0))
        mesh.at(at_s, _on, node, Node.kill, down_s, lasts_s=down_s)
    elif kind == "hang":
        mesh.at(at_s, _on, node, Node.hang, lasts_s, lasts_s=lasts_s)
    elif kind == "partition":
        up, down = rng.choice(((True, True), (True, False), (False, True)))
        mesh.at(at_s, _on, node, _partition, lasts_s, up, down, lasts_s=1.3 * lasts_s)
    elif kind == "cut":
        mesh.at(at_s, _on, node, _cut, rng.randrange(2))
    elif kind == "server":
        down_s = rng.choice((0.1, 1.0, 4.0))
        mesh.at(at_s, mesh.restart_server, down_s, rng.random() < 0.3, lasts_s=down_s + 1.5)
    elif kind == "slow":
        mesh.at(at_s, _on, node, _slow, rng.randrange(2), rng.randrange(1, 6))
    elif kind == "delay":
        mesh.at(at_s, _delay, node, rng.choice((0.05, 0.3)))
        mesh.at(at_s + lasts_s, _delay, node, 0.0)
    elif kind == "clock":
        mesh.at(at_s, _on, node, _set_clock, rng.choice((-3600, -2, 5, 3600)))
    elif kind == "terminate":
        mesh.at(at_s, _on, node, Node.terminate, lasts_s=6.0)
    elif kind == "store":
        mesh.at(at_s, mesh.stop_store, lasts_s, rng.random() < 0.5, lasts_s=lasts_s)


def _cut(node: Node, which: int) -> None:
    node.mesh.seeming_crashes += 1
    for connection in node.link.connections[which : which + 1]:
        node.mesh.note(connection.name, "CUT")
        connection.cut()


def _slow(node: Node, which: int, messages: int) -> None:
    for connection in node.link.connections[which : which + 1]:
        node.mesh.note(connection.name, f"SLOW CONSUMER: drops {messages}")
        connection.slow = messages


def _delay(node: Node, seconds: float) -> None:
    node.mesh.note(node.name, f"DELAY {seconds}")
    node.link.delay_s = seconds


def _set_clock(node: Node, seconds: float) -> None:
    node.mesh.note(node.name, f"CLOCK {seconds:+} s")
    node.unix_offset_ns += int(seconds * 1e9)
