"""Who may use this gateway: API keys, as digests in a TOML file that is read again when it changes.

Keys are random (``headrace keys new``), so a plain SHA-256 is enough at rest: there is nothing to guess that a slow
hash would protect. A presented key is hashed too and looked up by its digest: no key is ever compared with another, so
no time that anything takes tells how much of a guess was right.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("headrace.gateway")

POLL_S = 1.0
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 4 * 1024 * 1024  # tens of thousands of keys
MAX_REASON_CHARS = 300  # of what is said of a file
MAX_WEIGHT = 10_000
MAX_PER_MINUTE = 10**12
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class KeysError(ValueError):
    """A keys file that cannot be used; the message is one line and quotes no digest."""


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry. Bounds of 0 are none."""

    id: str  # for people, logs and limits; no secret
    tenant: str = ""  # whose share of the workers its requests use
    weight: int = 100  # of the tenant: percent of a normal tenant's share
    priority: int = 0  # of its requests; they may ask for a higher number, which is less urgent, never for a lower one
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrency: int = 0  # requests at once

    def priority_of(self, asked: int | None) -> int:
        return self.priority if asked is None else max(self.priority, asked)


def digest_of(key: str) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def parse_keys(text: str) -> dict[bytes, ApiKey]:
    """The entries of a keys file by the digest of their key. Raises :class:`KeysError`."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise KeysError("no valid TOML: nested too deeply") from None
    except ValueError as error:  # a number of too many digits is no TOMLDecodeError
        raise KeysError(f"no valid TOML: {error}") from None
    entries = tables.pop("key", [])
    if tables:
        raise KeysError(f"unknown key {next(iter(tables))!r}; entries are written under [[key]]")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise KeysError("entries are written under [[key]]")
    keys: dict[bytes, ApiKey] = {}
    seen: set[str] = set()
    for place, entry in enumerate(entries, 1):
        digest, key = _entry(entry, f"entry {place}")
        if key.id in seen or digest in keys:
            raise KeysError(f"entry {place}: the {'id' if key.id in seen else 'key'} of {key.id!r} is there twice")
        seen.add(key.id)
        keys[digest] = key
    weights: dict[str, int] = {}
    for key in keys.values():
        if weights.setdefault(key.tenant, key.weight) != key.weight:
            raise KeysError(f"the keys of tenant {key.tenant!r} have different weights")
    return keys


def _entry(entry: Mapping[str, Any], where: str) -> tuple[bytes, ApiKey]:
    known = {"sha256", *(field.name for field in dataclasses.fields(ApiKey))}
    for name in entry:
        if name not in known:
            raise KeysError(f"{where}: unknown key {name!r}")
    key_id = entry.get("id")
    if not isinstance(key_id, str) or not _NAME.fullmatch(key_id):
        raise KeysError(f"{where}: 'id' must be 1 to 64 of A-Z a-z 0-9 . _ : @ / -")
    where = f"{where} ({key_id})"
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise KeysError(f"{where}: 'sha256' must be 64 hexadecimal digits; headrace keys hash makes them")
    tenant = entry.get("tenant", key_id)
    if not isinstance(tenant, str) or not _NAME.fullmatch(tenant):
        raise KeysError(f"{where}: 'tenant' must be 1 to 64 of A-Z a-z 0-9 . _ : @ / -")
    return bytes.fromhex(digest), ApiKey(
        key_id,
        tenant,
        _number(entry, "weight", 100, 1, MAX_WEIGHT, where),
        _number(entry, "priority", 0, -100, 100, where),
        _number(entry, "requests_per_minute", 0, 0, MAX_PER_MINUTE, where),
        _number(entry, "tokens_per_minute", 0, 0, MAX_PER_MINUTE, where),
        _number(entry, "max_concurrency", 0, 0, MAX_PER_MINUTE, where),
    )


def _number(entry: Mapping[str, Any], name: str, default: int, low: int, high: int, where: str) -> int:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise KeysError(f"{where}: {name!r} must be an integer from {low} to {high}")
    return value


class Keyring:
    """The keys in force: those of a file, and one given by an option. Without either, everybody may come in."""

    def __init__(self, file: str = "", single: str = "") -> None:
        """Raises :class:`KeysError` if the file cannot be used: a gateway must not start open, or shut, by mistake."""
        self._path = _path(file) if file else None
        self._single = {digest_of(single): ApiKey("api-key")} if single else {}
        self._version: object = None
        self._keys: dict[bytes, ApiKey] = dict(self._single)
        if self._path is not None:
            self._version = _version(self._path)
            self._keys = self._read(self._path)

    @property
    def required(self) -> bool:
        return self._path is not None or bool(self._single)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The entry of a key, or None. What the look-up's time depends on is a digest, which nobody can steer."""
        return self._keys.get(digest_of(presented)) if 0 < len(presented) <= MAX_KEY_CHARS else None

    def refresh(self) -> bool:
        """Read the file again if it has changed: True if its keys are in force now. A bad one changes nothing.

        Nor does one without keys: an editor or a copy that is not done yet must not shut everybody out.
        """
        if self._path is None:
            return False
        version = _version(self._path)
        if version == self._version:
            return False
        self._version = version
        try:
            self._keys = self._read(self._path)
        except KeysError as error:
            log.error("the keys stay as they were: %s", error)
            return False
        log.info("%d API keys from %s are in force", len(self), self._path)
        return True

    async def watch_forever(self) -> None:
        """Look every second whether the file has changed."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.refresh)

    def _read(self, path: Path) -> dict[bytes, ApiKey]:
        """The keys in force with this file. Raises :class:`KeysError`, whatever lies there."""
        try:
            keys = parse_keys(_read_regular(path).decode("utf-8"))
            if not keys:
                raise KeysError("there are no keys in it")
            return keys | self._single
        except OSError as error:
            raise KeysError(f"{path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise KeysError(f"{path}: no UTF-8") from None
        except KeysError as error:
            raise KeysError(f"{path}: {str(error)[:MAX_REASON_CHARS]}") from None
        except Exception as error:  # noqa: BLE001 - nothing that a file holds may end a gateway that serves
            raise KeysError(f"{path}: it cannot be read ({type(error).__name__})") from None


def _path(file: str) -> Path:
    try:
        return Path(file).expanduser()
    except RuntimeError as error:  # ~nobody
        raise KeysError(f"{file}: {error}") from None


def _read_regular(path: Path) -> bytes:
    """The bytes of a regular file; a pipe or a device might keep the reader for ever, so it is not even waited for."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise KeysError("no regular file")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise KeysError(f"larger than {MAX_FILE_BYTES} bytes")
    return data


def _version(path: Path) -> object:
    """What differs once the file was written or replaced; None while it is not there."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # a name with a NUL
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
