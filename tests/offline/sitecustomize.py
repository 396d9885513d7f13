"""No test reaches another machine: in every Python process of the suite the remedy is closed where Python opens it.

`tests/conftest.py` puts this folder on PYTHONPATH, so that every Python process that a test starts runs this file first,
and imports it in its own. An audit hook cannot be undone, nor got round by those who keep their own socket classes.
"""

import functools
import ipaddress
import socket
import sys

_ASKS_FOR_A_NAME = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
_SENDS = {"socket.connect", "socket.sendto", "socket.sendmsg"}
_OWN_NAMES = {"", "localhost", "localhost.localdomain", socket.gethostname()}


class NoNetworkError(OSError):
    """What a machine without a network would answer, so that code with a remedy of that takes it."""


def stays_here(host):
    """Whether a host's name or address is this machine, without asking anybody."""
    if host is None:
        return True
    name = host.decode("ascii", "replace") if isinstance(host, bytes | bytearray) else str(host)
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name.lower() in _OWN_NAMES
    return address.is_loopback or address.is_unspecified


def _refuse(event, host):
    if not stays_here(host):
        raise NoNetworkError(f"{event} to {host!r}: the tests run on this machine alone. Serve it on 127.0.0.1.")


def _refuse_address(event, asked, address):
    # Sockets of files and of the kernel have no host.
    if asked.family in (socket.AF_INET, socket.AF_INET6) and isinstance(address, tuple) and address:
        _refuse(event, address[0])


def _guard(event, arguments):
    if not event.startswith("socket."):
        return
    if event in _SENDS:
        _refuse_address(event, arguments[0], arguments[1])
    elif event in _ASKS_FOR_A_NAME:
        _refuse(event, arguments[0])


def _look_first(name):
    """These ask for the address of a name before the hook hears of it."""
    do = getattr(socket.socket, name)

    def checked(self, *arguments):
        if arguments:
            _refuse_address(f"socket.{name}", self, arguments[-1])
        return do(self, *arguments)

    setattr(socket.socket, name, functools.wraps(do)(checked))


for _name in ("connect", "connect_ex", "sendto"):
    _look_first(_name)
sys.addaudithook(_guard)
