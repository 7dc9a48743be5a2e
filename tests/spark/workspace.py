"""A test double of a Databricks workspace: a real MLflow server behind a proxy that wants the workspace's token.

What it can't show: Unity Catalog's storage, quotas, and how a workspace renews tokens by itself. Its Unity Catalog has
no catalog but `main`, and takes no models.
"""

import contextlib
import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .conftest import mlflow_server


@dataclass(frozen=True)
class Request:
    """What the proxy was asked."""

    method: str
    path: str
    authorization: str
    body: str
    status: int


@dataclass
class Workspace:
    """Where it is, the token it takes, and what it was asked so far."""

    upstream: str
    token: str
    host: str = ""
    requests: list[Request] = field(default_factory=list)
    on_request: Callable[[Request], None] = lambda request: None

    def answer(self, method: str, path: str, authorization: str, body: bytes) -> tuple[int, bytes]:
        """Answer in place of MLflow where a workspace differs; else ask MLflow."""
        if path.startswith("/.well-known"):
            return 200, json.dumps({"oidc_endpoint": f"{self.host}/oidc", "workspace_id": "123"}).encode()
        if authorization != f"Bearer {self.token}":
            return 403, b'{"error_code": "PERMISSION_DENIED", "message": "Invalid access token."}'
        if "/unity-catalog/registered-models/get" in path:
            return 404, b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "No such model."}'
        if "/unity-catalog/registered-models/create" in path and b'"main.' not in body:
            return 404, b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "No such catalog."}'
        request = urllib.request.Request(self.upstream + path, data=body or None, method=method)  # noqa: S310  # to our own server
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310  # our own server
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@contextlib.contextmanager
def workspace(folder: Path, token: str) -> Iterator[Workspace]:
    """Start MLflow and the proxy."""
    artifacts = folder / "artifacts"
    options = ("--default-artifact-root", artifacts.as_uri(), "--no-serve-artifacts")
    with mlflow_server(folder, *options) as upstream:
        double = Workspace(upstream, token)

        class Proxy(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                authorization = self.headers.get("Authorization", "")
                status, out = double.answer(self.command, self.path, authorization, body)
                request = Request(self.command, self.path, authorization, body.decode(), status)
                double.requests.append(request)
                double.on_request(request)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            def log_request(self, *args: object) -> None:
                """Nothing is printed: requests are kept."""

        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            setattr(Proxy, f"do_{method}", Proxy._answer)

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
            double.host = f"http://127.0.0.1:{server.server_address[1]}"
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield double
            finally:
                server.shutdown()
                thread.join(30)
