"""Every reward under one budget on the embedded world, against exact truth. reproduction/predictions.md holds the hypotheses.

    OMP_NUM_THREADS=1 python reproduction/observatory.py --runs_dir outputs/observatory --output reproduction/results/observatory.json

runs what is missing, one file per run, and puts all runs together.

A run finetunes the whole language side of scenes:blip-mle for 200 steps of 100 images, one sample each, with the batch's mean as baseline and
without penalties, and measures greedy captions of 500 test scenes. `held_back` is another draw of the world, measured once, at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only reproduction/ is on the path

from hf_captionrl import SelfRetrievalConfig, SelfRetrievalTrainer, load_captioner, load_scenes, load_scorer  # noqa: E402
from hf_captionrl.captioners.pipeline import evaluating, generate_captions, vision_tower_features  # noqa: E402
from hf_captionrl.experimental.claim_rewards import (  # noqa: E402
    ClaimReward,
    SceneChecker,
)
from hf_captionrl.experimental.gallery import GalleryReward  # noqa: E402
from hf_captionrl.experimental.question_rewards import QuestionReward  # noqa: E402
from hf_captionrl.metrics import caption_perplexity, cider_d, faithfulness, self_retrieval  # noqa: E402
from hf_captionrl.retrieval import nearest_neighbours  # noqa: E402
from hf_captionrl.rewards import CiderReward, Reward, SelfRetrieval  # noqa: E402
from hf_captionrl.scenes import check  # noqa: E402
from hf_captionrl.utils.io import installed_versions, write_json  # noqa: E402
from hf_captionrl.utils.model_files import load_language_model, model_path  # noqa: E402
from reproduction.run_seeds import aggregate_curves  # noqa: E402

POINTS = (0, 25, 50, 100, 150, 200)
LOGGED = ("reward", "kl", "listener/accuracy")
LATER = ("gallery", "own listener", "listener of the start")  # have predictions of their own
BIAS = 0.03  # what the biased judge adds per word; its unbiased part is in [0, 1]


class TruthRetrieval(Reward):
    """Self-retrieval by the truth: log-softmax over the images of the step of the numbers of true minus wrong claims."""

    name = "truth_retrieval"

    def __call__(self, context: Any) -> torch.Tensor:
        facts = context.columns["facts"]
        scores = torch.tensor([[self._score(caption, one) for one in facts] for caption in context.captions])  # (N, B)
        own = torch.arange(len(context.captions)) // context.group_size
        return scores.double().log_softmax(1)[torch.arange(len(own)), own]

    @staticmethod
    def _score(caption: str, facts: Any) -> float:
        found = check(caption, facts)
        return float(len(found.right) - len(found.wrong))


class Perplexity(Reward):
    """Mean log-probability of a token under the language model of the world, in nats."""

    name = "log_prob"

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        folder = model_path("scenes:gpt2-perplexity")
        self.model, self.tokenizer = (
            load_language_model(folder),
            AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        )

    def __call__(self, context: Any) -> torch.Tensor:
        spoken = [caption if caption.strip() else "a" for caption in context.captions]
        found = caption_perplexity(spoken, self.model, self.tokenizer)["per_sample"]
        return -torch.as_tensor(found).double().log()


class PolicyListener(Reward):
    """Log-probability of the image among 10 given the caption, by Bayes' rule from those of the caption given each image.

    The captioner is its own listener (a reference game), or with `frozen` the start is, which cannot collude.
    """

    name = "listener"
    num_images = 10

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen

    def begin(self, captioner: Any, images: Any) -> None:
        """The policy, and features of its vision tower `(num_images, M, D)`."""
        self.images = images
        self.captioner = load_captioner(model_path("scenes:blip-mle")) if self.frozen else captioner

    def __call__(self, context: Any) -> torch.Tensor:
        number = len(context.captions)
        own = torch.arange(number) // context.group_size
        batch, scores = self.captioner.encode_completions(context.ids, context.mask), []
        with evaluating(self.captioner.model), torch.no_grad():
            for k in range(self.num_images):
                rows = context.rows.cpu()[(own + k) % len(context.rows)]
                features = torch.from_numpy(np.array(self.images[rows.numpy()]))
                inputs = {**batch, "image_features": features}
                log_probs: Any = self.captioner.log_probs(inputs, of_generation=True)  # (N, T)
                scores.append(log_probs.sum(1))
        found = torch.stack(scores, 1)  # (N, K)
        context.statistics["listener/accuracy"] = (found.argmax(1) == 0).float().tolist()
        return found.double().log_softmax(1)[:, 0]


def biased_judge(completions: Sequence[str], facts: Sequence[Any], **columns: Any) -> list[float]:
    """F1 of the claims, plus 0.03 per word."""
    checked = SceneChecker()(completions, facts)
    scores = []
    for text, one in zip(completions, checked, strict=True):
        precision, recall = one.precision, (one.num_stated or 0) / max(one.num_facts or 0, 1)
        scores.append(2 * precision * recall / max(precision + recall, 1e-9) + BIAS * len(text.split()))
    return scores


def random_reward(seed: int) -> Callable[..., list[float]]:
    """Uniform numbers, whatever the caption."""
    generator = torch.Generator().manual_seed(seed)

    def random(completions: Sequence[str], **columns: Any) -> list[float]:
        return torch.rand(len(completions), generator=generator).tolist()

    return random


def rewards(scorer: Any, seed: int) -> dict[str, Callable[[], Any]]:
    """The rewards by name; "SR, bags of 5" differs from "SR" in its batches only."""
    return {
        "CIDEr": CiderReward,
        "SR": lambda: SelfRetrieval(scorer),
        "SR, bags of 5": lambda: SelfRetrieval(scorer),
        "CLIPScore": lambda: SelfRetrieval(scorer, reward_kind="cosine"),
        "log-probability": Perplexity,
        "precision of claims": lambda: ClaimReward(score="precision"),
        "recall of claims": lambda: ClaimReward(score="recall"),
        "F1 of claims": ClaimReward,
        "questions, exact reader": lambda: QuestionReward("oracle"),
        "questions, guessing reader": lambda: QuestionReward("prior"),
        "judge with length bias": lambda: biased_judge,
        "SR by truth": TruthRetrieval,
        "random": lambda: random_reward(seed),
        "gallery": lambda: GalleryReward(scorer),
        "own listener": lambda: PolicyListener(frozen=False),
        "listener of the start": lambda: PolicyListener(frozen=True),
    }


def measure(captioner: Any, scenes: Any, held_out: Any, images: torch.Tensor) -> dict[str, float]:
    """Numbers of the greedy captions of some scenes."""
    captions = generate_captions(captioner, list(scenes["image"]), batch_size=250, num_beams=1, max_new_tokens=40)
    spoken = [caption if caption.strip() else "a" for caption in captions]
    truth = faithfulness(spoken, scenes["facts"], check)
    found = self_retrieval(held_out.text_features(spoken), images, num_distractors=99)
    return {
        "words": sum(len(caption.split()) for caption in captions) / len(captions),
        "fact_recall": float(truth["fact_recall"]),
        "hallucination": float(truth["hallucination"]),
        "unique": len(set(captions)) / len(captions),
        "rd100_recall_at_1": float(found["recall_at_1"]),
        "cider_d": float(cider_d(spoken, list(scenes["captions"]))["cider_d"]),
    }


def run(name: str, seed: int, output: Path) -> None:
    """Train with one reward, and write its points."""
    scorer, held_out = (load_scorer(model_path(f"scenes:{n}")) for n in ("clip-reward", "siglip-held-out"))
    reward = rewards(scorer, seed)[name]()
    worlds = [load_scenes(num_train=0, num_validation=0, num_test=500, seed=s)["test"] for s in (0, 2027)]
    features = [held_out.image_features(list(world["image"])) for world in worlds]
    points: list[dict[str, float]] = []

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in POINTS:
                points.append(
                    {"step": state.global_step, **measure(trainer.captioner, worlds[0], held_out, features[0])}
                )

    with tempfile.TemporaryDirectory() as folder:
        args = SelfRetrievalConfig(
            folder,
            learning_rate=1e-4,
            max_steps=POINTS[-1],
            per_device_train_batch_size=100,
            do_sample=True,
            max_completion_length=38,
            freeze_vision_tower=True,
            cache_image_features=True,
            baseline="batch_mean",
            bag_schedule={1: 5} if name == "SR, bags of 5" else None,
            beta=1e-8,  # so small that it changes nothing: the divergence from the start is logged
            guard="warn",
            seed=seed,
            logging_steps=25,
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        train = load_scenes()["train"]
        bags = args.bag_schedule is not None
        trainer = SelfRetrievalTrainer(
            model_path("scenes:blip-mle"),
            scorer,
            args,
            train,
            reward_funcs=[reward],
            neighbours=nearest_neighbours(scorer.image_features(list(train["image"])), 200)[0] if bags else None,
            callbacks=[Measure()],
        )
        if isinstance(reward, PolicyListener):
            reward.begin(trainer.captioner, vision_tower_features(trainer.captioner, train))
        points.append({"step": 0, **measure(trainer.captioner, worlds[0], held_out, features[0])})
        start = measure(trainer.captioner, worlds[1], held_out, features[1])
        trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "reward" in entry}
    for point in points:
        entry = logged.get(int(point["step"]), {})
        point |= {key: float(entry[key]) for key in LOGGED if key in entry}
    held_back = {"start": start, "end": measure(trainer.captioner, worlds[1], held_out, features[1])}
    write_json(output, {"reward": name, "seed": seed, "points": points, "held_back": held_back})


def main() -> None:
    """Run what is missing, and write one file of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rewards", nargs="+", default=[name for name in rewards(None, 0) if name not in LATER])
    args = parser.parse_args()
    curves: list[dict[str, Any]] = []
    held_back: list[dict[str, Any]] = []
    for seed in args.seeds:
        curves.append({})
        held_back.append({})
        for name in args.rewards:
            target = args.runs_dir / "".join(c if c.isalnum() else "-" for c in name) / f"seed-{seed}.json"
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                run(name, seed, target)
                print(target, flush=True)
            found = json.loads(target.read_text("utf-8"))
            curves[-1][name] = found["points"]
            ends = found["held_back"]
            held_back[-1][name] = [{"step": 0, **ends["start"]}, {"step": POINTS[-1], **ends["end"]}]
    words = " ".join(sys.argv[1:]).replace(str(args.runs_dir), "outputs/observatory").replace(str(args.output), "FILE")
    record = {"command": f"python reproduction/observatory.py {words}", "seeds": args.seeds}
    record |= {"versions": installed_versions()}
    record |= {"learning_curves": aggregate_curves(curves), "held_back": aggregate_curves(held_back)}
    write_json(args.output, record)


if __name__ == "__main__":
    main()
