"""A W&B server of the tests' own, on the loopback: what the pinned client says to a server, and no more.

It keeps what arrives, so that tests can compare it with the local files. An operation that it does not know
is answered with an error and kept in `unknown`: a new client that asks for something else is seen.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from wandb_answers import ANSWERS, Json, NotThereError, Store

API_KEY = "local" + "0" * 40
_STALL_S = 120.0
_OPERATION = re.compile(r"\b(?:query|mutation)\s+(\w+)")
_STREAM = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream")


class WandbServer(Store):
    """Holds runs, artifacts and views; `stall`, `refuse` and `close` are its ways to be out of order."""

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self.operations: list[str] = []
        self.arrived = threading.Condition()
        self._stalled = threading.Event()
        self._woken = threading.Event()
        self._after: dict[str, Callable[[], object]] = {}
        self._refusing: tuple[int, str] | None = None
        self._httpd = _Httpd(("127.0.0.1", 0), _Handler)
        self._httpd.wandb = self
        super().__init__(f"http://127.0.0.1:{self._httpd.server_port}")
        self._thread = threading.Thread(target=self._httpd.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stall(self, after: str | None = None) -> None:
        """Take requests and answer none from here on, or from the first answer to an operation on."""
        self._turn(self._stalled.set, after)

    def refuse(self, status: int, message: str, after: str | None = None) -> None:
        """Answer requests with an HTTP error from here on, or from the first answer to an operation on."""
        self._turn(lambda: setattr(self, "_refusing", (status, message)), after)

    def recover(self) -> None:
        """Refuse nothing from here on."""
        self._refusing = None

    def _turn(self, change: Callable[[], object], after: str | None) -> None:
        if after is None:
            change()
        else:
            self._after[after] = change

    def close(self) -> None:
        """Go away: requests that wait are dropped, new ones find no server."""
        self._woken.set()
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()

    def await_that(self, holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until something holds of what arrived."""
        with self.arrived:
            assert self.arrived.wait_for(holds, timeout_s), (self.operations, self.unknown)

    # What the handler calls -----------------------------------------------

    def out_of_order(self) -> tuple[int, str] | None:
        """Return the error to answer with; None where the request is to be served."""
        if self._stalled.is_set():
            self._woken.wait(_STALL_S)
            return 503, "stalled"
        return self._refusing

    def graphql(self, query: str, variables: Json) -> Json:
        """Answer one operation."""
        name = _OPERATION.search(query)
        operation = name.group(1) if name else query[:60]
        self.operations.append(operation)
        answer = ANSWERS.get(operation)
        if answer is None:
            self.unknown.append(f"{operation} {json.dumps(variables)[:400]}")
            return {"errors": [{"message": f"Unknown operation {operation}"}]}
        try:
            return {"data": answer(self, variables)}
        except NotThereError as error:
            return {"errors": [{"message": str(error)}], "data": None}
        finally:
            self._after.pop(operation, lambda: None)()

    def stream(self, run_id: str, said: Json) -> None:
        """Take in one message of a run's file stream."""
        run = self.runs[run_id]
        for name, chunk in (said.get("files") or {}).items():
            lines = (
                [json.loads(line) for line in chunk["content"]] if name.endswith((".json", ".jsonl")) else []
            )
            if name == "wandb-history.jsonl":
                run.history[chunk["offset"] :] = lines
            elif name == "wandb-summary.json":
                run.summary = lines[-1]
            elif name not in ("wandb-events.jsonl", "output.log"):
                self.unknown.append(f"file stream of {name}")
        if said.get("complete"):
            run.complete, run.exit_code = True, said.get("exitcode")

    def upload(self, path: str, body: bytes) -> None:
        """Take in one file; `path` is what an answer named as its upload URL."""
        _, kind, owner, name = path.split("/", 3)
        if kind == "upload-run":
            self.runs[owner].files[unquote(name)] = body
        elif kind == "upload-artifact":
            self.artifacts[int(owner)].files[unquote(name)] = body
        elif kind == "upload-manifest":
            self.artifacts[int(owner)].manifest = json.loads(body)
        else:
            self.unknown.append(f"PUT {path}")


def client_environment(home: Path, url: str) -> dict[str, str]:
    """Return what points the client of a user without an account to a server, rows sent every second."""
    return {
        "HOME": str(home),
        "NETRC": str(home / ".netrc"),
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": API_KEY,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1",
    }


@contextmanager
def serving() -> Iterator[WandbServer]:
    """Serve for as long as the context lasts; what the client asked that is not known here is a failure."""
    server = WandbServer()
    try:
        yield server
    finally:
        server.close()
    assert server.unknown == [], server.unknown


class _Httpd(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    wandb: WandbServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Httpd

    def _serve(self) -> None:
        wandb = self.server.wandb
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        failure = wandb.out_of_order()
        with wandb.arrived:
            status, answer = (
                self._answer(wandb, body) if failure is None else (failure[0], {"error": failure[1]})
            )
            wandb.arrived.notify_all()
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, wandb: WandbServer, body: bytes) -> tuple[int, Json]:
        stream = _STREAM.fullmatch(self.path)
        if self.path == "/graphql":
            said = json.loads(body)
            return 200, wandb.graphql(said["query"], said.get("variables") or {})
        if stream:
            wandb.stream(stream.group(3), json.loads(body))
            return 200, {}
        if self.path.startswith("/sdk/otel/"):
            return 404, {}  # the client's own telemetry
        if self.command == "PUT":
            wandb.upload(self.path, body)
            return 200, {}
        wandb.unknown.append(f"{self.command} {self.path}")
        return 404, {}

    do_GET = do_POST = do_PUT = _serve  # noqa: N815

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the client gave up, or the server went away
            super().handle()

    def log_message(self, format: str, *args: Any) -> None: ...
