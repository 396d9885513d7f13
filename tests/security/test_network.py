"""The suite's lock: nothing but loopback is reached, by this process or its children."""

import os
import socket
import subprocess
import sys

import pytest

TRY = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # needs no answer: without the lock this succeeds
s.connect(("192.0.2.1", 9))  # an address that belongs to no one (RFC 5737)
"""


def test_connections_beyond_this_machine_are_refused():
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s:
        for leave, *arguments in ((s.connect, ("2001:db8::1", 9)), (s.sendto, b"x", ("2001:db8::1", 9))):
            with pytest.raises(OSError, match="on this machine alone"):
                leave(*arguments)
    with pytest.raises(OSError, match="on this machine alone"):
        socket.getaddrinfo("a.example", 80)


def test_children_are_locked_in_and_only_by_the_path():
    locked = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, check=False)
    assert "on this machine alone" in locked.stderr
    # Without the path the same child gets its socket: it is the lock that holds, not the lack of a network.
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", TRY], env=free, capture_output=True, text=True, check=False)
    assert "on this machine alone" not in done.stderr
