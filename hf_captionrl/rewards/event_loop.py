"""One event loop in a background thread, for asynchronous reward functions."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Sequence
from typing import Any

__all__ = ["run_together"]

_running: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process. A forked process starts its own: threads do not survive a fork."""
    with _starting:
        if os.getpid() not in _running:
            _running.clear()
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="reward functions", daemon=True).start()
            _running[os.getpid()] = loop
        return _running[os.getpid()]


def run_together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await several calls at the same time.

    The loop stays the same for the whole run, so that a client which is bound to it can be kept from call to call. It is in
    a thread of its own, so that notebooks, whose main thread already runs a loop, work too.
    """
    if not awaitables:
        return []

    async def together() -> list[Any]:
        return list(await asyncio.gather(*awaitables))

    return asyncio.run_coroutine_threadsafe(together(), _loop()).result()
