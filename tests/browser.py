"""Headless Chromium driven from outside, as a person would: over its DevTools protocol, with real keys and clicks.

No WebSocket library is among the dependencies, so the few lines of RFC 6455 that are needed stand here.
"""

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0"
).split()
NOWHERE_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
"""Every other host, by name or address, is unknown to the browser."""
_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "Escape": 27, "Enter": 13, "Tab": 9}
_TIMEOUT_S = 60


class WebSocket:
    """A client's end of a WebSocket that carries text."""

    def __init__(self, url):
        found = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", url)
        if found is None:
            raise ValueError(f"{url!r} is not the address of a WebSocket")
        host, port, path = found.groups()
        self._socket = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._stream = self._socket.makefile("rb")
        if b" 101 " not in self._stream.readline():
            raise ConnectionError("the browser refused the WebSocket")
        while self._stream.readline().strip():
            pass

    def send(self, text):
        """Send one message; a client must mask what it sends."""
        data, mask = text.encode(), secrets.token_bytes(4)
        size = len(data)
        if size < 126:
            head = bytes([0x81, 0x80 | size])
        elif size < 2**16:
            head = bytes([0x81, 0x80 | 126]) + size.to_bytes(2, "big")
        else:
            head = bytes([0x81, 0x80 | 127]) + size.to_bytes(8, "big")
        pad = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
        self._socket.sendall(head + mask + masked)

    def receive(self):
        """The next message, put together from its frames."""
        message = b""
        while True:
            first, second = self._stream.read(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(self._stream.read(2 if size == 126 else 8), "big")
            data = self._stream.read(size)
            if first & 0x0F == 8:
                raise ConnectionError("the browser closed the WebSocket")
            if first & 0x0F in (0, 1):
                message += data
                if first & 0x80:
                    return message.decode()

    def close(self):
        """Hang up."""
        self._stream.close()
        self._socket.close()


class Browser:
    """One page of a fresh browser; to be used as a context.

    Args:
        width: Of the window, in pixels.
        height: Of the window, in pixels.
    """

    def __init__(self, width=1200, height=900):
        self._profile = tempfile.mkdtemp(prefix="browser-")
        self.downloads = Path(self._profile, "downloads")
        self.downloads.mkdir()
        command = [
            CHROMIUM or "chromium",
            *_FLAGS,
            NOWHERE_ELSE,
            f"--window-size={width},{height}",
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        # A new group: the browser's many processes end with it.
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
        )
        self._number = 0
        self.events = []
        self._session = None
        try:
            address = None
            for line in self._process.stderr or ():
                if found := re.search(r"DevTools listening on (ws://\S+)", line):
                    address = found.group(1)
                    break
            if address is None:
                raise RuntimeError("Chromium ended before it listened")
            self._socket = WebSocket(address)
            target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
            self.call(
                "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads), eventsEnabled=True
            )
        except BaseException:
            self.close()
            raise

    def call(self, method, **parameters):
        """Call a method of the DevTools protocol; events on the way are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith("Browser."):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.receive())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for_event(self, method):
        """The parameters of the next event of a kind, also of one that came before and was not asked for."""
        while True:
            for number, event in enumerate(self.events):
                if event.get("method") == method:
                    return self.events.pop(number)["params"]
            self.events.append(json.loads(self._socket.receive()))

    def open(self, url):
        """Go to an address, and wait until the page is there."""
        self.events = [event for event in self.events if event.get("method") != "Page.loadEventFired"]
        result = self.call("Page.navigate", url=str(url))
        if "errorText" in result:
            raise RuntimeError(f"{url}: {result['errorText']}")
        self.wait_for_event("Page.loadEventFired")

    def forget(self):
        """Leave the page, and what was said of it: its requests may still fail when its server is gone."""
        self.open("about:blank")
        self.evaluate("1")
        self.events.clear()

    def evaluate(self, js):
        """The value of an expression in the page; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=js, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, js, timeout_s=20):
        """Wait until an expression in the page is true."""
        limit = int(timeout_s * 1000)
        found = self.evaluate(
            f"new Promise((done) => {{ const end = Date.now() + {limit}; const look = () => "
            f"({js}) ? done(true) : Date.now() > end ? done(false) : setTimeout(look, 10); look(); }})"
        )
        if not found:
            raise AssertionError(f"after {timeout_s} s it is still not true that {js}")

    def key(self, code):
        """Press and let go of a key: a character, or a name such as ArrowLeft."""
        named = code in _CODES
        key = {"key": code, "windowsVirtualKeyCode": _CODES[code] if named else ord(code.upper())}
        text = {} if named else {"text": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector):
        """Click on the middle of an element."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); "
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        place = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **place)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **place)

    def scheme(self, name):
        """Prefer `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path):
        """Write what the window shows as PNG."""
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self):
        """Errors that the page's script or its policy reported so far."""
        self.evaluate("1")
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(event["params"]["exceptionDetails"].get("text", "exception"))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    def close(self):
        """End the browser."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 15)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)
                self._process.wait()
        if hasattr(self, "_socket"):
            self._socket.close()
        if self._process.stderr:
            self._process.stderr.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
