"""For every test: nothing leaves this machine, and little of it is wasted."""

import functools
import gc
import importlib
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: threads of tiny matrices wait for one another longer than they multiply.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["no_proxy"] = "*"  # the servers of tests are on this machine

# Every client of the Hub reads the certificates of all authorities, for connections that no test makes.
ssl.create_default_context = functools.lru_cache(ssl.create_default_context)

_OFFLINE = str(Path(__file__).with_name("offline"))
_PLACES = os.environ.get("PYTHONPATH", "").split(os.pathsep)

# A worker of pytest-xdist starts with the path set, and has run the file already.
if _OFFLINE not in _PLACES:
    os.environ["PYTHONPATH"] = os.pathsep.join([_OFFLINE, *filter(None, _PLACES)])
    importlib.import_module("tests.offline.sitecustomize")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray last: its client leaves threads in the process, and processes that are forked afterwards may wait for their locks."""
    items.sort(key=lambda item: item.path.name == "test_ray.py")


def pytest_collection_finish() -> None:
    """Keep what was imported out of later garbage collections, of which every `Trainer` makes several.

    Where the first backward pass of a process comes after `torch.compile`, autograd refuses those of its forks.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Likewise what the tests of a file have imported, and what they keep."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Let them be collected when the process ends: some libraries report what is left as leaks."""
    gc.unfreeze()
