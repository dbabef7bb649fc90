"""A whole mesh in virtual time: nodes, clients, faults, and what must hold whatever happens.

The checks stand outside of the code: what a client got is compared with what the simulated model must say, token by
token as it comes; and they hold for every node's books at every step and at the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from memory_store import MemoryStore
from simulated_bus import Connection, Server
from simulated_clients import Ask, Client
from simulated_nodes import (
    MODEL,
    GatewayNode,
    Node,
    SchedulerNode,
    WorkerNode,
    capacity,
    virtual_step_loops,
)
from virtual_exchange import Roads
from virtual_time import START_NS, Agenda, Clock, virtual_time

from gateway.config import GatewayConfig
from scheduler.config import SchedulerConfig
from scheduler.core.core import SchedulerCore
from shared.messages import Message, Role, StepPlan, decode
from worker.config import WorkerConfig
from worker.simulated import StepTime

Wanted = TypeVar("Wanted", bound=Message)

IDLE_S = 15.0  # by then a mesh that nobody asks anything has nothing left in its books


class Violation(AssertionError):
    """A promise was broken; the message has all that were."""


class SimulatedMesh:
    """What was accepted must be answered, whatever happens.

    ``transfers``: workers offer their KV blocks to each other, as those with ``roles`` do in any case.
    ``overlapping``: workers launch a step before the last one's tokens are there.
    ``check_every``: messages to a scheduler from one look at its core's books to the next, which takes its time.
    """

    def __init__(
        self, seed: int, *, schedulers: int = 1, workers: int = 1, gateways: int = 1, num_blocks: int = 64,
        block_size: int = 4, step_ms: float = 10.0, check_every: int = 4, verbose: bool = False,
        host_blocks: int = 0, max_payload: int = 1 << 20, overlapping: bool = False,
        scheduler_options: dict[str, Any] | None = None, gateway_options: dict[str, Any] | None = None,
        transfers: bool = False, roles: Sequence[Role] = (), shards: int = 1,
    ) -> None:  # fmt: skip
        """``shards``: meshes that every gateway joins, and among which schedulers and workers are dealt out."""
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.agenda = Agenda(self.clock)
        self.check_every = check_every
        self.verbose = verbose
        self.overlapping = overlapping
        self.log: list[str] = []
        self.violations: list[str] = []
        self.max_payload = max_payload
        self.server = Server(self.clock, self.agenda, self.rng, self.note if verbose else None)
        self.server.taps.append(self._tap)
        self.shards = ["default"] if shards == 1 else [f"m{index + 1}" for index in range(shards)]
        self.stores = {shard: MemoryStore() for shard in self.shards}  # of their leases
        self.capacity = capacity(block_size, num_blocks, host_blocks)
        self.step_time = StepTime(1000 * step_ms, 50.0)
        self.scheduler_config = SchedulerConfig(**(scheduler_options or {}))
        self.gateway_config = GatewayConfig(
            model=MODEL, served_model_name=MODEL, mesh=",".join(self.shards), **(gateway_options or {})
        )
        self.worker_config = WorkerConfig(drain_grace_s=5.0, transfer_host="off")  # (off: no sockets)
        self.transfers = transfers or bool(roles)
        self.roads = Roads()
        self.schedulers = [SchedulerNode(self, f"s{index + 1}") for index in range(schedulers)]
        self.workers = [WorkerNode(self, f"w{index + 1}") for index in range(max(workers, len(roles)))]
        for worker, role in zip(self.workers, roles, strict=False):
            worker.role = role
        for group in (self.schedulers, self.workers):
            for index, node in enumerate(group):
                node.shard = self.shards[index % shards]
        self.gateways = [GatewayNode(self, f"g{index + 1}") for index in range(gateways)]
        self.nodes: list[Node] = [*self.schedulers, *self.workers, *self.gateways]
        self.clients: list[Client] = []
        self.open_clients = 0
        self.faults_end_ns = 0
        self.undisturbed = True
        self.deadly: set[str] = set()
        self.seeming_crashes = 0  # how often a worker has ended, or may seem to have, by no fault of its requests
        self._planners: dict[tuple[int, str, int], str] = {}  # (epoch, worker, incarnation) -> whose plans it gets

    # --- what happens -----------------------------------------------------------------------------------------------

    def ask(self, ask: Ask, checked: bool = True) -> Client:
        client = Client(self, ask, checked)
        self.clients.append(client)
        self.open_clients += 1
        self.agenda.at(START_NS + int(ask.at_s * 1e9), client.come)
        return client

    def at(self, seconds: float, action: Callable[..., None], *args: Any, lasts_s: float = 0.0) -> None:
        """A fault, and how long it lasts."""
        when = START_NS + int(seconds * 1e9)
        self.undisturbed = False
        self.faults_end_ns = max(self.faults_end_ns, when + int(lasts_s * 1e9))
        self.agenda.at(when, action, *args)

    def on(self, kind: type[Wanted], wanted: Callable[[Wanted], bool], action: Callable[..., None], *args: Any) -> None:
        """Once, when the first such message is sent, do something before it goes."""

        def look(sender: Connection, subject: str, payload: bytes) -> None:
            message = decode(payload)
            if isinstance(message, kind) and wanted(message):
                self.server.taps.remove(look)
                action(*args)

        self.undisturbed = False
        self.server.taps.append(look)

    def lose_once(self, kind: type[Wanted], wanted: Callable[[Wanted], bool]) -> list[Wanted]:
        """Lose the first such message; it is in the list that is returned once it is lost."""
        lost: list[Wanted] = []

        def lose(sender: str, subject: str, payload: bytes) -> bool:
            message = decode(payload)
            if lost or not isinstance(message, kind) or not wanted(message):
                return False
            lost.append(message)
            return True

        self.undisturbed = False
        self.server.lose = lose
        return lost

    def restart_server(self, down_s: float, forgetful: bool = False) -> None:
        """``forgetful``: it comes back without what JetStream had stored."""
        self.note("nats", f"KILLED, back in {down_s:.2f} s{', without its store' if forgetful else ''}")
        self.seeming_crashes += len(self.workers)
        self.server.stop()
        if forgetful:
            self.lose_store()
        self.agenda.after(down_s, self.server.start)

    def stop_store(self, seconds: float, forgetful: bool = False) -> None:
        """JetStream does not answer for so long."""
        self.note("store", f"DOWN for {seconds:.2f} s{', and lost' if forgetful else ''}")
        for store in self.stores.values():
            store.down = True
        if forgetful:
            self.lose_store()
        self.agenda.after(seconds, self._start_store)

    def _start_store(self) -> None:
        for store in self.stores.values():
            store.down = False

    def lose_store(self) -> None:
        for store in self.stores.values():
            store.lose()

    def make_deadly(self, ask: Ask) -> None:
        """A worker that runs the request ends."""
        self.note(ask.name, "ends whoever runs it")
        self.deadly.add(ask.name)
        self.undisturbed = False

    def run(self, patience_s: float = 40.0) -> None:
        """Until every client's request has ended and the mesh is at rest; raises :class:`Violation`.

        ``patience_s``: what may still take its time once the faults are over.
        """
        with self._virtual():
            for node in self.nodes:
                node.start()
            last_ns = max([START_NS + int(client.ask.at_s * 1e9) for client in self.clients], default=START_NS)
            limit = max(last_ns, self.faults_end_ns) + int(patience_s * 1e9)
            self.advance(lambda: not self.open_clients and self._faults_over(), limit)
            for client in self.clients:
                if not client.over:
                    client.violate("it waits for ever")
            if not self.violations:
                self.advance(self._at_rest, self.clock.now_ns + int(IDLE_S * 1e9))
                self._check_rest()
            for node in self.nodes:
                if node.loop is not None:
                    node.restarts = False
                    node.kill()
        if self.violations:
            raise Violation(f"seed {self.seed}: " + "; ".join(self.violations[:5]))

    def advance(self, done: Callable[[], bool], limit_ns: int) -> None:
        """Run until ``done`` (asked now and then, when nothing is left to do at a time) or ``limit_ns``."""
        clock, agenda = self.clock, self.agenda
        awake = agenda.awake
        moments = 0
        while True:
            while awake:
                loop = awake.popleft()
                loop.node.run(loop)
            moments += 1
            following = agenda.due_ns
            if self.violations or following > limit_ns or (moments % 16 == 0 and done()):
                return
            clock.now_ns = max(clock.now_ns, int(following))
            agenda.run_due()

    def run_for(self, seconds: float) -> None:
        """For scripted schedules, inside of :meth:`started`."""
        self.advance(lambda: False, self.clock.now_ns + int(seconds * 1e9))

    @property
    def epochs(self) -> list[int]:
        """In which plans were made."""
        return sorted({epoch for epoch, _, _ in self._planners})

    # --- what is watched --------------------------------------------------------------------------------------------

    def note(self, who: str, what: str) -> None:
        if self.verbose:
            self.log.append(f"{(self.clock.now_ns - START_NS) / 1e9:10.6f}  {who:8} {what}")

    def violate(self, text: str, error: BaseException | None = None) -> None:
        self.violations.append(text)
        self.note("CHECK", f"VIOLATION {text}")
        if error is not None and self.verbose:
            self.log += traceback.format_exception(error)

    def check_core(self, name: str, core: SchedulerCore) -> None:
        try:
            core.check()
        except AssertionError as error:
            self.violate(f"{name}: the core's books: {error}", error)

    def executed(self, worker: WorkerNode, plan: StepPlan, requests: Sequence[str]) -> None:
        """A worker is about to have run a step of these requests."""
        if plan.epoch < worker.epoch:
            self.violate(f"{worker.name} runs a plan of epoch {plan.epoch} after one of {worker.epoch}")
        worker.epoch = plan.epoch
        if self.deadly and not self.deadly.isdisjoint(requests):
            self.seeming_crashes -= 1  # it was no fault
            self.agenda.at(self.clock.now_ns, worker.kill, 0.5)

    def _tap(self, sender: Connection, subject: str, payload: bytes) -> None:
        if ".step." not in subject:
            return
        message = msgspec.msgpack.decode(payload)[2]
        if message[0] != "plan":
            return
        stored = self.stores[subject.split(".")[1]].value
        lease = json.loads(stored) if stored else {"epoch": 0}
        if message[1] < lease["epoch"]:
            self.violate(
                f"{sender.owner} plans in epoch {message[1]}, while {lease['holder']} leads in {lease['epoch']}"
            )
        # Where the lease is lost with its store, and everybody who knew the epoch is gone, it may come again; for one
        # worker's process never.
        key = (message[1], message[2], message[3])
        known = self._planners.setdefault(key, sender.owner)
        if known != sender.owner:
            self.violate(f"{sender.owner} plans in epoch {message[1]} for {message[2]}; there it is {known}'s")

    # --- rest -------------------------------------------------------------------------------------------------------

    def _faults_over(self) -> bool:
        return self.clock.now_ns >= self.faults_end_ns

    def leaders(self) -> list[SchedulerNode]:
        return [one for one in self.schedulers if one.leads]

    def _at_rest(self) -> bool:
        if any(node.loop is None or node.hung for node in self.nodes):
            return False
        if any(one.dispatch is None or list(one.dispatch.records()) for one in self.gateways):
            return False
        return all(map(self._shard_at_rest, self.shards))

    def _shard_at_rest(self, shard: str) -> bool:
        leaders, workers = self._nodes_of(shard)
        if len(leaders) != 1:
            return False
        core = leaders[0].service.core  # type: ignore[union-attr]
        if any(worker.fetching for worker in core.workers.values()):
            return False
        return len(core.workers) == len(workers) and not core.live_requests()

    def _nodes_of(self, shard: str) -> tuple[list[SchedulerNode], list[WorkerNode]]:
        """Who leads a mesh, and its workers."""
        leaders = [one for one in self.leaders() if one.shard == shard]
        return leaders, [one for one in self.workers if one.shard == shard]

    def _check_rest(self) -> None:
        """Nothing is left of anything, once there is nobody to serve."""
        for gateway in self.gateways:
            if gateway.dispatch is None:
                self.violate(f"{gateway.name} is not up")
            elif left := len(list(gateway.dispatch.records())):
                self.violate(f"{gateway.name} still has {left} requests in its ledger")
        for shard in self.shards:
            self._check_shard(shard)

    def _check_shard(self, shard: str) -> None:
        leaders, workers = self._nodes_of(shard)
        if len(leaders) != 1:
            self.violate(f"{len(leaders)} schedulers lead {shard}")
            return
        service = leaders[0].service
        assert service is not None
        core = service.core
        self.check_core(leaders[0].name, core)
        if len(core.workers) != len(workers):
            self.violate(f"the scheduler has {sorted(core.workers)} of {len(workers)} workers")
        if core.live_requests():
            self.violate(f"the scheduler still has {core.live_requests()}")
        for worker in core.workers.values():
            if any(worker.pool._refs[1:]):
                self.violate(f"{worker.name}: blocks are still referenced")
            if list(worker.sequences()):
                self.violate(f"{worker.name}: sequences are left")
        if core.num_waiting or core.waiting_tokens:
            self.violate(f"{core.num_waiting} sequences with {core.waiting_tokens} tokens still wait")
        core.tick(self.clock.now_ns + 2 * core.limits.tombstone_ns)
        if core._requests or core._tombstones or core._deadlines:
            self.violate("the scheduler forgets nothing")

    @contextlib.contextmanager
    def _virtual(self) -> Iterator[None]:
        back = virtual_step_loops()
        handler = _LogHandler(self) if self.verbose else None
        root = logging.getLogger("headrace")
        level = root.level
        if handler is None:
            logging.disable(logging.CRITICAL)
        else:
            root.addHandler(handler)
            root.setLevel(logging.INFO)
        try:
            with virtual_time(self.clock):
                yield
        finally:
            back()
            logging.disable(logging.NOTSET)
            if handler is not None:
                root.removeHandler(handler)
                root.setLevel(level)


class _LogHandler(logging.Handler):
    def __init__(self, mesh: SimulatedMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def emit(self, record: logging.LogRecord) -> None:
        self._mesh.note("log", f"{record.name}: {record.getMessage()}")
        if record.exc_info:
            self._mesh.log.append(logging.Formatter().formatException(record.exc_info))
