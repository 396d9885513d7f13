r"""Measures the gradient of rewards with a bank of distractors against that of rewards within a batch.

    OMP_NUM_THREADS=1 python scripts/reward_bank.py

writes `docs/results/reward_bank.json` and its table in `docs/self_retrieval.md`. The policy has a table of probabilities
for captions of three words, so that every expectation over captions is a sum over all of them. Images and the scorer are
those of the embedded world. The distractors of a batch are drawn independently, so that the expectation over all batches is
an integral in one dimension: with `e` the exponential of a distractor's similarity and `a` that of the target's,
`E log(a + w sum e) = int_0^inf [exp(-x) - exp(-a x) (E exp(-w e x))^n] / x dx`.

Legend: T targets, S captions, P parameters per target, C images per batch, M images of the bank, L images, D features.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a program, only scripts/ is on the path

from hf_captionrl.io import write_json  # noqa: E402
from hf_captionrl.retrieval import NeighbourFile, load_scorer  # noqa: E402
from hf_captionrl.rewards import ImageBank, retrieval_rewards  # noqa: E402
from hf_captionrl.scenes import load_scenes  # noqa: E402
from hf_captionrl.scenes.models import model_path  # noqa: E402
from hf_captionrl.trainers.caption_generation import scorer_features  # noqa: E402
from scripts.common import write_section  # noqa: E402

PAGE = ROOT / "docs" / "self_retrieval.md"
RESULTS = ROOT / "docs" / "results" / "reward_bank.json"
FIRST = ("small", "large", "blue", "red", "green", "golden")
SECOND = ("cat", "dog", "fish", "car", "cake", "shoe", "tree", "umbrella")
CAPTIONS = [f"a {first} {second}" for first, second in itertools.product(FIRST, SECOND)]


class World(NamedTuple):
    """Features of unit length by one scorer, in fp64."""

    text: Tensor  # (S, D)
    targets: Tensor  # (T, D)
    images: Tensor  # (L, D), from which distractors are drawn
    scale: float


def make_world(num_targets: int, num_images: int) -> World:
    """Scenes and the reward scorer."""
    data = load_scenes(num_train=num_targets + num_images, num_validation=1, num_test=1)["train"]
    scorer = load_scorer(model_path("scenes:clip-reward"))
    images = scorer_features(scorer, data).double()
    text = scorer.text_features(CAPTIONS).double()
    return World(text, images[:num_targets], images[num_targets:], float(scorer.logit_scale))


def policy(num_targets: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Probabilities `(T, S)` of all captions, and the gradients of their logarithms `(T, S, P)`."""
    num_first, num_second = len(FIRST), len(SECOND)
    parameters = torch.randn(num_targets, num_first + num_first * num_second, generator=generator).double()

    def log_probs(row: Tensor) -> Tensor:
        first = row[:num_first].log_softmax(0)
        second = row[num_first:].view(num_first, num_second).log_softmax(1)
        return (first[:, None] + second).flatten()  # (S,)

    probabilities = torch.stack([log_probs(row) for row in parameters]).exp()
    scores = torch.stack([torch.autograd.functional.jacobian(log_probs, row) for row in parameters])
    return probabilities, scores


def expected_log_sum(target: Tensor, others: Tensor, number: int, weight: float) -> Tensor:
    """`E log(a + weight * sum of number draws)` `(T, S)`, for `a` of targets `(T, S)` and draws from `(S, L)`."""
    unit = others.mean(1)  # (S,)
    x = torch.arange(-40.0, 25.0, 0.1, dtype=torch.float64).exp()  # steps of log x, so that dx / x is constant
    laplace = torch.stack([torch.exp(-point * others / unit[:, None]).mean(1) for point in x])  # (X, S)
    relative = target / (weight * unit)  # (T, S)
    values = torch.exp(-x)[:, None, None] - torch.exp(-x[:, None, None] * relative) * (laplace**number)[:, None]
    return (weight * unit).log() + 0.1 * values.sum(0)


class Distractors(NamedTuple):
    """Where the distractors of a reward come from."""

    kind: str  # "batch", or a value of `bank_images`
    nearest: int  # nearest images of each target, the same in every bank
    random: int  # images drawn from the others
    weighting: str = "equal"  # a value of `bank_weighting`

    @property
    def number(self) -> int:
        return self.nearest + self.random

    def counts(self, num_images: int) -> list[float] | None:
        """How many of all images each of them stands for; None: all for the same number."""
        if self.weighting == "equal":
            return None
        return [1.0] * self.nearest + [(num_images - self.nearest) / self.random] * self.random

    def __str__(self) -> str:
        text = {
            "batch": "another batch each step",
            "random": f"a bank of {self.random}",
            "nearest": f"the {self.nearest} nearest",
            "nearest_and_random": f"the {self.nearest} nearest, {self.random} others",
        }[self.kind]
        return text if self.weighting == "equal" else f"{text}, importance"


def nearest_images(world: World, number: int) -> Tensor:
    """The `number` nearest images of each target, `(T, number)`."""
    return (world.targets @ world.images.T).topk(number, dim=1).indices


def expected_rewards(world: World, distractors: Distractors, total: float) -> Tensor:
    """Rewards `(T, S)` in expectation over the images that are drawn; the weights of all distractors sum to `total`."""
    number, num_images = distractors.number, len(world.images)
    weight = of_nearest = total / number
    if distractors.weighting == "importance":
        of_nearest = total / num_images
        weight = of_nearest * (num_images - distractors.nearest) / distractors.random
    others = (world.scale * world.text @ world.images.T).exp()  # (S, L)
    logits = world.scale * world.targets @ world.text.T  # (T, S)
    if not distractors.nearest:
        return logits - expected_log_sum(logits.exp(), others, distractors.random, weight)
    rewards = []
    for target, near in zip(logits, nearest_images(world, distractors.nearest), strict=True):
        fixed = target.exp() + of_nearest * others[:, near].sum(1)  # (S,)
        is_far = torch.ones(others.size(1), dtype=torch.bool)
        is_far[near] = False
        drawn = distractors.random and expected_log_sum(fixed[None], others[:, is_far], distractors.random, weight)[0]
        rewards.append(target - (drawn if distractors.random else fixed.log()))
    return torch.stack(rewards)


def drawn_rows(world: World, distractors: Distractors, generator: torch.Generator) -> Tensor:
    """Images of one bank or batch: `(number,)` for all targets, or `(T, number)`."""
    if not distractors.nearest:
        return torch.randint(len(world.images), (distractors.random,), generator=generator)
    near = nearest_images(world, distractors.nearest)
    if not distractors.random:
        return near
    ranked = nearest_images(world, len(world.images))[:, distractors.nearest :]  # (T, others)
    drawn = torch.randint(ranked.size(1), (len(near), distractors.random), generator=generator)
    return torch.cat([near, ranked.gather(1, drawn)], 1)


def rewards_with(world: World, rows: Tensor, batch_size: int, counts: list[float] | None = None) -> Tensor:
    """Rewards `(T, S)` with the distractors of some rows, as many as those of a batch or as a bank."""
    ids = [f"target {number}" for number in range(len(world.targets))]
    signature = "scenes:clip-reward"
    if rows.dim() == 1:
        bank = ImageBank(world.images[rows], [str(number) for number in range(len(rows))], signature, counts=counts)
    else:
        names = [*ids, *(str(number) for number in range(len(world.images)))]
        places = NeighbourFile(len(ids) + rows, torch.ones(rows.shape), names, signature, "image")
        bank = ImageBank(torch.cat([world.targets, world.images]), names, signature, places, counts)
    text = world.text.float().repeat(len(ids), 1)  # (T * S, D)
    similarity, weights = bank.compare(text, world.targets.float(), ids, batch_size)
    first = torch.zeros(len(text), dtype=torch.long)
    return retrieval_rewards(similarity, first, scale=world.scale, weights=weights).view(len(ids), -1).double()


def measure(
    world: World, batch_size: int, banks: Sequence[Distractors], draws: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Errors of the gradient, as shares of the length of the expected gradient within a batch."""
    generator = torch.Generator().manual_seed(seed)
    probabilities, scores = policy(len(world.targets), generator)

    def gradient(rewards: Tensor) -> Tensor:
        return torch.einsum("ts,ts,tsp->tp", probabilities, rewards, scores)

    def of_one_caption(rewards: Tensor, baseline: Tensor) -> float:
        """Expected squared length of the gradient of one sampled caption per target."""
        advantages = rewards - baseline
        return float((probabilities * advantages**2 * scores.square().sum(2)).sum())

    batch = Distractors("batch", 0, batch_size - 1)
    within = expected_rewards(world, batch, batch_size - 1)
    exact = gradient(within)
    length = float(exact.norm())
    rows = []
    for distractors in (batch, *banks):
        expected = expected_rewards(world, distractors, batch_size - 1)
        counts = distractors.counts(len(world.images))
        mean = gradient(expected)
        spread, caption = [], []
        for _ in range(draws if distractors.random else 1):
            rewards = rewards_with(world, drawn_rows(world, distractors, generator), batch_size, counts)
            # A baseline knows a fixed bank, but not the batch that comes next.
            known = within if distractors is batch else rewards
            baseline = (probabilities * known).sum(1, keepdim=True)
            spread.append(float((gradient(rewards) - mean).square().sum()))
            caption.append(of_one_caption(rewards, baseline) - float(mean.square().sum()))
        rows.append(
            {
                "batch_size": batch_size,
                **distractors._asdict(),
                "label": str(distractors),
                "bias": float((mean - exact).norm()) / length,
                "length": float(mean.norm()) / length,
                "cosine": float((mean * exact).sum()) / float(mean.norm()) / length,
                "spread": (sum(spread) / len(spread)) ** 0.5 / length,
                "sampling": (sum(caption) / len(caption)) ** 0.5 / length,
            }
        )
    return rows


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| images per batch | distractors | bias | length | cosine | standard deviation over banks or batches | "
        "of one sampled caption |",
        "|--:|:--|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['batch_size']} | {row['label']} | {row['bias']:.3f} | {row['length']:.3f} | {row['cosine']:.4f} | "
            f"{row['spread']:.3f} | {row['sampling']:.2f} |"
        )
    return "\n".join([*lines, "", f"Made by `{found['command']}`."])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the result and the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", type=int, default=16, help="Images that are described.")
    parser.add_argument("--images", type=int, default=2000, help="Images from which distractors are drawn.")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[10, 100], help="Images per batch.")
    parser.add_argument("--bank_sizes", type=int, nargs="+", default=[10, 100, 1000], help="Images of a bank.")
    parser.add_argument("--nearest", type=int, nargs="+", default=[10, 100], help="Images of a bank of nearest ones.")
    parser.add_argument("--num_hard", type=int, default=10, help="Nearest images in banks of --bank_sizes images.")
    parser.add_argument(
        "--weighted", type=int, nargs="+", default=[10, 100], help="Nearest images, with importance weights."
    )
    parser.add_argument("--draws", type=int, default=200, help="Banks, and batches, for the standard deviations.")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    world = make_world(arguments.targets, arguments.images)
    hard = arguments.num_hard
    banks = [
        *(Distractors("random", 0, size) for size in arguments.bank_sizes),
        *(Distractors("nearest", size, 0) for size in arguments.nearest),
        *(Distractors("nearest_and_random", hard, size - hard) for size in arguments.bank_sizes if size > hard),
        *(
            Distractors("nearest_and_random", near, size - near, "importance")
            for size in arguments.bank_sizes
            for near in arguments.weighted
            if size > near
        ),
    ]
    rows = [row for size in arguments.batch_sizes for row in measure(world, size, banks, arguments.draws)]
    found = {
        "command": "OMP_NUM_THREADS=1 python scripts/reward_bank.py",
        "captions": len(CAPTIONS),
        "targets": arguments.targets,
        "images": arguments.images,
        "draws": arguments.draws,
        "rows": rows,
    }
    write_json(RESULTS, found)
    write_section(PAGE, "reward_bank", table(found))
    print(table(found))


if __name__ == "__main__":
    main()
