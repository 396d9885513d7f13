"""A small HTTP server, and which requests a server on this machine answers: none from another site whose name points to it.

Shared by the review page, the reward server and the demo; the attack is DNS rebinding. The browser sends the name that a page
was loaded from in `Host`, and the site that sends a request in `Origin`; both must be names of this server.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_PORTS = {"http": 80, "https": 443}


class OwnHosts:
    """Names by which a server may be addressed.

    `more` are names that the user has given. `any_address` accepts every IP address, if the server listens for other machines:
    DNS rebinding needs a name that another site controls, and such names are still refused.
    """

    def __init__(self, more: Iterable[str] = (), *, any_address: bool = False) -> None:
        self.more = {name.lower() for name in more}
        self.any_address = any_address

    @classmethod
    def of(cls, host: str, more: Iterable[str] = ()) -> OwnHosts:
        """Those of a server that listens at `host`; this machine's names are known."""
        is_local = host in LOCAL_NAMES
        return cls([*more, *([] if is_local else [host])], any_address=not is_local)

    def add(self, name: str) -> None:
        """Accept one more name."""
        self.more.add(name.lower())

    def accepts(self, hosts: Iterable[str], origins: Iterable[str] = ()) -> bool:
        """Whether to answer a request."""
        hosts = list(hosts)
        if len(hosts) != 1:
            return False
        host = _name_and_port(f"//{hosts[0]}")
        if host is None:
            return False
        is_own = host[0] in LOCAL_NAMES or host[0] in self.more or (self.any_address and _is_address(host[0]))
        return is_own and all(self._is_own_origin(origin, host) for origin in origins)

    def _is_own_origin(self, origin: str, host: tuple[str, int | None]) -> bool:
        scheme = origin.partition("://")[0]
        found = _name_and_port(origin) if scheme in _PORTS else None  # sandboxed pages send `null`
        if found is None:
            return False
        default = _PORTS[scheme]
        # A name behind a proxy has another port than the one that the server listens at.
        is_given = found[0] in self.more and found[1] in (None, default)
        return is_given or (found[0], found[1] or default) == (host[0], host[1] or default)


class LocalServer(ABC):
    """An HTTP server that answers GET and POST with `respond`; as a context manager, it serves in a thread."""

    timeout_s: float | None = None  # of each read and write

    def __init__(self, host: str, port: int) -> None:
        self._hosts = OwnHosts.of(host)
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except (OSError, OverflowError) as error:
            remedy = "Use --port 0 for any free port."
            raise ValueError(f"--port {port} of {host} is not free ({error}). {remedy}") from None
        self.port = self._server.server_address[1]
        self.address = f"http://{host}:{self.port}"

    @abstractmethod
    def respond(self, request: BaseHTTPRequestHandler) -> tuple[int, bytes, str]:
        """Status, body and media type of the answer, which must be a refusal unless `is_own(request)`."""

    def is_own(self, request: BaseHTTPRequestHandler) -> bool:
        """Whether a request names this server, and comes from no other site."""
        return self._hosts.accepts(request.headers.get_all("Host", []), request.headers.get_all("Origin", []))

    def serve(self) -> None:
        """Answer requests until `stop`, or an interrupt."""
        with self._server:
            self._server.serve_forever(poll_interval=0.1)

    def stop(self, *signal_and_frame: object) -> None:
        """Accept no more requests; a signal handler, too."""
        threading.Thread(target=self._server.shutdown, daemon=True).start()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = server.timeout_s

            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                status, body, kind = server.respond(self)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("X-Frame-Options", "DENY")
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has gone
                    self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

        return Handler


def whole_number(text: str) -> int | None:
    """A whole number of a request, or None if it is invalid; Python refuses numbers of thousands of digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else None


def _name_and_port(address: str) -> tuple[str, int | None] | None:
    try:
        parts = urlsplit(address)
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return name, port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
