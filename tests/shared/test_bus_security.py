"""Who may say and hear what on a real NATS server, and TLS to it. Every secret and certificate is made here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Certificate, make_certificate

from headrace.nats_server import NatsServer, authorization, embedded_nats, find_nats_server
from shared.bus import BusUnavailable, NatsBus, NoResponder
from shared.config import MeshConfig
from shared.subjects import LEASE_BUCKET, OBSERVER, SERVICE_KINDS, Subjects, inbox_prefix

S = Subjects("m")
FOREIGN_INBOX = f"{inbox_prefix('gateway')}.someone-elses.1"

# Every subject of a mesh: who may publish there, who may subscribe.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    S.submit("model", 1): ({"gateway"}, {"scheduler"}),
    S.cancel(1): ({"gateway"}, {"scheduler"}),
    S.step("w"): ({"scheduler"}, {"worker"}),
    S.result(1): ({"worker"}, {"scheduler"}),
    S.tokens("g"): ({"scheduler", "worker"}, {"gateway"}),
    S.answered: ({"gateway"}, {"scheduler"}),
    S.event("g"): ({"scheduler"}, {"gateway"}),
    S.beat("gateway", "g"): ({"gateway"}, {"scheduler"}),
    S.beat("scheduler", "s"): ({"scheduler"}, {"gateway", "scheduler"}),
    S.beat("worker", "w"): ({"worker"}, {"scheduler"}),
    S.roll_call: ({"scheduler"}, {"gateway", "scheduler", "worker"}),
    FOREIGN_INBOX: ({"scheduler"}, {"gateway"}),
    f"$KV.{LEASE_BUCKET}.m": ({"scheduler"}, set()),
    f"$JS.API.STREAM.INFO.KV_{LEASE_BUCKET}": ({"scheduler"}, set()),
    f"$JS.API.STREAM.CREATE.KV_{LEASE_BUCKET}": ({"scheduler"}, set()),
    f"$JS.API.STREAM.MSG.GET.KV_{LEASE_BUCKET}": ({"scheduler"}, set()),
    f"$JS.API.STREAM.DELETE.KV_{LEASE_BUCKET}": (set(), set()),
    f"$JS.API.STREAM.PURGE.KV_{LEASE_BUCKET}": (set(), set()),
    "$JS.API.STREAM.CREATE.KV_other": (set(), set()),
    f"{inbox_prefix('scheduler')}.someone-elses.1": (set(), {"scheduler"}),
    "elsewhere": (set(), set()),
    "$SYS.REQ.SERVER.PING": (set(), set()),
}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with embedded_nats(users=True) as nats:
        yield nats


def config(server: NatsServer, kind: str) -> MeshConfig:
    return MeshConfig(nats=server.url, nats_password=server.passwords[kind], mesh="m")


@pytest.mark.parametrize("kind", [*SERVICE_KINDS, OBSERVER])
def test_each_service_has_the_subjects_that_it_needs_and_no_other(server: NatsServer, kind: str) -> None:
    async def scenario() -> tuple[set[str], set[str]]:
        bus = await NatsBus.join(config(server, kind), kind, "test")
        errors: list[str] = []
        arriving: asyncio.Queue[str] = asyncio.Queue()

        async def on_error(error: Exception) -> None:
            arriving.put_nowait(str(error).lower())

        bus._client._error_cb = on_error

        def refused(doing: str, subject: str) -> bool:
            return any(f'permissions violation for {doing} to "{subject}"'.lower() in error for error in errors)

        async def all_refusals(doing: str) -> None:
            while not refused(doing, "last.of.all"):  # refusals come in order
                errors.append(await asyncio.wait_for(arriving.get(), 10))

        for subject in (*TABLE, "last.of.all"):
            await bus.publish(subject, b"x")
        await all_refusals("publish")
        published = {subject for subject in TABLE if not refused("publish", subject)}
        for subject in (*TABLE, "last.of.all"):
            await bus.subscribe(subject, lambda payload, reply: None)
        await all_refusals("subscription")
        heard = {subject for subject in TABLE if not refused("subscription", subject)}
        await bus.close()
        return published, heard

    published, heard = asyncio.run(scenario())
    mesh = {subject for subject in TABLE if subject.startswith("headrace.")}
    assert published == {subject for subject, (publishers, _) in TABLE.items() if kind in publishers}
    assert heard == (mesh if kind == OBSERVER else {s for s, (_, subscribers) in TABLE.items() if kind in subscribers})


def test_a_gateway_cannot_play_scheduler_to_a_worker(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[bytes]:
        worker = await NatsBus.join(config(server, "worker"), "worker", "w")
        gateway = await NatsBus.join(config(server, "gateway"), "gateway", "g")
        scheduler = await NatsBus.join(config(server, "scheduler"), "scheduler", "s")
        got: list[bytes] = []
        arrived = asyncio.Event()
        await worker.subscribe(S.step("w"), lambda payload, _: (got.append(payload), arrived.set())[0])
        await worker.flush()
        await gateway.publish(S.step("w"), b"forged")
        await gateway.flush()
        await scheduler.publish(S.step("w"), b"true")
        await asyncio.wait_for(arrived.wait(), 10)
        for bus in (worker, gateway, scheduler):
            await bus.close()
        return got

    assert asyncio.run(scenario()) == [b"true"]
    assert "permissions violation" in caplog.text.lower()


def test_a_request_is_answered_under_these_permissions(server: NatsServer) -> None:
    async def scenario() -> bytes:
        gateway = await NatsBus.join(config(server, "gateway"), "gateway", "g")
        scheduler = await NatsBus.join(config(server, "scheduler"), "scheduler", "s")
        with pytest.raises(NoResponder):
            await gateway.request(S.submit("model", 1), b"nobody", 5)
        replies: list[asyncio.Task[None]] = []

        def answer(payload: bytes, reply: str) -> None:
            assert reply.startswith(inbox_prefix("gateway") + ".")
            replies.append(asyncio.ensure_future(scheduler.publish(reply, payload + b"!")))

        await scheduler.subscribe(S.submit_all(1), answer)
        await scheduler.flush()
        async with asyncio.timeout(20):
            while True:
                try:
                    answered = await gateway.request(S.submit("model", 1), b"hello", 5)
                    break
                except NoResponder:  # the server may go on for a moment with what it found for the first request
                    await asyncio.sleep(0.01)
        await gateway.close()
        await scheduler.close()
        return answered

    assert asyncio.run(scenario()) == b"hello!"


def test_nobody_comes_in_with_anothers_password_or_none(server: NatsServer) -> None:
    for attempt in (
        MeshConfig(nats=server.url, nats_user="worker", nats_password=server.passwords["gateway"]),
        MeshConfig(nats=server.url, nats_token=server.passwords["gateway"]),
        MeshConfig(nats=server.url),
    ):
        with pytest.raises(BusUnavailable):
            asyncio.run(_join(attempt, "gateway"))


async def _join(mesh: MeshConfig, kind: str) -> None:
    bus = await NatsBus.connect(
        mesh.nats, "test", mesh.nats_token, 0.8, user=mesh.nats_user or kind, password=mesh.nats_password,
        ca=mesh.nats_ca, inbox=inbox_prefix(kind),
    )  # fmt: skip
    await bus.flush()
    await bus.close()


# --- TLS --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@contextlib.contextmanager
def tls_server(folder: Path, certificate: Certificate) -> Iterator[int]:
    """A NATS server that takes TLS only; yields its port."""
    tls = {"cert_file": str(certificate.cert), "key_file": str(certificate.key)}
    text = f"listen: 127.0.0.1:-1\nports_file_dir: {json.dumps(str(folder))}\ntls {json.dumps(tls)}\n"
    (folder / "nats.conf").write_text(text + authorization({"gateway": "g-pw"}))
    command = [find_nats_server(), "--config", folder / "nats.conf"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _announced(folder)
    finally:
        process.terminate()
        process.wait(10)


def _announced(folder: Path) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for path in folder.glob("*.ports"):
            with contextlib.suppress(ValueError, KeyError):  # being written just now
                return int(json.loads(path.read_text())["nats"][0].rsplit(":", 1)[1])
        time.sleep(0.01)
    raise AssertionError("the server did not start")


def test_tls_with_ones_own_ca(tmp_path: Path, certificate: Certificate) -> None:
    with tls_server(tmp_path, certificate) as port:
        for scheme in ("tls", "nats"):
            mesh = MeshConfig(nats=f"{scheme}://127.0.0.1:{port}", nats_password="g-pw", nats_ca=str(certificate.ca))
            asyncio.run(_join(mesh, "gateway"))


def test_a_certificate_of_an_unknown_ca_or_for_another_host_is_refused(
    tmp_path: Path, certificate: Certificate
) -> None:
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other", names="DNS:elsewhere.example")
    with tls_server(tmp_path, certificate) as port:
        for ca in ("", str(other.ca)):
            mesh = MeshConfig(nats=f"tls://127.0.0.1:{port}", nats_password="g-pw", nats_ca=ca)
            with pytest.raises(BusUnavailable, match="certificate"):
                asyncio.run(_join(mesh, "gateway"))
    with tls_server(tmp_path / "other", other) as port:
        mesh = MeshConfig(nats=f"tls://127.0.0.1:{port}", nats_password="g-pw", nats_ca=str(other.ca))
        with pytest.raises(BusUnavailable, match="certificate"):
            asyncio.run(_join(mesh, "gateway"))


@pytest.mark.parametrize("options", [{"scheme": "tls"}, {"scheme": "nats", "ca": True}])
def test_credentials_are_never_sent_in_the_clear_where_tls_was_asked_for(
    options: dict[str, object], certificate: Certificate
) -> None:
    """Somebody in the middle answers for the server, without TLS."""

    async def scenario() -> bytes:
        seen = bytearray()

        async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'INFO {"server_id":"x","version":"2.11.0","max_payload":1048576,"auth_required":true}\r\n')
            await writer.drain()
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1000):
                    seen.extend(data)
            writer.close()

        middle = await asyncio.start_server(plain, "127.0.0.1", 0)
        port = middle.sockets[0].getsockname()[1]
        ca = str(certificate.ca) if options.get("ca") else ""
        with pytest.raises(BusUnavailable, match="TLS"):
            await NatsBus.connect(
                f"{options['scheme']}://127.0.0.1:{port}", "test", "s3cret", 0.8, user="gateway", password="s3cret",
                ca=ca,
            )  # fmt: skip
        middle.close()
        await middle.wait_closed()
        return bytes(seen)

    assert b"s3cret" not in asyncio.run(scenario())


def test_a_bad_ca_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for ca in (tmp_path / "ca.pem", tmp_path / "none.pem"):
        with pytest.raises(BusUnavailable, match=r"--nats-ca") as error:
            asyncio.run(NatsBus.connect("tls://127.0.0.1:9", "test", ca=str(ca)))
        assert "\n" not in str(error.value)
