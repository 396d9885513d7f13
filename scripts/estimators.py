"""What advantages have to do with lengths before training: the start of `--row discritune/scenes/estimators`, measured.

    OMP_NUM_THREADS=1 python scripts/estimators.py --output docs/results/estimators_start.json

2,000 samples per temperature and reward, in rollouts of 50 images with two samples. Legend: A advantage, L tokens with the end token.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hf_captionrl import SelfRetrievalConfig, SelfRetrievalTrainer, load_scenes, load_scorer
from hf_captionrl.rewards import CiderReward, Reward, SelfRetrieval
from hf_captionrl.utils.io import installed_versions, write_json
from hf_captionrl.utils.model_files import model_path

IMAGES, SAMPLES, STEPS = 50, 2, 20


class Recorded(Reward):
    """A reward that keeps what it returns, and the lengths of the captions, by the number of captions per image."""

    def __init__(self, reward: Any) -> None:
        self.reward, self.name = reward, reward.name
        self.kept: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {1: [], SAMPLES: []}

    def prepare(self, data: Any) -> None:
        self.reward.prepare(data)

    def __call__(self, context: Any) -> Any:
        found = self.reward(context)
        self.kept[context.group_size].append((found.double().nan_to_num().numpy(), context.mask.sum(1).numpy()))
        return found


def measure(reward: Any, temperature: float) -> dict[str, Any]:
    """Mean advantage, Cov(A, L) and Cov(A / L, L) for each baseline; the captioner does not change."""
    recorded = Recorded(reward)
    with tempfile.TemporaryDirectory() as folder:
        args = SelfRetrievalConfig(
            folder,
            learning_rate=0.0,
            max_steps=STEPS,
            per_device_train_batch_size=IMAGES,
            num_generations=SAMPLES,
            do_sample=True,
            temperature=temperature,
            max_completion_length=38,
            freeze_vision_tower=True,
            cache_image_features=True,
            baseline="greedy",  # so that greedy captions are rewarded, too
            guard="off",
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        scorer = load_scorer(model_path("scenes:clip-reward"))
        train = load_scenes()["train"]
        SelfRetrievalTrainer(model_path("scenes:blip-mle"), scorer, args, train, reward_funcs=[recorded]).train()
    rewards = np.concatenate([found.reshape(IMAGES, SAMPLES) for found, _ in recorded.kept[SAMPLES]])  # (M, 2)
    lengths = np.concatenate([tokens.reshape(IMAGES, SAMPLES) for _, tokens in recorded.kept[SAMPLES]])
    greedy = np.concatenate([found for found, _ in recorded.kept[1]])[:, None]  # (M, 1)
    baselines = {"running": rewards.mean(), "greedy": greedy, "others": rewards[:, ::-1]}
    result: dict[str, Any] = {"samples": int(rewards.size), "tokens": float(lengths.mean())}
    for name, baseline in baselines.items():
        advantages = rewards - baseline
        result[name] = {
            "advantage": float(advantages.mean()),
            "of_sum": float(np.cov(advantages.ravel(), lengths.ravel())[0, 1]),
            "of_mean": float(np.cov((advantages / lengths).ravel(), lengths.ravel())[0, 1]),
        }
    return result


def main() -> None:
    """Measure both rewards at both temperatures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    rewards = {"estimators_seeds": SelfRetrieval, "estimators_cider_seeds": CiderReward}
    scorer = load_scorer(model_path("scenes:clip-reward"))
    found = {
        run: {f"T {t:g}": measure(make(scorer) if make is SelfRetrieval else make(), t) for t in (1.0, 0.3)}
        for run, make in rewards.items()
    }
    write_json(output, {**found, "versions": installed_versions()})


if __name__ == "__main__":
    main()
