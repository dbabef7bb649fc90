"""Every transport brings the same bytes, ends when it is told to, and leaves the next one to try where it can't be."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_pair import CAPACITY, INCARNATION, PATIENCE_S, ByPage, End, Held, content, host_pages

from shared.config import ConfigError, resolve
from shared.messages import Fetch
from worker.config import WorkerConfig
from worker.ledger import Standing
from worker.transfer import nixl, shared_memory
from worker.transfer import pages as pages_module
from worker.transfer.addresses import parse
from worker.transfer.errors import TransferFailed
from worker.transfer.nixl_installed import has_rdma, is_installed
from worker.transfer.pages import Form, HostPages, groups, runs
from worker.transfer.shared_memory import pieces
from worker.transfer.transports import TRANSPORTS, transports_of

needs_nixl = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
ALL = [pytest.param(name, marks=needs_nixl if name == "nixl" else ()) for name in TRANSPORTS]
SOURCE, TARGET = host_pages(1), host_pages(2)


@pytest.fixture(scope="module", params=ALL)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    source = End(f"a-{request.param}", SOURCE, by=request.param)
    target = End(f"b-{request.param}", TARGET, listens=False, by=request.param)
    yield source, target
    source.close()
    target.close()


def test_what_is_fetched_is_equal_to_the_last_bit(pair: tuple[End, End]) -> None:
    """Any pages, in groups of any size; nothing else changes."""
    source, target = pair
    [transport] = {parse(text).scheme for text in source.exchange.addresses}
    numbers = iter(range(1, 1 << 30))

    @given(
        st.lists(st.integers(1, 40), min_size=1, max_size=40),
        st.permutations(range(1, 41)),
        st.sampled_from([1, 300, 1 << 20]),
    )
    @settings(max_examples=30, deadline=None)
    def fetched(there: list[int], here: list[int], group_bytes: int) -> None:
        here = here[: len(there)]
        rest = sorted(set(range(41)) - set(here))
        before = content(TARGET, rest)
        number = next(numbers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pages_module, "GROUP_BYTES", group_bytes)
            target.fetch(source, list(zip(there, here, strict=True)), number)
            answer = target.answer()
            assert source.served.get(timeout=PATIENCE_S) == (transport, len(there) * SOURCE.page_bytes, "")
        assert answer.reason == "" and answer.transport == transport and answer.fetch == number
        assert answer.bytes == len(there) * SOURCE.page_bytes
        assert content(TARGET, here) == content(SOURCE, there)
        assert content(TARGET, rest) == before, "pages that nobody asked for"
        target.begin(drop_fetches=[number])

    fetched()


@pytest.mark.parametrize("transport", ALL)
def test_large_pages_come_whole(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each larger than a group, and in more pieces of memory than one call takes."""
    monkeypatch.setattr(pages_module, "GROUP_BYTES", 1 << 20)
    source_pages = host_pages(5, num_blocks=3, row_bytes=[1 << 12] * 600)
    target_pages = host_pages(6, num_blocks=3, row_bytes=[1 << 12] * 600)
    assert source_pages.page_bytes > pages_module.GROUP_BYTES
    source, target = End("a-large", source_pages, by=transport), End("b-large", target_pages, by=transport)
    target.fetch(source, [(3, 1), (1, 2)])
    answer = target.answer()
    assert answer.reason == "" and answer.transport == transport
    assert content(target_pages, [1, 2]) == content(source_pages, [3, 1])
    source.close()
    target.close()


def test_pages_of_another_process_come_by_each_transport() -> None:
    transports = [name for name in TRANSPORTS if name != "nixl" or is_installed()]
    script = [sys.executable, str(Path(__file__).parent / "source_process.py"), ",".join(transports)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    target_pages, there = host_pages(2), host_pages(8)
    with subprocess.Popen(script, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        addresses = json.loads(process.stdout.readline())
        assert [parse(text).scheme for text in addresses] == transports
        for number, transport in enumerate(transports, 1):
            target = End(f"b-{transport}", target_pages, listens=False, by=transport)
            order = Fetch(1, "a-process", INCARNATION, addresses, [(9, number), (4, 10 + number)], 5)
            target.begin(fetches=[order])
            answer = target.answer()
            assert (answer.reason, answer.transport) == ("", transport)
            assert content(target_pages, [number, 10 + number]) == content(there, [9, 4])
            target.close()
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("transport", ALL)
def test_a_reset_on_either_side_ends_it(transport: str) -> None:
    held, memory = Held(host_pages(3)), ByPage(host_pages(4))
    source, target = End("a-reset", held, by=transport), End("b-reset", memory, listens=False, by=transport)
    target.fetch(source, [(1, 2), (3, 4)])
    for _ in range(2):
        assert held.reached.acquire(timeout=PATIENCE_S)
        held.go_on.release()
    assert held.reached.acquire(timeout=PATIENCE_S)
    source.standing = Standing(1, 6, 0)
    held.go_on.release()
    assert target.answer().reason == "it was reset after step 5"
    source.standing = Standing(1, 1, 5)
    target.fetch(source, [(5, 6), (7, 8)], 2)
    assert held.reached.acquire(timeout=PATIENCE_S)
    held.go_on.release()
    assert held.reached.acquire(timeout=PATIENCE_S)
    target.exchange.fetches.end()
    after = content(memory, [6, 8])
    held.go_on.release(2)
    target.fetch(source, [(9, 10)], 3)
    held.go_on.release(2)
    answer = target.answer()
    assert answer.fetch == 3 and not answer.reason, "one that a reset had ended was answered"
    assert content(memory, [6, 8]) == after
    source.close()
    target.close()


def test_where_one_transport_can_not_be_the_next_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(shared_memory, "_read", forbidden)
    source, target = End("a", SOURCE, by="shm,tcp"), End("b", TARGET, listens=False, by="shm,tcp")
    target.fetch(source, [(1, 2)])
    answer = target.answer()
    assert (answer.reason, answer.transport) == ("", "tcp")
    other_machine = [text.replace("headrace-", "elsewhere-") for text in source.exchange.addresses]
    target.fetch(source, [(1, 3)], 2, addresses=other_machine)
    assert target.answer().transport == "tcp"
    only_memory = End("c", TARGET, listens=False, by="shm")
    only_memory.fetch(source, [(1, 4)])
    assert only_memory.answer().reason.startswith("shm: the kernel lets no process read another's memory")
    for end in (source, target, only_memory):
        end.close()


@needs_nixl
def test_a_source_that_can_not_use_nixl_says_so_and_tcp_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = End("a", SOURCE, by="nixl,tcp"), End("b", TARGET, listens=False, by="nixl,tcp")

    def broken(agent: nixl.Nixl, connection: socket.socket) -> None:
        agent._failure = "no such device"
        agent._ready()

    monkeypatch.setattr(nixl.Nixl, "sending", broken)
    source.close()
    source = End("a", SOURCE, by="nixl,tcp")
    target.fetch(source, [(1, 2)])
    assert target.answer().transport == "tcp"
    target.fetch(source, [(1, 2)], 2, addresses=source.exchange.addresses[:1])
    assert target.answer().reason == "nixl: no such device"
    source.close()
    target.close()


@needs_nixl
def test_a_source_that_is_lost_while_nixl_reads_ends_the_fetch() -> None:
    held = Held(host_pages(3))
    source, target = End("a-lost", held, by="nixl"), End("b-lost", ByPage(host_pages(4)), listens=False, by="nixl")
    target.fetch(source, [(1, 2), (3, 4)])
    assert held.reached.acquire(timeout=PATIENCE_S)
    held.go_on.release()
    assert held.reached.acquire(timeout=PATIENCE_S)
    source.exchange._source.close()  # type: ignore[union-attr]
    assert target.answer().reason == "nixl: the connection ended"
    held.go_on.release(2)
    source.close()
    target.close()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.lists(st.integers(1, 40), min_size=1, max_size=12)
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_pieces_cover_both_sides(here: list[int], there: list[int]) -> None:
    short = min(sum(here), sum(there))
    here[-1] += sum(there) - short
    there[-1] += sum(here) - sum(there)
    memory = np.arange(sum(here), dtype=np.uint32).view(np.uint8)[: sum(here)].copy()
    parts, offset = [], 0
    for size in here:
        parts.append(memory[offset : offset + size])
        offset += size
    ends = np.cumsum([1000, *there])
    places = [(first, last - first) for first, last in pairwise(ends.tolist())]
    found = list(pieces(parts, places))
    first = memory.ctypes.data
    assert [address - first for address, _, _ in found] == [address - 1000 for _, address, _ in found]
    assert sum(size for _, _, size in found) == sum(here)
    assert [one[1] for one in found] == list(np.cumsum([1000, *(size for _, _, size in found)])[:-1])
    with pytest.raises(TransferFailed):
        list(pieces(parts, [*places, (0, 1)]))


@given(st.lists(st.integers(1, 30), max_size=20))
@settings(max_examples=40)
def test_runs_are_the_pages_in_order(pages: list[int]) -> None:
    assert [page for first, count in runs(pages) for page in range(first, first + count)] == pages


def test_groups_are_of_a_page_at_least_and_no_larger_than_agreed() -> None:
    assert list(groups([5, 6, 7], pages_module.GROUP_BYTES // 2)) == [[5, 6], [7]]
    assert list(groups([5, 6], 1 << 40)) == [[5], [6]]


def test_forms_differ_where_a_byte_would_mean_something_else() -> None:
    form = Form.of(CAPACITY, "layout")
    assert form.difference(Form.of(CAPACITY, "layout")) == ""
    for field in Form.__struct_fields__:
        other = Form(*(getattr(form, name) if name != field else 8 for name in Form.__struct_fields__))
        assert form.difference(other).startswith(field)
    assert HostPages(form, [np.zeros((5, 8), np.uint8)]).num_blocks == 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pigeon", "must be auto, or some of shm, nixl, tcp, each once"),
        ("tcp,tcp", "must be auto, or some of shm, nixl, tcp, each once"),
        ("", "must be auto, or some of shm, nixl, tcp, each once"),
    ],
)
def test_a_transport_that_is_none_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve(WorkerConfig, "worker", {"transfer_by": text}, environ={})


def test_nixl_is_used_where_it_is_installed_and_has_a_network_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.transfer.transports.is_installed", lambda: False)
    assert transports_of(WorkerConfig()) == ("shm", "tcp")
    with pytest.raises(ConfigError, match="NIXL, which is not installed"):
        resolve(WorkerConfig, "worker", {"transfer_by": "nixl"}, environ={})
    monkeypatch.setattr("worker.transfer.transports.is_installed", lambda: True)
    monkeypatch.setattr("worker.transfer.transports.has_rdma", lambda: False)
    assert transports_of(WorkerConfig()) == ("shm", "tcp")
    assert transports_of(WorkerConfig(transfer_by="nixl,tcp")) == ("nixl", "tcp")
    monkeypatch.setattr("worker.transfer.transports.has_rdma", lambda: True)
    assert transports_of(WorkerConfig()) == ("shm", "nixl", "tcp")
    assert transports_of(WorkerConfig(simulate=True)) == ("shm", "tcp")
    assert transports_of(WorkerConfig(transfer_by="tcp,shm")) == ("tcp", "shm")


def test_a_machine_with_rdma_has_a_device_of_it(tmp_path: Path) -> None:
    assert not has_rdma(tmp_path / "none") and not has_rdma(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma(tmp_path)
