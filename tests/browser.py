"""Headless Chromium driven from outside, as a person would: over its DevTools protocol, with real keys and clicks."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
).split()
NOWHERE_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
"""Every other host, by name or address, is unknown to the browser."""
# Ratios of WCAG 2.2, success criterion 1.4.3; a colour is drawn to read it, because browsers write colours in several ways.
_CONTRAST = """(() => {
  const context = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true});
  const read = (color) => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = color; context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [...[r, g, b].map((v, i) => v * a + below[i] * (1 - a)), 1];
  const back = (e) => {
    if (!e) return matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    const own = read(getComputedStyle(e).backgroundColor);
    return own[3] === 1 ? own : over(own, back(e.parentElement));
  };
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const opacity = (e) => e ? getComputedStyle(e).opacity * opacity(e.parentElement) : 1;
  const shown = [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility({visibilityProperty: true})
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && !e.closest(':disabled'));
  return shown.map((e) => {
    const style = getComputedStyle(e), ground = back(e), color = read(style.color);
    color[3] *= opacity(e);
    const [a, b] = [light(over(color, ground)), light(ground)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    return {text: e.textContent.trim().slice(0, 40), ratio: (a + 0.05) / (b + 0.05), needed: large ? 3 : 4.5};
  });
})()"""

_CODES = {"Escape": 27}
_TIMEOUT_S = 60


# Chromium reads from descriptor 3 and writes to 4.
_START = """
import os, sys
for given, number in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(given), number)
os.execv(sys.argv[3], sys.argv[3:])
"""


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
        for_browser, self._to = os.pipe()
        self._from, of_browser = os.pipe()
        command = [CHROMIUM or "chromium", *_FLAGS, NOWHERE_ELSE, f"--window-size={width},{height}"]
        command = [sys.executable, "-I", "-c", _START, str(for_browser), str(of_browser), *command]
        # A new group: the browser's many processes end with it.
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(for_browser, of_browser),
            start_new_session=True,
        )
        os.close(for_browser)
        os.close(of_browser)
        self._unread, self._number = b"", 0
        self.events, self._session = [], None
        try:
            while not (pages := [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]):
                pass
            attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
            self._session = attached["sessionId"]
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
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self):
        while b"\0" not in self._unread:
            if not select.select([self._from], [], [], _TIMEOUT_S)[0]:
                raise TimeoutError("Chromium is silent")
            if not (data := os.read(self._from, 2**16)):
                raise ConnectionError("Chromium ended")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def wait_for_event(self, method):
        """The parameters of the next event of a kind, also of one that came before and was not asked for."""
        while True:
            for number, event in enumerate(self.events):
                if event.get("method") == method:
                    return self.events.pop(number)["params"]
            self.events.append(self._receive())

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
        """Press and let go of a key: a character, or Escape."""
        named = code in _CODES
        key = {"key": code, "windowsVirtualKeyCode": _CODES[code] if named else ord(code.upper())}
        text = {} if named else {"text": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector):
        """Click on the middle of an element."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); "
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        place = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **place)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **place)

    def scheme(self, name):
        """Prefer `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def phone(self):
        """Show the page as a phone of 390 by 844 pixels does."""
        self.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)

    def pale(self, schemes=("light", "dark")):
        """Texts of the page whose contrast is below that of WCAG, level AA; refuses a page without texts."""
        found = []
        for name in schemes:
            self.scheme(name)
            texts = self.evaluate(_CONTRAST)
            assert len(texts) > 5, "the page shows texts"
            found += [(name, one) for one in texts if one["ratio"] < one["needed"]]
        return found

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
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
