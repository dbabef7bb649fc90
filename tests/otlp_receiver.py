"""A real OTLP/HTTP receiver for tests: collects every span that is exported to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """``spans`` are protobuf spans; ``services`` maps a span id to its resource's service.name."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: dict[bytes, str] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    name = attributes(resource.resource)["service.name"]
                    for scope in resource.scope_spans:
                        receiver.services.update((span.span_id, name) for span in scope.spans)
                        receiver.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource as a dict."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes}
