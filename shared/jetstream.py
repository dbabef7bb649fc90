"""One key in a JetStream key-value bucket, written by compare-and-swap only: where the scheduler's lease is kept.

No time-to-live, no watching, no consumer: these are where JetStream and its clients differ from release to release.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

RETRY_S = 0.2
CLUSTER_REPLICAS = 3

_NO_JETSTREAM = "the NATS server has no JetStream, which keeps the scheduler's lease: start it with --jetstream"
_OFF = (None, 10039, 10076)  # JetStream's error codes: nobody listens, not enabled for the account, not enabled


class StoreUnavailable(ConnectionError):
    """The store did not answer, or could not; whether a write was stored is unknown."""


class NoStore(StoreUnavailable):
    """There is none, and waiting does not help; the message is one line for whoever runs the server."""


class Conflict(Exception):
    """The key is not at the revision that the writer expected: nothing was written."""


class KeyStore(Protocol):
    """One key with compare-and-swap."""

    async def open(self) -> None:
        """Make sure that there is a store; raises :class:`NoStore`."""

    async def read(self) -> tuple[bytes, int] | None:
        """(value, revision), or None if there is no such key. Raises :class:`StoreUnavailable`."""

    async def write(self, value: bytes, expected: int) -> int:
        """The new revision. ``expected`` is the revision to replace, 0 for none.

        Raises :class:`Conflict` or :class:`StoreUnavailable`.
        """


class JetStreamKey:
    """``timeout_s`` is that of one request to the store; :meth:`open` tries for ``open_s``."""

    def __init__(self, client: Client, bucket: str, key: str, timeout_s: float, open_s: float = 20.0) -> None:
        self._client = client
        self._bucket = bucket
        self._key = key
        self._open_s = open_s
        self._js = client.jetstream(timeout=timeout_s)
        # As KeyValue's own factory makes it, but without asking the server: the bucket may be lost and made again.
        self._kv = KeyValue(bucket, f"KV_{bucket}", f"$KV.{bucket}.", self._js, direct=False)

    async def open(self) -> None:
        deadline = time.monotonic() + self._open_s
        while True:
            try:
                await self._make_bucket()
                return
            except NoStore:
                raise
            except StoreUnavailable as error:
                if time.monotonic() > deadline:
                    raise NoStore(f"JetStream does not answer within {self._open_s:g} s ({error})") from None
                await asyncio.sleep(RETRY_S)

    async def read(self) -> tuple[bytes, int] | None:
        try:
            entry = await self._kv.get(self._key)
        except nats.js.errors.NotFoundError:  # of the key, or of the whole bucket
            return None
        except (nats.errors.Error, TimeoutError) as error:
            raise _unavailable(error) from None
        return entry.value or b"", entry.revision or 0

    async def write(self, value: bytes, expected: int) -> int:
        try:
            if expected:
                return await self._kv.update(self._key, value, last=expected)
            return await self._kv.create(self._key, value)
        except (nats.js.errors.KeyWrongLastSequenceError, nats.js.errors.NotFoundError) as error:
            raise Conflict(str(error)) from None
        except nats.js.errors.NoStreamResponseError:  # the bucket is lost: what was expected is no longer so
            await self._make_bucket()
            raise Conflict("the bucket was lost") from None
        except (nats.errors.Error, TimeoutError) as error:
            raise _unavailable(error) from None

    async def _make_bucket(self) -> None:
        """Idempotent; one that exists stays as it is."""
        clustered = bool(self._client._server_info.get("cluster"))
        config = KeyValueConfig(
            self._bucket, description="leases of Headrace's schedulers", max_value_size=4096, history=1,
            max_bytes=1 << 20, storage=StorageType.FILE, replicas=CLUSTER_REPLICAS if clustered else 1,
        )  # fmt: skip
        try:
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await self._js.stream_info(f"KV_{self._bucket}")
                return
            await self._js.create_key_value(config)
        except nats.js.errors.ServiceUnavailableError as error:
            if error.err_code in _OFF:
                raise NoStore(_NO_JETSTREAM) from None
            raise _unavailable(error) from None
        except (nats.errors.Error, TimeoutError) as error:
            raise _unavailable(error) from None


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(str(error) or type(error).__name__)
