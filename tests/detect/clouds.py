"""A metadata service as three clouds have it, on a port of this machine."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

TOKEN = "a-token"


class FakeCloud:
    """Answers what ``answers`` holds, by path; what a client did wrong is in ``refused``.

    ``tokens``: whether AWS wants one (version 2). ``broken``: every answer is an error of the server.
    """

    def __init__(self, *, tokens: bool = True) -> None:
        self.answers: dict[str, str] = {
            "/computeMetadata/v1/instance/preempted": "FALSE",
            "/metadata/scheduledevents": json.dumps({"DocumentIncarnation": 1, "Events": []}),
            "/metadata/instance/compute/name": "this-machine",
        }
        self.tokens = tokens
        self.token = TOKEN
        self.broken = False
        self.refused: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def preempt(self, cloud: str, *, within_s: float, resources: tuple[str, ...] = ("this-machine",)) -> None:
        moment = datetime.now(UTC) + timedelta(seconds=within_s)
        match cloud:
            case "aws":
                action = {"action": "terminate", "time": moment.strftime("%Y-%m-%dT%H:%M:%SZ")}
                self.answers["/latest/meta-data/spot/instance-action"] = json.dumps(action)
            case "gcp":
                self.answers["/computeMetadata/v1/instance/preempted"] = "TRUE"
            case "azure":
                event = {
                    "EventId": "1",
                    "EventType": "Preempt",
                    "ResourceType": "VirtualMachine",
                    "Resources": list(resources),
                    "EventStatus": "Scheduled",
                    "NotBefore": format_datetime(moment, usegmt=True),
                }
                document = {"DocumentIncarnation": 2, "Events": [event]}
                self.answers["/metadata/scheduledevents"] = json.dumps(document)

    def withdraw(self) -> None:
        """Azure takes its notice back."""
        self.answers["/metadata/scheduledevents"] = json.dumps({"DocumentIncarnation": 3, "Events": []})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                wish = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
                if self.path != "/latest/api/token" or not cloud.tokens:
                    self._answer(404, "")
                elif wish is None or not wish.isdecimal():
                    cloud.refused.append("no lifetime for the token")
                    self._answer(400, "")
                else:
                    self._answer(200, cloud.token)

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                wrong = self._wrong(path)
                if cloud.broken:
                    self._answer(503, "")
                elif wrong:
                    cloud.refused.append(wrong)
                    self._answer(401 if path.startswith("/latest") else 403, "")
                elif path in cloud.answers:
                    self._answer(200, cloud.answers[path])
                else:
                    self._answer(404, "")

            def _wrong(self, path: str) -> str:
                if path.startswith("/latest") and cloud.tokens:
                    return "" if self.headers.get("X-aws-ec2-metadata-token") == cloud.token else "no token"
                if path.startswith("/computeMetadata"):
                    return "" if self.headers.get("Metadata-Flavor") == "Google" else "no flavor"
                if path.startswith("/metadata"):
                    well = self.headers.get("Metadata") == "true" and "api-version=" in self.path
                    return "" if well else "no Metadata header, or no version"
                return ""

            def _answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                pass

        return Handler
