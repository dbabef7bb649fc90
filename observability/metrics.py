"""The metrics listener of a service: its own loopback port, so that API keys and clients never meet it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server


class MetricsListener:
    """Serves ``/metrics`` of one registry from a thread. Port 0 takes a free one; ``port`` tells which."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
