"""An S3 server on loopback for tests, which fails as it is told to."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

BUCKET = "bucket"
SERVER_ERROR = "500 Internal Server Error"
Answer = Callable[..., Any]


class Server:
    """moto's S3 behind a door that lets faults in. `fault`: called with method and path of every request of the test's
    own (those of others may live on, and would take its faults); what it returns is done to it: "500", "403", "hang"
    (no answer for `HANG` seconds), "torn" (half of the body is stored, and the answer is a success), "lost" (it is
    served, and the answer is a 500).
    """

    HANG = 3.0
    deaf = False  # to the condition of a conditional put
    home = f"s3://{BUCKET}"  # a test's own part

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel("ERROR")
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.asker = ""  # how the last one showed who it is
        self._behind = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()  # moto looks whether there is a key, and then puts one
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        urlopen(Request(f"{self.url}/{BUCKET}", method="PUT")).close()

    @property
    def environment(self) -> dict[str, str]:
        """What a client of any kind needs to know."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": self.url}

    @property
    def asked(self) -> int:
        """Requests for files below `home`, not for lists of them."""
        return sum(f"/{BUCKET}/{self._below}" in f"{path}/" for _, path in self.requests)

    @property
    def _below(self) -> str:
        """What the names of all that lies below `home` have in them."""
        return self.home.removeprefix(f"s3://{BUCKET}").lstrip("/") + "/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def failing(self, fault: Callable[[str, str], str | None]) -> Iterator[None]:
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda method, path: None

    def _serve(self, environ: dict[str, Any], start_response: Answer) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        what = None
        if self._below in f"{path}/{unquote(environ.get('QUERY_STRING', ''))}/":
            self.asker = environ.get("HTTP_AUTHORIZATION", "")
            what = self.fault(method, path)
        if what == "hang":
            time.sleep(self.HANG)
        if what in ("500", "403", "hang"):
            return _failed(start_response, "403 Forbidden" if what == "403" else SERVER_ERROR)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if self.deaf:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if what == "torn":
            body = body[: len(body) // 2]
            environ["CONTENT_LENGTH"] = str(len(body))
        environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            answer = list(self._behind(environ, _ignored if what == "lost" else start_response))
        return _failed(start_response) if what == "lost" else answer


def _failed(start_response: Answer, status: str = SERVER_ERROR) -> list[bytes]:
    start_response(status, [("Content-Length", "0")])
    return []


def _ignored(*_: Any, **__: Any) -> Callable[[bytes], object]:
    return lambda _: None
