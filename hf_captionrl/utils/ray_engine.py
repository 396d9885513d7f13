"""Writes parts on the actors of a Ray cluster. Needs the extra `ray`."""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_captionrl.utils.io import say
from hf_captionrl.utils.parts import Actor, Submit, in_workers

if TYPE_CHECKING:
    from hf_captionrl.utils.options import EngineOptions


_ANSWER_S = 10.0


class RayActor:
    """The actor in a process of the cluster. It returns errors as text, because Ray would wrap them in its messages."""

    def __init__(self, actor: Actor, folder: str, on_machine: int) -> None:
        self.actor = actor
        os.environ["LOCAL_WORLD_SIZE"] = str(on_machine)
        if os.path.isdir(folder):
            os.chdir(folder)  # relative paths then mean the same as in the process that started the command

    def attempt(self, shard: int) -> str:
        """See [`Actor.attempt`]."""
        return self.actor.attempt(shard)


def connect(ray: Any, address: str | None) -> bool:
    """Connect to the cluster, or start one on this machine; returns whether the connection is new."""
    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        settings["include_dashboard"] = False
    try:
        if place := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address or ""):
            # Ray itself tries for minutes, and then ends the process.
            socket.create_connection((place[1], int(place[2])), _ANSWER_S).close()
        if address is not None:
            say(f"captionrl: connecting to the Ray cluster at {address} ...")
        # None would join a cluster that runs on this machine, or the one that RAY_ADDRESS names.
        ray.init(address=address or "local", **settings)
    except (OSError, OverflowError) as error:
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
        return min(wanted or gpus, gpus), 1
    return wanted or sum(node["Alive"] for node in ray.nodes()), 0  # one actor per machine


def run_on_ray(actor: Actor, todo: list[int], options: EngineOptions) -> Iterator[int]:
    """Yield the numbers of finished parts."""
    # Ray sends usage statistics unless this is set before it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            "--engine ray needs Ray, which is not installed. Run `pip install 'hf-captionrl[ray]'`, or use --processes."
        ) from error
    is_new = connect(ray, options.address)
    workers: dict[int, Any] = {}
    try:
        number, gpus = actor_numbers(ray, options.processes, actor.stage.needs_gpu)
        number = min(number, len(todo), max(1, int(ray.cluster_resources().get("CPU", 1))))  # others would never start
        remote = ray.remote(num_cpus=1, num_gpus=gpus)(RayActor)
        sent = ray.put(actor)

        def start(worker: int) -> Submit:
            machines = sum(node["Alive"] for node in ray.nodes())
            made = workers[worker] = remote.remote(sent, os.getcwd(), math.ceil(number / machines))
            return lambda shard: made.attempt.remote(shard).future()

        yield from in_workers(start, todo, number, ray.exceptions.RayActorError)
    finally:
        for worker in workers.values():
            ray.kill(worker)
        if is_new:
            ray.shutdown()
