r"""How much of a training step SLE's reward takes: CIDEr-D with greedy baseline, and the distances between captions.

The reward is timed as the trainer computes it, on token ids in one batch: 100 images x 5 samples of 12 to 20 tokens and
their 100 greedy captions, 5 references per image, document frequencies of 5,000 images. The step around it (writing,
forward, backward, AdamW) is timed with SLETrainer itself. One of BLIP-base's shape with 100 images takes many minutes on a
CPU: it is measured with few images, and `fixed + images * seconds per image` says what 100 take.
"""

import argparse
import datetime
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_captionrl.captioners import load_captioner
from hf_captionrl.metrics.table import installed_versions
from hf_captionrl.rewards import RewardContext, RewardData, WeightedRewards, make_baseline
from hf_captionrl.rewards.advantages import compute_advantages
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SLEConfig
from hf_captionrl.utils.model_files import model_path
from scripts.benchmarks.sle_steps import made_up_data, time_steps
from scripts.machine_facts import processor_name
from scripts.make_small_blip import make_small_blip

_END = 0
_TARGET = 0.05
"""Share of the step that the reward may take."""


def _captions(rng: np.random.Generator, number: int, vocabulary: int) -> list[list[int]]:
    """Token ids of captions of 11 to 19 words and the end; word k is 1/k as frequent as the first."""
    lengths = rng.integers(11, 20, number)
    words = np.exp(rng.uniform(0, np.log(vocabulary), lengths.sum())).astype(np.int64)
    return [[*part.tolist(), _END] for part in np.split(words, np.cumsum(lengths)[:-1])]


def _padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [_END] * (width - len(row)) for row in rows])
    return ids, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


def _changed(rng: random.Random, caption: list[int], vocabulary: int) -> list[int]:
    """What a captioner might sample: a reference with up to three words changed."""
    row = list(caption)
    for _ in range(rng.randint(0, 3)):
        row[rng.randrange(len(row) - 1)] = rng.randrange(1, vocabulary)
    return row


def rollout(
    args: SLEConfig, *, num_images: int, training_images: int, vocabulary: int, seed: int
) -> tuple[WeightedRewards, RewardContext, RewardContext]:
    """The prepared rewards, sampled captions and greedy captions."""
    rng, choice = np.random.default_rng(seed), random.Random(seed)
    references = _captions(rng, 5 * training_images, vocabulary)
    rewards = WeightedRewards(*zip(*args.make_rewards(), strict=True))
    rewards.prepare(
        RewardData(
            image_ids=[str(i) for i in range(training_images)],
            references=[[str(5 * i + j) for j in range(5)] for i in range(training_images)],
            image_features=lambda scorer: torch.zeros(0),
            encode=lambda texts: _padded([references[int(text)] for text in texts]),
            eos_token_id=_END,
            device=torch.device("cpu"),
        )
    )

    def context(group_size: int) -> RewardContext:
        drawn = [
            _changed(choice, references[5 * i + choice.randrange(5)], vocabulary)
            for i in range(num_images)
            for _ in range(group_size)
        ]
        ids, mask = _padded(drawn)
        rows = torch.arange(num_images)
        return RewardContext(
            captions=[" ".join(map(str, row)) for row in drawn],
            ids=ids,
            mask=mask,
            ended=torch.ones(len(ids), dtype=torch.bool),
            rows=rows,
            image_ids=[str(i) for i in range(num_images)],
            references=[[]] * num_images,
            candidates=rows,
            positions=rows,
        )

    return rewards, context(args.num_generations), context(1)


def _median_seconds(work: Callable[[], Any], rounds: int) -> dict[str, Any]:
    for _ in range(2):
        work()
    values = []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        work()
        values.append(time.process_time() - start)
    return {
        "median": statistics.median(values),
        "quartiles": np.quantile(values, [0.25, 0.75]).tolist(),
        "rounds": rounds,
    }


def time_reward(*, num_images: int, training_images: int, vocabulary: int, rounds: int, seed: int) -> dict[str, Any]:
    """CPU seconds from captions to advantages, for each distance.

    Returns, for `"bleu34"`, `"edit"` and `"multi_reference"`, median and quartiles in seconds.
    """
    found = {}
    variants = {"bleu34": {}, "edit": {"distance": "edit"}, "multi_reference": {"diversity": "multi_reference"}}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in variants.items():
            args = SLEConfig(folder, use_cpu=True, report_to="none", **settings)  # type: ignore[arg-type]
            rewards, sampled, greedy = rollout(
                args, num_images=num_images, training_images=training_images, vocabulary=vocabulary, seed=seed
            )
            names = {reward.baseline or str(args.baseline) for reward in rewards.rewards}
            baselines = {n: make_baseline(n, args.num_generations) for n in names}

            def work(
                rewards: Any = rewards, baselines: Any = baselines, sampled: Any = sampled, greedy: Any = greedy
            ) -> Any:
                return compute_advantages(rewards, baselines, "greedy", sampled, greedy, lambda value: value)

            found[name] = _median_seconds(work, rounds)
    return found


def _blip_base(args: argparse.Namespace) -> dict[str, Any]:
    dataset, words = made_up_data(max(args.images), args.image_size, args.seed)
    model, processor = make_small_blip(
        words, hidden_size=args.width, num_layers=args.layers, image_size=args.image_size, seed=args.seed
    )
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(processor.tokenizer),
        "image_size": args.image_size,
        "width": args.width,
        "layers": args.layers,
        "tokens": args.tokens,
    }
    captioner = load_captioner(model, processor=processor)
    # The frozen one last: what is frozen stays so.
    for name, frozen in (("all trained", False), ("frozen tower, cached features", True)):
        measured = [
            time_steps(captioner, dataset, num_images=n, steps=args.steps, tokens=args.tokens, frozen=frozen)
            for n in sorted(args.images)
        ]
        few, many = measured[0], measured[-1]
        each = (many["seconds"] - few["seconds"]) / (many["num_images"] - few["num_images"])
        fixed = max(few["seconds"] - few["num_images"] * each, 0.0)
        found[name] = {
            "measured": measured,
            "seconds_an_image": each,
            "fixed_seconds": fixed,
            "seconds_of_100_images": fixed + 100 * each,
        }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--rounds", type=int, default=15, help="How often the reward is timed.")
    parser.add_argument("--steps", type=int, default=2, help="Steps timed at each number of images.")
    parser.add_argument(
        "--images", type=int, nargs=2, default=[1, 3], help="Images of the steps of BLIP-base's shape."
    )
    parser.add_argument(
        "--tokens", type=int, default=16, help="Length of every caption that BLIP-base's shape writes."
    )
    parser.add_argument("--width", type=int, default=768, help="Of BLIP; 768 is base.")
    parser.add_argument("--layers", type=int, default=12, help="Of vision tower and decoder; 12 is base.")
    parser.add_argument("--image-size", type=int, default=224, help="Side in pixels.")
    parser.add_argument("--training-images", type=int, default=5000, help="Images in the document frequencies.")
    parser.add_argument("--vocabulary", type=int, default=30_000, help="Words of the captions that are rewarded.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of captions and weights.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time rewards and steps on one thread.

    Returns `reward` (seconds for each distance), `blip_base`, `embedded` (the shipped captioner, 100 images measured)
    and `share` of the step for each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reward = time_reward(
            num_images=100,
            training_images=args.training_images,
            vocabulary=args.vocabulary,
            rounds=args.rounds,
            seed=args.seed,
        )
        blip = _blip_base(args)
        tiny = load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32)
        scenes = load_scenes(num_train=args.training_images, num_validation=0, num_test=0)["train"]
        embedded = time_steps(tiny, scenes, num_images=100, steps=2 * args.steps, tokens=None, frozen=True)
    finally:
        torch.set_num_threads(threads)
    seconds = reward["bleu34"]["median"]
    share = {
        # The step that was measured rewards next to nothing: at 100 images its reward is added.
        name: seconds / (seconds + blip[name]["seconds_of_100_images"])
        for name in ("all trained", "frozen tower, cached features")
    }
    share["embedded"] = embedded["reward_seconds"] / embedded["seconds"]
    result = {
        "reward": reward,
        "blip_base": blip,
        "embedded": embedded,
        "share": share,
        "training_images": args.training_images,
        "seed": args.seed,
        "processor": processor_name(),
        "versions": installed_versions(),
        "date": datetime.date.today().isoformat(),
    }
    return result


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    blip, embedded, share = result["blip_base"], result["embedded"], result["share"]
    bleu = result["reward"]["bleu34"]
    low, high = (1000 * q for q in bleu["quartiles"])
    others = ", ".join(
        f"`{name}` {1000 * found['median']:.0f} ms" for name, found in result["reward"].items() if name != "bleu34"
    )
    lines = [
        "## `sle_reward`: the cost of SLE's reward",
        "",
        "`python scripts/benchmark.py sle_reward`: CPU-seconds on one thread, fp32, random weights. The reward of 100 images "
        "x 5 samples of 12 to 20 tokens, 5 references per image, and the CIDEr-D of 100 greedy captions take "
        f"**{1000 * bleu['median']:.0f} ms** [{low:.0f}, {high:.0f}] with `bleu34`; {others}. Document frequencies of "
        f"{result['training_images']:,} images are counted once, before training.",
        "",
        "| step of 100 images x 5 captions | seconds | reward, share | at most |",
        "|---|---|---|---|",
    ]
    for name in ("all trained", "frozen tower, cached features"):
        found = blip[name]
        lines.append(
            f"| BLIP of width {blip['width']}, {blip['layers']} layers, {blip['image_size']} px, {blip['tokens']} tokens; "
            f"{name} | {found['seconds_of_100_images']:.0f}, scaled up | {share[name]:.2%} | {_TARGET:.0%} |"
        )
    lines.append(
        f"| the embedded captioner, frozen and cached | {embedded['seconds']:.2f} | {share['embedded']:.1%} | {_TARGET:.0%} |"
    )
    counts = " and ".join(str(one["num_images"]) for one in blip["all trained"]["measured"])
    lines += [
        "",
        f"{result['processor']}, torch {result['versions']['torch']}, transformers {result['versions']['transformers']}, "
        f"{result['date']}. The steps of BLIP's shape were measured with {counts} images. The fixed part (AdamW over "
        f"{blip['parameters'] / 1e6:.0f} M weights) was kept and the rest scaled to 100 images. Larger batches use a "
        "processor more efficiently, so the true share is somewhat higher. With a GPU, the reward also runs on the GPU, "
        "which was not measured. The embedded captioner is the hardest case, because its 1 M weights make the step "
        "cheap; its step was measured with 100 images, its captions and rewards.",
    ]
    return "\n".join(lines)
