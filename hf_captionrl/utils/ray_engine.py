"""Runs shards on the actors of a Ray cluster, with Ray Data. Needs the extra `ray`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_captionrl.utils.parts import MAX_DEATHS, Actor, deaths_error, pack_error, raise_packed, share_cores

if TYPE_CHECKING:
    from hf_captionrl.utils.options import EngineOptions


class Deaths:
    """Counts the deaths of workers since the last finished shard. One actor of the run holds it, and every command a new one.

    Ray repeats the shard of a dead worker without an end and without a message, so workers announce what they start.
    """

    def __init__(self) -> None:
        self._started: set[int] = set()
        self._count = 0

    def start(self, shard: int) -> int:
        """Note that a worker starts a shard; returns the deaths. A shard that starts again was that of a dead worker."""
        self._count += shard in self._started
        self._started.add(shard)
        return self._count

    def finish(self, shard: int) -> None:
        """Note that a shard is finished."""
        self._started.discard(shard)
        self._count = 0


class RayActor:
    """The actor in a process of the cluster. It returns errors as text, because Ray would wrap them in its messages."""

    def __init__(self, actor: Actor, folder: str, deaths: Any, number: int, machines: int) -> None:
        self.actor, self.deaths, self.number = actor, deaths, number
        share_cores(math.ceil(number / machines))
        if os.path.isdir(folder):
            os.chdir(folder)  # relative paths then mean the same as in the process that started the command

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"shard": batch["shard"], "error": [self._attempt(int(shard)) for shard in batch["shard"]]}

    def _attempt(self, shard: int) -> str:
        import ray

        deaths = ray.get(self.deaths.start.remote(shard))
        if deaths >= MAX_DEATHS:
            return pack_error(deaths_error(deaths, len(self.actor.shards.unfinished()), self.number))
        error = self.actor.attempt(shard)
        if not error:
            ray.get(self.deaths.finish.remote(shard))
        return error


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
    """Connect to the cluster, or start one on this machine; returns whether the connection is new."""
    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        settings["include_dashboard"] = False
    try:
        # None would join a cluster that runs on this machine, or the one that RAY_ADDRESS names.
        ray.init(address=address or "local", **settings)
    except ConnectionError as error:
        raise ValueError(
            f"--address {address!r}: no Ray cluster answers ({error}). Start one with `ray start --head`, or leave --address out."
        ) from error
    return True


def actor_numbers(ray: Any, wanted: int | None, needs_gpu: bool) -> tuple[int, int]:
    """Number of actors, and of GPUs per actor."""
    resources = ray.cluster_resources()
    if not needs_gpu:
        return wanted or max(1, int(resources.get("CPU", 1))), 0
    if gpus := int(resources.get("GPU", 0)):
        return wanted or gpus, 1
    return wanted or _machines(ray), 0


def _machines(ray: Any) -> int:
    return sum(node["Alive"] for node in ray.nodes())


def run_on_ray(actor: Actor, todo: list[int], options: EngineOptions) -> Iterator[int]:
    """Yield the numbers of finished shards. Ray Data restarts dead actors and repeats their shards."""
    ray = _import_ray()
    is_new = connect(ray, options.address)
    try:
        number, gpus = actor_numbers(ray, options.processes, actor.stage.needs_gpu)
        number = min(number, len(todo))
        # If its machine is lost, the count starts again.
        deaths = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Deaths).remote()
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        numbers = ray.data.from_items([{"shard": shard} for shard in todo], override_num_blocks=len(todo))
        done = numbers.map_batches(
            RayActor,
            fn_constructor_args=(actor, os.getcwd(), deaths, number, _machines(ray)),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=number),
            num_cpus=1,
            num_gpus=gpus or None,
        )
        for row in done.iter_rows():
            raise_packed(row["error"])
            yield int(row["shard"])
    finally:
        if is_new:
            ray.shutdown()
