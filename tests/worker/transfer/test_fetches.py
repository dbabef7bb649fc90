"""Pages from worker to worker over TCP: equal to the last bit, or answered with the reason why not."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from transfer_pair import PATIENCE_S, ByPage, End, Held, content, host_pages

from shared.messages import Fetch
from worker.ledger import Standing
from worker.transfer import wire
from worker.transfer.addresses import parse
from worker.transfer.fetches import MOST_AT_ONCE


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    source, target = End("a", host_pages(3)), End("b", host_pages(4), listens=False)
    yield source, target
    source.close()
    target.close()


@pytest.mark.parametrize(
    ("standing", "asked", "reason"),
    [
        (Standing(1, 1, 5), {"incarnation": 71}, "the process that had them is gone"),
        (Standing(2, 1, 5), {}, "its epoch is 2, not 1"),
        (Standing(1, 6, 9), {}, "it was reset after step 5"),
        (Standing(1, 0, 0), {}, "it was reset after step 5"),
        (Standing(1, 1, 4), {}, "step 5 has not run there yet"),
        (Standing(1, 1, 5), {"pages": [(41, 1)]}, "a page outside 1..40, or none"),
        (Standing(1, 1, 5), {"pages": [(0, 1)]}, "a page outside 1..40, or none"),
        (Standing(1, 1, 5), {"pages": [(1, 41)]}, "to pages outside 1..40, to one twice, or to none"),
        (Standing(1, 1, 5), {"pages": [(1, 2), (2, 2)]}, "to pages outside 1..40, to one twice, or to none"),
        (Standing(1, 1, 5), {"pages": []}, "to pages outside 1..40, to one twice, or to none"),
        (Standing(1, 1, 5), {"addresses": []}, "it has no address that this worker knows to use"),
        (Standing(1, 1, 5), {"addresses": ["pigeon://loft/" + 32 * "0"]}, "it has no address that this worker knows"),
        (Standing(1, 1, 5), {"addresses": ["nonsense"]}, "'nonsense' is no address of KV blocks"),
    ],
)  # fmt: skip
def test_what_is_not_as_it_was_asked_for_is_refused(
    ends: tuple[End, End], standing: Standing, asked: dict[str, object], reason: str
) -> None:
    source, target = ends
    source.standing = standing
    before = content(target.memory, range(41))  # type: ignore[arg-type]
    target.fetch(source, **{"pages": [(1, 2), (3, 4)], **asked})  # type: ignore[arg-type]
    answer = target.answer()
    assert answer.reason.startswith(reason) or answer.reason.endswith(reason)
    assert answer.bytes == 0 and content(target.memory, range(41)) == before  # type: ignore[arg-type]


def test_pages_of_another_form_are_refused() -> None:
    source, target = End("a", host_pages(layout="heads first")), End("b", host_pages(layout="tokens first"))
    target.fetch(source, [(1, 2)])
    assert target.answer().reason == (
        "its KV blocks are of another form: layout 'heads first', not 'tokens first'"
    )  # fmt: skip
    source.close()
    target.close()


def test_a_worker_without_pages_to_give_away_says_so() -> None:
    source, target = End("a", None), End("b", None)
    assert source.exchange.addresses == [] and source.exchange.idle_s() is None
    target.fetch(source, [(1, 2)])
    assert target.answer().reason == "this worker can't be given KV blocks"
    source.close()
    target.close()


def test_what_changes_while_it_is_read_is_not_taken_for_valid() -> None:
    held = Held(host_pages(3))
    source, target = End("a", held), End("b", ByPage(host_pages(4)), listens=False)
    target.fetch(source, [(1, 2), (3, 4)])
    for _ in range(2):
        assert held.reached.acquire(timeout=PATIENCE_S)
        held.go_on.release()
    assert held.reached.acquire(timeout=PATIENCE_S)
    source.standing = Standing(1, 6, 0)  # a reset: the last page was read, and not yet called valid
    held.go_on.release()
    assert target.answer().reason == "it was reset after step 5"
    source.standing = Standing(1, 1, 5)
    target.fetch(source, [(1, 2), (3, 4)], 2)
    assert held.reached.acquire(timeout=PATIENCE_S)
    source.standing = Standing(2, 0, 0)
    held.go_on.release()
    assert target.answer().reason == "its epoch is 2, not 1"
    source.close()
    target.close()


def test_a_reset_ends_fetches_for_good() -> None:
    held = Held(host_pages(3))
    memory = ByPage(host_pages(4))
    source, target = End("a", held), End("b", memory, listens=False)
    target.fetch(source, [(1, 2), (3, 4), (5, 6)])
    for _ in range(2):
        assert held.reached.acquire(timeout=PATIENCE_S)
        held.go_on.release()
    assert held.reached.acquire(timeout=PATIENCE_S)
    target.exchange.fetches.end()
    after = content(memory, range(41))
    held.go_on.release(3)
    target.fetch(source, [(7, 8)], 9)
    held.go_on.release(2)
    answer = target.answer()
    assert answer.fetch == 9 and not answer.reason, "one that a reset had ended was answered"
    assert content(memory, [2, 4, 6]) == [after[2], after[4], after[6]]
    source.close()
    target.close()


def test_a_plan_may_end_a_fetch_and_it_is_answered() -> None:
    held = Held(host_pages(3))
    source, target = End("a", held), End("b", ByPage(host_pages(4)), listens=False)
    target.fetch(source, [(1, 2)])
    assert held.reached.acquire(timeout=PATIENCE_S)
    target.begin(drop_fetches=[1])
    assert target.answer().reason == "a plan has ended it"
    assert [one.fetch for one in target.exchange.fetches.unheard] == [1]
    target.begin(drop_fetches=[1])
    assert target.exchange.fetches.unheard == []
    held.go_on.release()
    source.close()
    target.close()


def test_so_many_go_on_at_once_and_the_others_wait() -> None:
    held = Held(host_pages(3))
    source, target = End("a", held), End("b", ByPage(host_pages(4)), listens=False)
    for number in range(1, MOST_AT_ONCE + 3):
        target.fetch(source, [(number, number)], number)
    for _ in range(MOST_AT_ONCE):
        assert held.reached.acquire(timeout=PATIENCE_S)
    assert not held.reached.acquire(blocking=False)
    held.go_on.release(2 * (MOST_AT_ONCE + 2))
    answers = [target.answer() for _ in range(MOST_AT_ONCE + 2)]
    assert sorted(one.fetch for one in answers) == list(range(1, MOST_AT_ONCE + 3))
    assert not any(one.reason for one in answers)
    assert len(target.exchange.fetches.unheard) == MOST_AT_ONCE + 2
    source.close()
    target.close()


def test_one_that_is_ordered_twice_is_carried_out_once(ends: tuple[End, End]) -> None:
    source, target = ends
    target.fetch(source, [(1, 2)])
    target.fetch(source, [(1, 2)])
    assert target.answer().reason == ""
    target.fetch(source, [(1, 2)])
    target.fetch(source, [(1, 2)], 2)
    assert target.answer().fetch == 2


def test_a_source_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.transfer.ways.STALL_S", 0.05)
    target = End("b", host_pages(4), listens=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}/{32 * '0'}"
        target.begin(fetches=[Fetch(1, "a", 70, [address], [(1, 2)], 5)])
        assert target.answer().reason == "tcp: timed out"
    target.begin(fetches=[Fetch(2, "a", 70, [address], [(1, 2)], 5)])
    assert target.answer().reason.startswith("tcp: ") and "refused" in target.exchange.fetches.unheard[-1].reason
    target.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        wire.MAGIC + 32 * b"0" + b"\x00\x00\x00\x01\x90",
        wire.MAGIC + b"KEY" + b"\xff\xff\xff\xff",
        wire.MAGIC + b"KEY" + b"\x00\x00\x00\x02\x91\x01",
        wire.MAGIC + b"KEY" + b"\x00\x00\x00\x20\x91",
        b"HRKV\x02\n" + b"KEY" + b"\x00\x00\x00\x02\x91\x01",
    ],
)
def test_strangers_and_nonsense_get_nothing(ends: tuple[End, End], said: bytes) -> None:
    source, target = ends
    address = parse(source.exchange.addresses[0])
    host, _, port = address.place.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
        stranger.sendall(said.replace(b"KEY", address.key.encode()))
        with contextlib.suppress(OSError):  # it may have hung up by now, and need not read all of it
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    target.fetch(source, [(1, 2)])
    assert target.answer().reason == "", "it goes on serving"


def test_a_stranger_that_says_little_by_little_is_hung_up_on(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STALL_S", 0.2)
    source, _ = ends
    host, _, port = parse(source.exchange.addresses[0]).place.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
        stranger.settimeout(0.05)  # the pace
        said = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in wire.MAGIC + 32 * b"0":
                stranger.sendall(bytes([byte]))
                said += 1
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1):
                        break
        assert said < len(wire.MAGIC) + 32


def test_a_stranger_keeps_no_worker_from_stopping(ends: tuple[End, End]) -> None:
    """It waits for those who fetch, and for a while behind them."""
    source, target = ends
    host, _, port = parse(source.exchange.addresses[0]).place.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
        late = time.monotonic() + PATIENCE_S
        while not source.exchange._source._connections and time.monotonic() < late:  # type: ignore[union-attr]
            time.sleep(0.001)
        assert source.exchange.idle_s() == math.inf
        stranger.sendall(100 * b"?")
        assert source.served.get(timeout=PATIENCE_S) == ("", 0, "a stranger")
    assert source.exchange.idle_s() == math.inf
    target.fetch(source, [(1, 2)])
    assert not target.answer().reason
    assert source.exchange.idle_s() < PATIENCE_S  # type: ignore[operator]


def test_a_source_that_gets_no_thread_goes_on_listening(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = ends
    start = threading.Thread.start
    refused: list[str] = []

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "transfer-send" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    target.fetch(source, [(1, 2)])
    assert target.answer().reason and refused
    assert not source.exchange._source._connections  # type: ignore[union-attr]
    target.fetch(source, [(1, 2)], 2)
    assert not target.answer().reason


def test_a_fetch_that_gets_no_thread_is_answered(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = ends

    def scarce(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", scarce)
        for number in range(1, MOST_AT_ONCE + 2):
            target.fetch(source, [(1, 2)], number)
            assert target.answer().reason == "can't start new thread"
    target.fetch(source, [(1, 2)], 9)
    assert (answer := target.answer()).fetch == 9 and not answer.reason


def test_a_source_that_lies_is_found_out() -> None:
    """One that sends other bytes than it has summed, and one that sends nonsense."""
    memory = host_pages(4)
    target = End("b", memory, listens=False)
    told = [
        b"".join(
            (
                wire._HEAD.pack(wire.Frame.PAGES, memory.page_bytes),
                bytes(memory.page_bytes),
                wire._HEAD.pack(4, 4),
                b"abcd",
            )
        ),
        wire._HEAD.pack(wire.Frame.PAGES, 1 << 60),
        wire._HEAD.pack(wire.Frame.DONE, 4) + b"abcd",
        wire._HEAD.pack(wire.Frame.FAILED, 1 << 40),
        wire._HEAD.pack(99, 0),
        wire._HEAD.pack(wire.Frame.FAILED, 3) + b"\xff\xfe!",
    ]
    reasons = []
    with socket.create_server(("127.0.0.1", 0)) as liar:
        address = f"tcp://127.0.0.1:{liar.getsockname()[1]}/{32 * '0'}"
        for number, words in enumerate(told, 1):
            target.begin(fetches=[Fetch(number, "a", 70, [address], [(1, 2)], 5)])
            connection, _ = liar.accept()
            with connection:
                connection.sendall(words)
                reasons.append(target.answer().reason)
    assert reasons[0] == "the checksum does not match"
    assert reasons[1] == f"the source sent {1 << 60} bytes for a group of pages"
    assert reasons[2] == "the source sent a frame of kind 4 in place of PAGES"
    assert reasons[3] == "the source sent a frame of kind 5 in place of PAGES"
    assert reasons[4] == "the source sent a frame of kind 99 in place of PAGES"
    assert reasons[5] == "\ufffd\ufffd!"
    target.close()


def test_a_source_that_closes_ends_what_it_sends() -> None:
    held = Held(host_pages(3))
    source, target = End("a", held), End("b", ByPage(host_pages(4)), listens=False)
    target.fetch(source, [(1, 2)])
    assert held.reached.acquire(timeout=PATIENCE_S)
    assert source.exchange.idle_s() == 0
    assert target.exchange.idle_s() is None
    closing = threading.Thread(target=source.close)
    closing.start()
    assert target.answer().reason == "tcp: the connection ended"
    held.go_on.release()
    closing.join(PATIENCE_S)
    target.close()
