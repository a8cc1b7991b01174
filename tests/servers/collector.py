"""A collector of OpenTelemetry that keeps what it gets: OTLP over HTTP, as the protocol has it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """``spans`` are (service, span), in the order in which they came."""

    url: str
    spans: list[tuple[str, Span]] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def until(self, enough: Callable[[list[tuple[str, Span]]], bool], timeout_s: float) -> None:
        """Wait until what has come is enough; fail with the names of what has."""
        with self.came:
            found = self.came.wait_for(lambda: enough(self.spans), timeout_s)
            assert found, sorted({(service, span.name) for service, span in self.spans})


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Serve on a port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path != "/v1/traces":
                self.send_error(404)
                return
            with collector.came:
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    about = {
                        one.key: one.value.string_value for one in resource.resource.attributes
                    }
                    for scope in resource.scope_spans:
                        collector.spans += [(about["service.name"], span) for span in scope.spans]
                collector.came.notify_all()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield collector
        server.shutdown()
