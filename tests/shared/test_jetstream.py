"""The key that holds the scheduler's lease, on a real NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from mesh_stack import until
from nats_cluster import nats_cluster

from headrace.nats_server import embedded_nats, find_nats_server
from shared.bus import NatsBus
from shared.config import MeshConfig
from shared.jetstream import Conflict, JetStreamKey, KeyStore, NoStore, StoreUnavailable
from shared.subjects import LEASE_BUCKET, Subjects

KEY = Subjects("m").lease_key


def on_nats(scenario: Callable[[NatsBus, KeyStore], Awaitable[None]]) -> None:
    async def body() -> None:
        bus = await NatsBus.join(MeshConfig(nats=nats.url, nats_password=nats.passwords["scheduler"]), "scheduler", "s")
        try:
            store = bus.key(LEASE_BUCKET, KEY, 5.0)
            await store.open()
            await scenario(bus, store)
        finally:
            await bus.close()

    with embedded_nats(users=True) as nats:
        asyncio.run(asyncio.wait_for(body(), 60))


def test_only_whoever_has_seen_the_last_revision_writes() -> None:
    async def scenario(bus: NatsBus, store: KeyStore) -> None:
        assert await store.read() is None
        first = await store.write(b"a", 0)
        assert await store.read() == (b"a", first)
        for stale in (0, first + 1):
            with pytest.raises(Conflict):
                await store.write(b"b", stale)
        second = await store.write(b"b", first)
        assert second > first
        with pytest.raises(Conflict):
            await store.write(b"c", first)
        assert await store.read() == (b"b", second)
        other = bus.key(LEASE_BUCKET, "other-mesh", 5.0)
        await other.open()  # of the same bucket, which is there
        await other.write(b"x", 0)
        assert await store.read() == (b"b", second)

    on_nats(scenario)


def test_a_bucket_that_was_lost_is_made_again() -> None:
    async def body() -> None:
        bus = await NatsBus.connect(nats.url, "test", nats.token)
        store = bus.key(LEASE_BUCKET, KEY, 5.0)
        await store.open()
        revision = await store.write(b"a", 0)
        await bus._client.jetstream().delete_key_value(LEASE_BUCKET)
        assert await store.read() is None
        with pytest.raises(Conflict):
            await store.write(b"b", revision)
        assert await store.read() is None
        revision = await store.write(b"b", 0)
        assert await store.read() == (b"b", revision)
        await bus._client.jetstream().delete_key_value(LEASE_BUCKET)
        with pytest.raises(Conflict):  # once: it cannot be told from a bucket that others have written to
            await store.write(b"c", 0)
        await store.write(b"c", 0)
        await bus.close()

    with embedded_nats() as nats:
        asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("kind", ["gateway", "worker", "observer"])
def test_no_other_service_reads_or_writes_it(kind: str) -> None:
    async def body() -> None:
        mine = MeshConfig(nats=nats.url, nats_password=nats.passwords["scheduler"])
        scheduler = await NatsBus.join(mine, "scheduler", "s")
        store = scheduler.key(LEASE_BUCKET, KEY, 5.0)
        await store.open()
        revision = await store.write(b"mine", 0)
        theirs = MeshConfig(nats=nats.url, nats_password=nats.passwords[kind])
        other = await NatsBus.join(theirs, kind, "o")
        reached = other.key(LEASE_BUCKET, KEY, 0.3)
        with pytest.raises(StoreUnavailable):
            await reached.write(b"forged", revision)
        with pytest.raises(StoreUnavailable):
            await reached.read()
        await other.publish(f"$KV.{LEASE_BUCKET}.{KEY}", b"forged")
        await other.flush()
        assert await store.read() == (b"mine", revision)
        await other.close()
        await scheduler.close()

    with embedded_nats(users=True) as nats:
        asyncio.run(asyncio.wait_for(body(), 60))


@contextlib.contextmanager
def bare_server(folder: Path) -> Iterator[str]:
    """A NATS server without JetStream; yields its URL."""
    command = [find_nats_server(), "--addr", "127.0.0.1", "--port", "-1", "--ports_file_dir", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def announced() -> list[Path]:
        return [path for path in folder.glob("*.ports") if path.stat().st_size]

    try:
        asyncio.run(until(announced, "the port"))
        yield str(json.loads(announced()[0].read_text())["nats"][0])
    finally:
        process.terminate()
        process.wait(10)


def test_a_server_without_jetstream_is_one_clear_line(tmp_path: Path) -> None:
    async def body(url: str) -> None:
        bus = await NatsBus.connect(url, "test")
        with pytest.raises(NoStore, match=r"has no JetStream.*--jetstream") as error:
            await bus.key(LEASE_BUCKET, KEY, 5.0).open()
        assert "\n" not in str(error.value)
        await bus.close()

    with bare_server(tmp_path) as url:
        asyncio.run(body(url))


def test_a_store_that_does_not_answer_is_one_clear_line() -> None:
    async def body() -> None:
        gateway = await NatsBus.join(
            MeshConfig(nats=nats.url, nats_password=nats.passwords["gateway"]), "gateway", "g"
        )  # fmt: skip
        with pytest.raises(NoStore, match="does not answer"):
            await JetStreamKey(gateway._client, LEASE_BUCKET, KEY, 0.1, open_s=0.2).open()
        await gateway.close()

    with embedded_nats(users=True) as nats:
        asyncio.run(asyncio.wait_for(body(), 60))


def test_while_nats_is_away_nothing_hangs() -> None:
    async def body() -> None:
        with embedded_nats() as nats:
            bus = await NatsBus.connect(nats.url, "test", nats.token)
            store = bus.key(LEASE_BUCKET, KEY, 5.0)
            await store.open()
            revision = await store.write(b"a", 0)
        await until(lambda: not bus.connected, "the connection to be seen as lost")
        with pytest.raises(StoreUnavailable):
            await store.read()
        with pytest.raises(StoreUnavailable):
            await store.write(b"b", revision)
        await bus.close()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_cluster_keeps_three_copies_and_does_without_one_server() -> None:
    async def body() -> None:
        bus = await NatsBus.connect(cluster.url, "test", cluster.token)
        store = bus.key(LEASE_BUCKET, KEY, 2.0)
        await store.open()
        revision = await store.write(b"a", 0)
        info = await bus._client.jetstream().stream_info(f"KV_{LEASE_BUCKET}")
        assert info.config.num_replicas == 3
        cluster.kill(cluster.ports.index(bus._client.connected_url.port))  # type: ignore[union-attr, arg-type]

        async def read() -> tuple[bytes, int] | None:
            while True:
                try:
                    return await store.read()
                except StoreUnavailable:
                    await asyncio.sleep(0.1)

        assert await asyncio.wait_for(read(), 60) == (b"a", revision)
        await bus.close()

    with nats_cluster() as cluster:
        cluster.wait_for_a_leader()
        asyncio.run(asyncio.wait_for(body(), 120))
