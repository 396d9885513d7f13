"""The demo in a process of its own, as a person starts it."""

import contextlib
import json
import os
import socket
import tempfile
import warnings

from hf_captionrl.cli import main
from tests.processes import Forked


@contextlib.contextmanager
def running_demo(*arguments, temporary=None):
    """Address of a demo that runs while the block does, with a folder for temporary files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["demo", "--no_browser", "--json", "--port", str(port), *arguments]
    with Forked(_demo, command, temporary) as process:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(process.stderr.read())
        yield json.loads(line)["url"]
        process.terminate()
        process.wait(timeout=60)


def _demo(command, temporary):
    warnings.simplefilter("ignore")
    os.environ.pop("GRADIO_ANALYTICS_ENABLED", None)
    if temporary is not None:
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    return main(command)


def open_demo(page, url, images):
    """Open the page, and wait until the album's images are there, and all that can be pressed; parts come one by one."""
    page.call("Network.enable")
    page.open(url)
    wait_for_images(page, images)
    page.wait("document.querySelector('#picker input') && document.querySelector('#compare-button')")


def wait_for_images(page, images, instead_of=()):
    """Wait until the frame shows so many images, none of which was there before."""
    shown = "[...document.querySelectorAll('#frame img')]"
    page.wait(f"{shown}.length === {images} && !{shown}.some((e) => {json.dumps(instead_of)}.includes(e.src))", 60)


def pick(page, album, images):
    """Pick another album of the list."""
    before = page.evaluate("[...document.querySelectorAll('#frame img')].map((e) => e.src)")
    option = f'[role=option][aria-label="{album}"]'
    for _ in range(20):
        page.evaluate("document.activeElement.blur()")
        page.click("#picker input")
        with contextlib.suppress(AssertionError):  # pressed before the page listened
            page.wait(f"document.querySelector({option!r})", 2)
            break
    page.click(option)
    wait_for_images(page, images, before)


def compare(page, images):
    """Press the button, and wait for the captions of two captioners for so many images."""
    page.click("#compare-button")
    page.wait(f"document.querySelectorAll('#compared tbody tr').length === {2 * images}", 120)
