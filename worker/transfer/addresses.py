"""Where a worker's KV blocks can be fetched from: ``scheme://place/key``, told in its beats and parsed here."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from worker.transfer.wire import KEY_BYTES


class Address(NamedTuple):
    scheme: str
    place: str  # host:port, or the name of a socket
    key: str  # shown to the source: known to whoever hears beats

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}/{self.key}"


def parse(text: str) -> Address:
    """Raises ValueError if it is none."""
    scheme, separator, rest = text.partition("://")
    place, slash, key = rest.rpartition("/")
    if not (scheme and separator and place and slash) or len(key.encode()) != KEY_BYTES:
        raise ValueError(f"{text!r} is no address of KV blocks")
    return Address(scheme, place, key)


def host_and_port(place: str) -> tuple[str, int]:
    """Raises ValueError."""
    parts = urlsplit(f"//{place}")
    if not parts.hostname or not parts.port:
        raise ValueError(f"{place!r} is no host:port")
    return parts.hostname, parts.port


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether a socket bound to ``host`` listens on all of the machine's addresses."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def family_of(host: str) -> socket.AddressFamily:
    """Of the addresses that a socket bound to the wildcard ``host`` listens on: that of IPv6 takes both."""
    return socket.AF_UNSPEC if not host or ipaddress.ip_address(host).version == 6 else socket.AF_INET


def address_towards(nats: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """This machine's address on the way to the first of the NATS servers: others of the mesh are on that way too.

    Nothing is sent. Raises OSError if there is no way.
    """
    url = urlsplit(nats.split(",")[0].strip())
    found = socket.getaddrinfo(url.hostname, url.port or 4222, family, socket.SOCK_DGRAM)
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise OSError(f"no way to {url.hostname}")
