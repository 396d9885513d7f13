"""What rewards say of samples of a captioner before it is trained.

    OMP_NUM_THREADS=1 python reproduction/start_samples.py estimators --output reproduction/results/estimators_start.json
    OMP_NUM_THREADS=1 python reproduction/start_samples.py listening --folder RUN --output reproduction/results/listening_start.json

`estimators`: how advantages go with lengths, for the cells of `--row discritune/scenes/estimators`: over 2,000 samples, as predicted, and
within images, which is what a captioner can learn, over 10,000. `listening`: Kendall's tau between the
reward of each scorer of "Who is listening?" and self-retrieval by the truth, among the images of a rollout; RUN is the folder of
`listening_seeds`, over 2,000 samples. Legend: A advantage, L tokens with the end token.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path
from hf_captionrl import SelfRetrievalConfig, SelfRetrievalTrainer, load_scenes, load_scorer
from hf_captionrl.rewards import CiderReward, Reward, SelfRetrieval
from hf_captionrl.utils.io import installed_versions, write_json
from hf_captionrl.utils.model_files import model_path
from reproduction.listening import FACTS, STARTS
from reproduction.observatory import TruthRetrieval
from reproduction.runs import hardware

SAMPLES, NUMBER = 2, 2000
START = "scenes:blip-mle"


class Recorded(Reward):
    """A reward that keeps what it returns, and the lengths of the captions, by the number of captions per image."""

    def __init__(self, reward: Any, place: int) -> None:
        self.reward, self.name = reward, f"{reward.name}_{place}"
        self.kept: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {1: [], SAMPLES: []}

    def prepare(self, data: Any) -> None:
        self.reward.prepare(data)

    def __call__(self, context: Any) -> Any:
        found = self.reward(context)
        self.kept[context.group_size].append((found.double().nan_to_num().numpy(), context.mask.sum(1).numpy()))
        return found

    def all(self, group_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rewards and lengths, both `(images, group_size)`."""
        found, tokens = (np.concatenate(part) for part in zip(*self.kept[group_size], strict=True))
        return found.reshape(-1, group_size), tokens.reshape(-1, group_size)


def sampled(
    start: str,
    rewards: Sequence[Any],
    *,
    number: int = NUMBER,
    temperature: float = 1.0,
    images: int = 50,
    seed: int = 0,
) -> list[Recorded]:
    """The rewards of so many samples, in rollouts of so many images; the captioner does not change."""
    recorded = [Recorded(reward, place) for place, reward in enumerate(rewards)]
    with tempfile.TemporaryDirectory() as folder:
        args = SelfRetrievalConfig(
            folder,
            learning_rate=0.0,
            max_steps=number // (images * SAMPLES),
            per_device_train_batch_size=images,
            num_generations=SAMPLES,
            do_sample=True,
            temperature=temperature,
            max_completion_length=38,
            freeze_vision_tower=True,
            cache_image_features=True,
            baseline="greedy",  # so that greedy captions are rewarded, too
            guard="off",
            seed=seed,
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        scorer, train = load_scorer(model_path("scenes:clip-reward")), load_scenes()["train"]
        SelfRetrievalTrainer(start, scorer, args, train, reward_funcs=recorded).train()
    return recorded


def within(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Covariance of the two samples `(M, 2)` of an image, averaged over M images, with its standard error."""
    products = np.diff(first)[:, 0] * np.diff(second)[:, 0] / 2
    return {"mean": float(products.mean()), "standard_error": float(products.std(ddof=1) / np.sqrt(len(products)))}


def covariances(reward: Any, temperature: float) -> dict[str, Any]:
    """Mean advantage, Cov(A, L) and Cov(A / L, L) for each baseline: of NUMBER samples together, and within images."""
    (recorded,) = sampled(model_path(START), [reward], number=5 * NUMBER, temperature=temperature)
    rewards, lengths = recorded.all(SAMPLES)  # (M, 2)
    greedy, _ = recorded.all(1)  # (M, 1)
    first = slice(NUMBER // SAMPLES)
    baselines = {"running": rewards[first].mean(), "greedy": greedy, "others": rewards[:, ::-1]}
    result: dict[str, Any] = {"samples": int(rewards.size), "tokens": float(lengths.mean())}
    for name, baseline in baselines.items():
        advantages = rewards - baseline
        weights = advantages / lengths
        pooled = [np.cov(weight[first].ravel(), lengths[first].ravel())[0, 1] for weight in (advantages, weights)]
        of_mean = within(weights, lengths)
        if name == "others":  # its advantage contains the other sample, which is independent of this one's length
            found = within(rewards, 1 / lengths)
            of_mean = {
                key: sign * float(lengths.mean()) * found[key] for key, sign in (("mean", -1), ("standard_error", 1))
            }
        result[name] = {
            "advantage": float(advantages.mean()),
            "negative": float((advantages < 0).mean()),
            "positive": float((advantages > 0).mean()),
            "of_sum": float(pooled[0]),
            "of_mean": float(pooled[1]),
            "of_sum_within": within(rewards, lengths),
            "of_mean_within": of_mean,
        }
    return result


def estimators() -> dict[str, Any]:
    """[`covariances`] for both rewards and temperatures."""
    scorer = load_scorer(model_path("scenes:clip-reward"))
    rewards: dict[str, Callable[[], Any]] = {
        "estimators_seeds": lambda: SelfRetrieval(scorer),
        "estimators_cider_seeds": CiderReward,
    }
    return {run: {f"T {t:g}": covariances(make(), t) for t in (1.0, 0.3)} for run, make in rewards.items()}


def listening(folder: Path, seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Tau by start and scorer, one per seed: over all samples, and the share of images whose better sample both prefer, ties left out."""
    scorers = {facts: load_scorer(str(folder / f"scorer-{facts}")) for facts in FACTS}
    found: dict[str, Any] = {
        f"{start}, {facts} facts": {"tau": [], "same_better": []} for start in STARTS for facts in FACTS
    }
    for start in STARTS:
        for seed in seeds:
            path = model_path(START) if start == "short" else str(folder / f"start-{start}" / f"seed-{seed}" / "model")
            rewards = [TruthRetrieval(), *(SelfRetrieval(scorer) for scorer in scorers.values())]
            truth, *others = (one.all(SAMPLES)[0] for one in sampled(path, rewards, images=100, seed=seed))
            for facts, reward in zip(FACTS, others, strict=True):
                row = found[f"{start}, {facts} facts"]
                row["tau"].append(float(kendalltau(reward.ravel(), truth.ravel()).statistic))
                signs = np.sign(np.diff(reward)) * np.sign(np.diff(truth))
                row["same_better"].append(float((signs[signs != 0] > 0).mean()))
    return {"seeds": list(seeds), "rows": found}


def main() -> None:
    """Measure, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["estimators", "listening"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    found = estimators() if args.what == "estimators" else listening(args.folder)
    write_json(args.output, {**found, "versions": installed_versions(), "hardware": hardware()})


if __name__ == "__main__":
    main()
