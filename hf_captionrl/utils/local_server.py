"""A small HTTP server, and which requests a server on this machine answers: none from another site whose name points to it.

Shared by the review page, the reward server and the demo; the attack is DNS rebinding. The browser sends the name that a page
was loaded from in `Host`, and the site that sends a request in `Origin`; both must be names of this server.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn, Self
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


class RequestError(ValueError):
    """A request that is refused, with its status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LocalServer(ABC):
    """An HTTP server that answers GET and POST with `respond`; as a context manager, it serves in a thread.

    It refuses requests that do not name it, and those of other sites. An error in `respond` is the answer: a `RequestError` with its
    status, another `ValueError` with 422, anything else with 500 and a traceback on stderr.
    """

    timeout_s = 60.0  # of each read and write

    def __init__(self, host: str, port: int) -> None:
        self._hosts = OwnHosts.of(host)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            kind = type("Server", (ThreadingHTTPServer,), {"address_family": family})
            self._server = kind((host, port), self._handler())
        except (OSError, OverflowError) as error:
            remedy = "Use an address of this machine, and --port 0 for any free port."
            raise ValueError(f"The server cannot listen at {host}, --port {port} ({error}). {remedy}") from None
        self.port = self._server.server_address[1]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @abstractmethod
    def respond(self, request: BaseHTTPRequestHandler) -> tuple[bytes, str]:
        """Body and media type of the answer."""

    def refusal(self, message: str) -> tuple[bytes, str]:
        """Body and media type of an error."""
        return message.encode("utf-8", "replace"), "text/plain; charset=utf-8"

    def json_body(self, request: BaseHTTPRequestHandler, most: int, option: str = "") -> Any:
        """The JSON in the body of a request, of at most so many bytes."""
        length = whole_number(request.headers.get("Content-Length", ""))
        if length is None:
            raise RequestError(411, "The request has no length. Send Content-Length.")
        try:
            if length > most:
                left = min(length, 4 * most)
                while left > 0 and request.rfile.read(min(left, 2**20)):  # so that the client reads the answer
                    left -= 2**20
                raise RequestError(413, f"The body has {length} bytes. Send at most {most}{option}.")
            data = request.rfile.read(length)
        except TimeoutError:
            raise RequestError(408, f"The body did not arrive within {self.timeout_s:g} s. Send it again.") from None
        try:
            return json.loads(data, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"The body is not JSON ({error}).") from None

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

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # the client has gone
                    super().handle()

            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                status, given = 200, self.headers
                try:
                    if not server._hosts.accepts(given.get_all("Host", []), given.get_all("Origin", [])):
                        raise RequestError(403, "Host or Origin is not this server. Use its address.")
                    body, kind = server.respond(self)
                except ConnectionError:
                    raise
                except Exception as error:
                    status = getattr(error, "status", 422) if isinstance(error, ValueError) else 500
                    if status == 500:
                        traceback.print_exc()
                    body, kind = server.refusal(" ".join(f"{error}".split()) or type(error).__name__)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("X-Frame-Options", "DENY")
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

        return Handler


def _refuse_constant(number: str) -> NoReturn:
    raise ValueError(f"{number} is not a number of JSON")


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
