"""Which requests a server on this machine answers: none from another site whose name points to it.

The attack is DNS rebinding. The browser sends the name that a page
was loaded from in `Host`, and the site that sends a request in `Origin`; both must be names of this server.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
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
