"""A Ray cluster of two nodes on this machine."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest


@contextlib.contextmanager
def on_this_machine() -> Iterator[None]:
    """Ray listens on 127.0.0.1 only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Otherwise Ray replaces 127.0.0.1 by the address of the network card.
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        yield


def in_new_process(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function that starts a cluster of its own; Ray's actors then fail in other clusters of the same process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(function, *arguments).result(240)


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes of one CPU each, on 127.0.0.1."""
    import ray
    from ray.cluster_utils import Cluster

    with on_this_machine():
        node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        found = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.1"})
        try:
            found.add_node(**node, node_ip_address="127.0.0.1")
            yield found.address
        finally:
            ray.shutdown()
            found.shutdown()
