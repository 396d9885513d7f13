"""Handles the requests of the small Hub."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_ROUTES: list[tuple[re.Pattern[str], Callable[..., None]]] = []


class HubError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def route(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def keep(method: Callable[..., None]) -> Callable[..., None]:
        _ROUTES.append((re.compile(pattern), method))
        return method

    return keep


class Answering(BaseHTTPRequestHandler):
    """Finds the method for a request, applies planted faults, and sends the response."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the client's acknowledgement
    hub: Any  # the server: its faults, its lock, its list of requests

    def log_message(self, *_: Any) -> None:
        pass

    # Handling of a request

    def _handle(self) -> None:
        address = urlsplit(self.path)
        self.query = parse_qs(address.query)
        request = f"{self.command} {address.path}"
        fault = self.hub.fault_of(request)
        self.lost = fault == "lost"
        if fault == "cut":
            self.rfile.read(min(64, int(self.headers.get("Content-Length") or 0)))
            self._reset("cut")
            return
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            self.body = self._chunks()
        if isinstance(fault, int):
            self._send(fault, {"error": "planted"}, {"Retry-After": "0"} if fault == 429 else {})
            return
        try:
            with self.hub.lock:
                for pattern, method in _ROUTES:
                    if found := pattern.fullmatch(request):
                        method(self, **{key: unquote(value or "") for key, value in found.groupdict().items()})
                        return
            raise HubError(404, f"no route for {request}", "EntryNotFound")
        except HubError as error:
            extra = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
            self._send(error.status, {"error": error.message}, extra)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._handle
        raise AttributeError(name)

    def _reset(self, what: str) -> None:
        self.hub.requests.append((self.command, urlsplit(self.path).path, what))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        if self.lost:
            self._reset("lost")
            return
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        kind = "application/octet-stream" if isinstance(value, bytes) else "application/json"
        self.hub.requests.append((self.command, urlsplit(self.path).path, status))
        self.send_response(status)
        for name, text in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(data)
            except OSError:  # the client has disconnected
                self.close_connection = True
