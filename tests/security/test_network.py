"""The suite's lock: nothing but loopback is reached, by this process or its children."""

import os
import socket
import subprocess
import sys
import urllib.request

import pytest

AWAY = "192.0.2.1"  # an address that belongs to no one (RFC 5737)
TRY = f"""
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # needs no answer: without the lock this succeeds
s.connect(('{AWAY}', 9))
"""


@pytest.mark.parametrize(
    "leave",
    [
        lambda s: s.connect(("2001:db8::1", 9)),
        lambda s: s.connect_ex(("a.example", 9)),
        lambda s: s.sendto(b"x", ("2001:db8::1", 9)),
        lambda s: s.sendmsg([b"x"], [], 0, ("2001:db8::1", 9)),
        lambda s: socket.getaddrinfo("a.example", 80),
        lambda s: socket.gethostbyname("a.example"),
        lambda s: socket.gethostbyaddr(AWAY),
        lambda s: urllib.request.urlopen(f"http://{AWAY}/", timeout=1),
    ],
    ids="connect connect_ex sendto sendmsg getaddrinfo by_name by_address urlopen".split(),
)
def test_connections_beyond_this_machine_are_refused(leave):
    with (
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s,
        pytest.raises(OSError, match="on this machine alone"),
    ):
        leave(s)


def test_children_are_locked_in_and_only_by_the_path():
    locked = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, check=False)
    assert "on this machine alone" in locked.stderr
    # Without the path the same child gets its socket: it is the lock that holds, not the lack of a network.
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", TRY], env=free, capture_output=True, text=True, check=False)
    assert "on this machine alone" not in done.stderr
