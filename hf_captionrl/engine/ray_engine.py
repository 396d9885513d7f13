"""Runs shards on the actors of a Ray cluster, with Ray Data. Needs the extra `ray`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine.actor import Actor, raise_packed

if TYPE_CHECKING:
    from hf_captionrl.engine.options import EngineOptions

__all__ = ["RayActor", "connect", "run_on_ray"]


class RayActor:
    """The actor in a process of the cluster. It returns errors as text, because Ray would wrap them in its messages."""

    def __init__(self, actor: Actor, folder: str) -> None:
        self.actor = actor
        if os.path.isdir(folder):
            os.chdir(folder)  # relative paths then mean the same as in the process that started the command

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"shard": batch["shard"], "error": [self.actor.attempt(int(shard)) for shard in batch["shard"]]}


def _import_ray() -> Any:
    # Ray sends usage statistics unless this is set before it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(
            "--engine ray needs Ray, which is not installed. Run `pip install 'hf-captionrl[ray]'`, or use --processes."
        ) from error
    return ray


def connect(ray: Any, address: str | None) -> bool:
    """Connect to the cluster, or start one; returns whether the connection is new."""
    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        settings["include_dashboard"] = False
    try:
        ray.init(address=address, **settings)
    except ConnectionError as error:
        raise ValueError(
            f"--address {address!r}: no Ray cluster answers ({error}). Start one with `ray start --head`, or leave --address out."
        ) from error
    return True


def _actors(ray: Any, wanted: int | None) -> tuple[int, int]:
    """Number of actors, and of GPUs per actor."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus:
        return wanted or gpus, 1
    return wanted or sum(node["Alive"] for node in ray.nodes()), 0


def run_on_ray(actor: Actor, todo: list[int], options: EngineOptions) -> Iterator[int]:
    """Yield the numbers of finished shards. Ray Data restarts dead actors and repeats their shards."""
    ray = _import_ray()
    is_new = connect(ray, options.address)
    try:
        number, gpus = _actors(ray, options.processes)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        numbers = ray.data.from_items([{"shard": shard} for shard in todo], override_num_blocks=len(todo))
        done = numbers.map_batches(
            RayActor,
            fn_constructor_args=(actor, os.getcwd()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(number, len(todo))),
            num_cpus=1,
            num_gpus=gpus or None,
        )
        for row in done.iter_rows():
            raise_packed(row["error"])
            yield int(row["shard"])
    finally:
        if is_new:
            ray.shutdown()
