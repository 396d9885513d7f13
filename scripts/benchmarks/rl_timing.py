r"""The two reinforcement steps with their parts timed, and the proof that they compute the same.

Legend: B images, G captions per image, N = B * G captions.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from hf_captionrl.losses import IGNORE_INDEX
from scripts.benchmarks.generation import ending_at
from scripts.benchmarks.rl_models import World
from scripts.benchmarks.rl_naive import NaiveStep


class Clock:
    """CPU and wall seconds of the parts of a step; a part that begins inside another one is taken out of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {"cpu": defaultdict(float), "wall": defaultdict(float)}
        self._open: list[str] = []
        self._since = (0.0, 0.0)

    def _turn(self) -> None:
        now = (time.process_time(), time.perf_counter())
        if self._open:
            for kind, begin, end in zip(self.seconds, self._since, now, strict=True):
                self.seconds[kind][self._open[-1]] += end - begin
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what follows as a part."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()


@contextmanager
def counted_images(world: World) -> Iterator[list[int]]:
    """Count the images that the captioner's tower encodes, with a hook on its embeddings."""
    images: list[int] = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: images.append(output.size(0)))
        for model in (world.captioner.model, world.stock)
        for name, module in model.named_modules()
        # The tower itself is called with features that are known, too; its embeddings are not.
        if name.startswith(world.captioner.vision_path) and name.endswith(".embeddings")
    ]
    try:
        yield images
    finally:
        for hook in hooks:
            hook.remove()


def _planned(world: World) -> AbstractContextManager[None]:
    """Generate captions of the planned lengths, if there are any."""
    return nullcontext() if world.lengths is None else ending_at(world.lengths)


def _ours(world: World, clock: Clock, *, cached: bool) -> Tensor:
    """Forward and backward of the trainer's step; with `cached`, its data loader brings features, not pixels."""
    inputs = dict(world.batch)
    captioner: Any = world.captioner
    if cached:
        inputs["image_features"] = world.cached_features
        del inputs["pixel_values"]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with clock.part("generate"), _planned(world):
                return function(*args, **kwargs)

        return call

    names = ("generate", "image_features")
    for name in names:
        setattr(captioner, name, timed(getattr(captioner, name)))
    try:
        with clock.part("score"):
            world.trainer.rollouts.roll_out([inputs])
        with clock.part("update"):
            world.trainer.compute_loss(world.trainer.model, inputs).backward()
    finally:
        for name in names:
            delattr(captioner, name)
    return (inputs["labels"] != IGNORE_INDEX).sum(1)


def _naive(world: World, clock: Clock) -> Tensor:
    """Forward and backward of the step as it is usually written."""
    step = NaiveStep(world)
    with clock.part("generate"), _planned(world):
        input_ids, mask, captions = step.generate()
    with clock.part("score"):
        advantages = step.score(captions, lambda: clock.part("scorer_images"))
    with clock.part("update"):
        step.loss(input_ids, mask, advantages).backward()
    return mask[:, 1:].sum(1)


STEPS: dict[str, Callable[[World, Clock], Tensor]] = {
    "ours": functools.partial(_ours, cached=False),
    "ours-cached": functools.partial(_ours, cached=True),
    "naive": _naive,
}
"""From world and clock to the tokens of each caption; the gradients are left in the parameters."""


def _gradients(world: World) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in world.parameters.items() if p.grad is not None}
    for parameter in world.parameters.values():
        parameter.grad = None
    return found


def check_equal(world: World, atol: float = 1e-3, rtol: float = 1e-4) -> dict[str, float]:
    """Make sure that both steps compute the same advantages and gradients from one rollout.

    `atol` is the largest difference of the advantages, in nats.
    """
    inputs, naive = dict(world.batch), NaiveStep(world)
    with _planned(world):
        world.trainer.rollouts.roll_out([inputs])
    world.trainer.compute_loss(world.trainer.model, inputs).backward()
    ours = _gradients(world)
    captions = world.captioner.decode(inputs["labels"].clamp(min=0), inputs["labels"] != IGNORE_INDEX)
    advantages = naive.score(captions)
    naive.loss(inputs["input_ids"], inputs["attention_mask"], inputs["advantages"]).backward()
    theirs = _gradients(world)
    if ours.keys() != theirs.keys():
        raise RuntimeError(
            f"Only one of the steps has a gradient of {sorted(ours.keys() ^ theirs.keys())[:3]}: they do not train the "
            "same weights, so their times say nothing. Compare what is frozen."
        )
    square = {
        "difference": sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours),
        "length": sum(float(gradient.double().square().sum()) for gradient in theirs.values()),
    }
    found = {
        "advantages": float((advantages - inputs["advantages"]).abs().max()),
        "gradients": (square["difference"] / square["length"]) ** 0.5 if square["length"] else float("nan"),
    }
    for name, bound in (("advantages", atol), ("gradients", rtol)):
        if not found[name] <= bound:
            raise RuntimeError(
                f"The {name} of the two steps differ by {found[name]:.2e}, more than {bound:.0e}: a time would say "
                "nothing. Compare log-probabilities and rewards of one caption."
            )
    return found
