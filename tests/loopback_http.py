"""A client for what tests ask of services on this machine, and what others that they make are made with.

httpx reads the machine's list of certificate authorities for every client, and makes a client for every `httpx.get`:
20 ms of CPU, with which a test that polls would keep a core from what it waits for.
"""

from __future__ import annotations

import ssl

import httpx

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""``verify`` of a client that speaks HTTP only: no server's certificate is trusted."""

# No connection is kept: none is left open when a service ends, and each request finds a service that was started anew.
HTTP = httpx.Client(
    verify=NO_AUTHORITIES,
    trust_env=False,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)
"""For any thread. Like :mod:`httpx` itself: a URL each time, and five seconds unless said otherwise."""
