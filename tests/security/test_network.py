"""The suite's lock: nothing but loopback is reached, by this process, its children or the browser."""

import http.server
import os
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from tests.browser import CHROMIUM, Browser

AWAY = "192.0.2.1"  # an address that belongs to no one (RFC 5737)
TRY = f"""
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # needs no answer: without the lock this succeeds
s.connect(('{AWAY}', 9))
"""


@pytest.fixture
def served():
    """A server on loopback that counts requests."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    "leave",
    [
        lambda s: s.connect((AWAY, 9)),
        lambda s: s.connect_ex((AWAY, 9)),
        lambda s: s.connect(("a.example", 9)),
        lambda s: s.sendto(b"x", (AWAY, 9)),
        lambda s: s.sendmsg([b"x"], [], 0, (AWAY, 9)),
        lambda s: socket.create_connection((AWAY, 9), timeout=1),
        lambda s: socket.getaddrinfo("a.example", 80),
        lambda s: socket.gethostbyname("a.example"),
        lambda s: socket.gethostbyaddr(AWAY),
        lambda s: urllib.request.urlopen(f"http://{AWAY}/", timeout=1),
    ],
    ids="connect connect_ex name sendto sendmsg create_connection getaddrinfo by_name by_address urlopen".split(),
)
def test_connections_beyond_this_machine_are_refused(leave):
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s,
        pytest.raises(OSError, match="on this machine alone"),
    ):
        leave(s)


def test_a_socket_over_ipv6_stays_too():
    with (
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s,
        pytest.raises(OSError, match="on this machine alone"),
    ):
        s.connect(("2001:db8::1", 9))


def test_loopback_works(served, monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "*")
    url, asked = served
    assert urllib.request.urlopen(url + "/a", timeout=10).read() == b"here"
    assert urllib.request.urlopen(url.replace("127.0.0.1", "localhost") + "/b", timeout=10).read() == b"here"
    assert asked == ["/a", "/b"]
    with socket.socket(socket.AF_UNIX) as here, socket.socket(socket.AF_UNIX) as there:
        here.bind(str(tmp_path / "s"))
        here.listen()
        there.connect(str(tmp_path / "s"))


def test_children_are_locked_in_and_only_by_the_path():
    locked = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, check=False)
    assert "on this machine alone" in locked.stderr
    # Without the path the same child gets its socket: it is the lock that holds, not the lack of a network.
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", TRY], env=free, capture_output=True, text=True, check=False)
    assert "on this machine alone" not in done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_browser_reaches_loopback_alone(served):
    url, asked = served
    fetched = "fetch({!r}, {{mode: 'no-cors'}}).then(() => 'reached', () => 'failed')"
    with Browser() as browser:
        browser.open(url + "/page")
        assert browser.evaluate(fetched.format(url + "/again")) == "reached"
        for away in (f"http://{AWAY}/", "http://a.example/", "http://[2001:db8::1]/"):
            assert browser.evaluate(fetched.format(away)) == "failed"
        # Refused before it is tried: a machine without a network says so too, but in other words.
        assert sum("ERR_NAME_NOT_RESOLVED" in problem for problem in browser.problems()) == 3
    assert asked[0] == "/page"
    assert "/again" in asked
