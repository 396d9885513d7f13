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
    """The loop of this process. A forked process starts another, because threads do not survive a fork."""
    with _starting:
        if os.getpid() not in _running:
            _running.clear()
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="reward functions", daemon=True).start()
            _running[os.getpid()] = loop
        return _running[os.getpid()]


def run_together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await several calls concurrently.

    The loop is the same for the whole run, so a client that is bound to it can be reused. It runs in a thread, because the
    main thread of a notebook already runs a loop.
    """
    if not awaitables:
        return []

    async def together() -> list[Any]:
        return list(await asyncio.gather(*awaitables))

    return asyncio.run_coroutine_threadsafe(together(), _loop()).result()
