"""Spans, sent by the real exporter to a collector of ours."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from running import running_service

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(BaseHTTPRequestHandler):
    spans: list[Span] = []  # noqa: RUF012 - shared by all requests on purpose

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.spans.extend(span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_request_is_a_span_below_its_callers(tiny_folder: Path, tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with running_service(
        tmp_path / "log",
        "--model",
        str(tiny_folder),
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
        OTEL_BSP_SCHEDULE_DELAY="200",
    ) as running:
        body = {"prompt": [1, 2], "completions": [[3], [4]]}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        httpx.post(running.url + "/logprobs", json=body, headers=headers, timeout=30)
        deadline = time.monotonic() + 20
        while not (found := [span for span in Collector.spans if span.trace_id.hex() == TRACE]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    server.shutdown()
    server.server_close()
    (span,) = found
    attributes = {a.key: a.value.string_value or a.value.int_value or a.value.double_value for a in span.attributes}

    assert span.parent_span_id.hex() == PARENT
    assert span.name == "POST /logprobs"
    assert attributes["http.response.status_code"] == 200
    assert attributes["logprobd.request_id"] == "mine"
    assert (attributes["logprobd.sequences"], attributes["logprobd.tokens"]) == (2, 4)
    assert 0 < attributes["logprobd.forward_seconds"] < 30


def test_without_its_variables_nothing_is_sent(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder)) as running:
        assert running.post({"prompt": [1, 2], "completions": [[3]]}).status_code == 200
        assert "OTLP" not in running.log
        assert "opentelemetry" not in running.log
