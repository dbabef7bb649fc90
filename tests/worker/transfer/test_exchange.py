"""Where a worker listens for others, as its options say; and the threads that meet in it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from transfer_pair import PATIENCE_S, ByPage, End, content, host_pages

from shared.lifecycle import StartupError
from worker.config import WorkerConfig
from worker.transfer.addresses import Address, address_towards, host_and_port, is_wildcard, join, parse
from worker.transfer.errors import TransferFailed
from worker.transfer.exchange import Listening
from worker.transfer.launch import OnLoop
from worker.transfer.pages import Launch, Segment

KEY = "0123456789abcdef" * 2


def listening(**options: object) -> list[Address]:
    bound = Listening(WorkerConfig(**options))  # type: ignore[arg-type]
    bound.close()
    return [parse(text) for text in bound.addresses]


def test_nobody_can_fetch_unless_that_is_asked_for() -> None:
    assert listening() == listening(transfer_host="off") == listening(transfer_host="off", role="prefill") == []
    for role in ("prefill", "decode"):
        assert [one.scheme for one in listening(role=role, transfer_by="shm,tcp")] == ["shm", "tcp"]


def test_a_prefill_worker_that_can_hand_nothing_over_says_so(caplog: pytest.LogCaptureFixture) -> None:
    listening(transfer_host="off", role="decode")
    assert not caplog.messages
    listening(transfer_host="off", role="prefill")
    assert "hands nothing over, and decodes as well" in caplog.text


def test_addresses_come_in_the_order_that_was_asked_for_with_one_key() -> None:
    found = listening(transfer_host="127.0.0.1", transfer_by="tcp,shm")
    assert [one.scheme for one in found] == ["tcp", "shm"] and len({one.key for one in found}) == 1
    assert host_and_port(found[0].place)[0] == "127.0.0.1"
    assert found[0].key != listening(transfer_host="127.0.0.1", transfer_by="tcp")[0].key, "each process has its own"


@pytest.mark.parametrize("host", ["auto", "0.0.0.0"])
def test_others_are_told_the_address_on_the_way_to_nats(host: str) -> None:
    [one] = listening(transfer_host=host, transfer_by="tcp", nats="nats://user:word@127.0.0.1:4222,nats://elsewhere:1")
    assert host_and_port(one.place)[0] == "127.0.0.1"


def test_the_address_that_others_are_told_is_one_of_those_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET6, ("::1", 4222, 0, 0)), (socket.AF_INET, ("127.0.0.1", 4222))]

    def look_up(host: str, port: int, family: int = 0, type: int = 0) -> list[tuple[object, ...]]:
        return [(one, type, 0, "", address) for one, address in both if family in (0, one)]

    monkeypatch.setattr("worker.transfer.addresses.socket.getaddrinfo", look_up)
    nats = "nats://localhost:4222"
    assert address_towards(nats) == "::1"
    assert address_towards(nats, socket.AF_INET) == "127.0.0.1"
    monkeypatch.undo()
    with pytest.raises(StartupError, match=r"^transfer-host 0.0.0.0: this machine's own address is not to be found"):
        listening(transfer_host="0.0.0.0", nats="nats://[::1]:4222", transfer_by="tcp")


def test_what_can_not_be_listened_on_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=f"^port {port} on 127.0.0.1 is taken; choose another with --transfer-port"
        ):
            listening(transfer_host="127.0.0.1", transfer_port=port, transfer_by="tcp")
    with pytest.raises(StartupError, match=r"^cannot listen on port 0 of 203.0.113.9 \(--transfer-port\)"):
        listening(transfer_host="203.0.113.9", transfer_by="tcp")
    with pytest.raises(StartupError, match=r"^transfer-host auto: this machine's own address is not to be found"):
        listening(transfer_host="auto", nats="nats://nowhere.invalid:4222", transfer_by="tcp")


def test_addresses_are_read_as_they_are_written() -> None:
    for place in ("10.0.0.1:4000", join("::1", 4000), "worker-0.workers:80"):
        address = Address("tcp", place, KEY)
        assert parse(str(address)) == address
        host, port = host_and_port(place)
        assert join(host, port) == place
    for text in ("", "tcp://", f"tcp:///{KEY}", f"tcp://10.0.0.1:1/{KEY}0", "tcp://10.0.0.1:1", f"10.0.0.1:1/{KEY}"):
        with pytest.raises(ValueError, match="is no address of KV blocks"):
            parse(text)
    for place in ("10.0.0.1", ":4000", "10.0.0.1:x", "10.0.0.1:99999"):
        with pytest.raises(ValueError):
            host_and_port(place)
    assert [is_wildcard(host) for host in ("", "0.0.0.0", "::", "127.0.0.1", "::1", "a-name")] == [True] * 3 + [
        False
    ] * 3
    assert address_towards("nats://[::1]:4222") == "::1"


class Launched(ByPage):
    """Page memory that asks the step loop's thread for each group, as a device's does."""

    def incoming(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        for page in pages:
            [staged] = self._memory.segments([page])
            received = staged.copy()
            yield [received]
            launch(lambda staged=staged, received=received: staged.__setitem__(slice(None), received))


def test_a_reset_does_not_wait_for_a_fetch_that_waits_for_its_thread() -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    memory = Launched(host_pages(4, row_bytes=[50]))
    source, target = End("a", ByPage(host_pages(3, row_bytes=[50]))), WaitingEnd("b", memory, calls)
    before = content(memory, range(41))
    target.fetch(source, [(1, 2), (3, 4)])
    call = calls.get(timeout=PATIENCE_S)
    target.exchange.fetches.end()  # on the thread that the fetch is waiting for
    call()
    assert content(memory, range(41)) == before, "what was called off is not done"
    target.fetch(source, [(1, 2)], 2)
    calls.get(timeout=PATIENCE_S)()
    assert target.answer().fetch == 2
    assert content(memory, [2]) == content(source.memory, [1])  # type: ignore[arg-type]
    source.close()
    target.close()


class WaitingEnd(End):
    """Its step loop's thread is the test's."""

    def __init__(self, name: str, memory: ByPage, calls: queue.SimpleQueue[Callable[[], None]]) -> None:
        self._calls = calls
        super().__init__(name, memory, listens=False)

    def call(self, work: Callable[[], None]) -> None:
        self._calls.put(work)


def test_work_that_runs_already_is_waited_for() -> None:
    """It may be writing: only then can the transfer be over."""
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    ended = ""
    started, go_on = threading.Event(), threading.Event()
    found: list[object] = []

    def work() -> str:
        started.set()
        assert go_on.wait(PATIENCE_S)
        return "done"

    launch = OnLoop(calls.put, lambda: ended)
    waiting = threading.Thread(target=lambda: found.append(launch(work)))
    waiting.start()
    working = threading.Thread(target=calls.get(timeout=PATIENCE_S))
    working.start()
    assert started.wait(PATIENCE_S)
    ended = "a reset"
    waiting.join(0.2)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(PATIENCE_S)
    working.join(PATIENCE_S)
    assert found == ["done"]
    with pytest.raises(TransferFailed, match="a reset"):
        launch(work)
    with pytest.raises(ZeroDivisionError):
        OnLoop(lambda run: run(), lambda: "")(lambda: 1 // 0)

    def too_slow() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        OnLoop(lambda run: run(), lambda: "")(too_slow)


def test_a_fetch_that_can_not_be_ended_ends_the_step_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so the worker: its pages are nobody's to give away any more."""
    monkeypatch.setattr("worker.transfer.fetches.MOST_END_S", 0.05)
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    source = End("a", ByPage(host_pages(3, row_bytes=[50])))
    target = WaitingEnd("b", Launched(host_pages(4, row_bytes=[50])), calls)
    target.fetch(source, [(1, 2)])
    working = calls.get(timeout=PATIENCE_S)
    job = target.exchange.fetches._jobs[1]
    monkeypatch.setattr(target.exchange.fetches, "_end", lambda *_: None)  # it takes no notice
    with pytest.raises(RuntimeError, match="fetches of KV blocks did not end"):
        target.exchange.fetches.end()
    assert job.writes
    monkeypatch.undo()
    working()
    source.close()
    target.close()
