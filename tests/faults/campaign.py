"""What tests that signal other processes share."""

from __future__ import annotations

import time
from collections.abc import Callable

IN_TIME = 30.0
"""Seconds that `accelerate launch`, and many a scheduler, leaves between SIGTERM and SIGKILL."""


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)
