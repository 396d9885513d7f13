"""The recipes that finetune with SMILE, on images and on videos."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed
from transformers.trainer_utils import IntervalStrategy

from hf_captionrl.apps.experiments.arguments import RecipeDefaults
from hf_captionrl.apps.experiments.report import (
    START,
    Run,
    alone_in_folder,
    compare_runs,
    is_trained,
    plan_runs,
    prepare,
)
from hf_captionrl.captioners import load_captioner
from hf_captionrl.data import cached_features, frames_of
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.metrics import emscore
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.clip_scores import emscore_matrix
from hf_captionrl.metrics.columns import COLUMNS, VIDEO_COLUMNS, Column
from hf_captionrl.retrieval import FeatureCache
from hf_captionrl.retrieval.ranking import ranks_from_scores, recall_at_k
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.utils.options import documented

# --- Evaluation of captions of videos, with EMScore ------------------------------------------------------------------
# Legend: N videos, F frames, D features.


class VideoEvaluator(Evaluator):
    """Evaluates captions of videos like [`Evaluator`], and with EMScore if the held-out scorer has token features."""

    def __init__(self, *args: Any, cache_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, cache_dir=cache_dir, **kwargs)
        number = frames_of(self.dataset)
        if not number:
            raise ValueError("The data are images. Set num_frames to the number of frames per video, for example 8.")
        self.frame_features: list[Tensor] | None = None
        scorer: Any = self.held_out_scorer
        references = spoken([text for texts in self.references for text in texts])
        try:
            rows = iter(scorer.token_features(references))
        except (AttributeError, ValueError):  # SigLIP and other text towers of fixed length have no features of tokens
            return
        cache = FeatureCache.for_scorer(scorer, cache_dir, what=f"image_{number}_frames")
        frames = cached_features(cache, self.dataset, scorer.image_features, unit_length=True, pooling="concat")
        self.frame_features = list(frames.tensor().float())  # N times (F, D)
        self._features_of = [{text: next(rows).cpu() for text in texts} for texts in self.references]

    def more_numbers(self, captions: Sequence[str], references: Sequence[list[str]] | None) -> dict[str, Any]:
        if self.frame_features is None:
            reason = "the held-out scorer has no token features; use a CLIP of transformers or open_clip"
            keys = [column.key for column in VIDEO_COLUMNS]
            return dict.fromkeys(keys) | {f"{key}_reason": reason for key in keys}
        scorer: Any = self.held_out_scorer
        tokens = [r.cpu() for r in scorer.token_features(spoken(captions))]
        groups = self.references if references is None else references  # or some of them
        texts = [[rows[text] for text in group] for rows, group in zip(self._features_of, groups, strict=True)]
        found = emscore(tokens, self.frame_features, reference_features=texts)
        ranks = ranks_from_scores(emscore_matrix(tokens, self.frame_features), torch.arange(len(tokens)))
        recalls = {f"emscore_recall_at_{k}": recall_at_k(ranks, k) for k in (1, 5)}
        values = {"emscore": found["f"], "emscore_references": found["reference_f"]}
        return values | recalls | {f"emscore_{name}": found[name] for name in ("precision", "recall")}


# --- The recipes that finetune with SMILE, on images and on videos ---------------------------------------------------

FIRST = "MLE first"
"""Row name of the captioner after `mle_epochs`, which the other runs continue."""


@dataclass
class SmileArguments:
    """What is compared."""

    compare_mle_weights: list[float] = field(
        default_factory=list, metadata={"help": "Lambdas of further runs; 1 is the control, further steps of MLE."}
    )
    mle_epochs: float = documented(0.0, "Epochs of maximum likelihood before all compared runs.")
    mle_learning_rate: float | None = documented(None, "Peak learning rate of these epochs. None: learning_rate.")


@dataclass
class SmileRecipeConfig(RecipeDefaults, SmileConfig):
    """[`SmileConfig`] with the defaults of a recipe: it evaluates every epoch and keeps the one with the best R@1."""


def run_name(config: SmileConfig) -> str:
    """Row name of a finetuned captioner."""
    if config.mle_weight == 1.0:
        return "MLE+MLE"
    notes = []
    if config.mle_weight > 0:
        notes.append(f"lambda={config.mle_weight:g}")
    if config.subset != "caption":
        notes.append(f"{config.subset} subset")
    if config.first_token not in (None, "mle"):
        notes.append(f"first token: {config.first_token}")
    return "SMILE" + (f" ({', '.join(notes)})" if notes else "")


def _first(config: SmileRecipeConfig, arguments: SmileArguments, folder: Path) -> SmileRecipeConfig:
    """The configuration of the initial epochs of maximum likelihood."""
    first = copy.deepcopy(config)  # TrainingArguments' __post_init__ must not run a second time
    first.mle_weight, first.first_token, first.subset = 1.0, None, "caption"
    first.num_train_epochs = arguments.mle_epochs
    first.learning_rate = arguments.mle_learning_rate or config.learning_rate
    first.max_steps = -1  # max_steps limits only the compared runs
    first.early_evaluations = []
    # The other runs continue from its last epoch, so no epoch is selected.
    first.eval_strategy, first.load_best_model_at_end = IntervalStrategy.NO, False  # type: ignore[assignment]
    first.output_dir = str(folder)
    return first


def runs_of(config: SmileRecipeConfig, compare_mle_weights: Sequence[float]) -> dict[str, SmileRecipeConfig]:
    """The runs by row name, in the order of the table: the control, the configured run, the mixtures."""
    weights = sorted({config.mle_weight, *compare_mle_weights}, key=lambda w: (w != 1.0, w))
    # The control is plain maximum likelihood, whatever the settings of SMILE.
    plain = {"first_token": None, "subset": "caption"}
    changes = ({"mle_weight": weight} | (plain if weight == 1.0 else {}) for weight in weights)
    return plan_runs(config, ((None, each) for each in changes), run_name)


def make_trainer(captioner: Any, run: Any, splits: Any, scorer: Any, model_args: Any) -> SmileTrainer:
    """The trainer of one run."""
    data = {"train_dataset": splits["train"], "eval_dataset": splits["validation"]}
    return SmileTrainer(captioner, run, **data, scorer=scorer, peft_config=model_args.peft_config)


@alone_in_folder
def compare_smile(
    arguments: tuple[Any, ...],
    *,
    title: str = "SMILE",
    make_evaluator: Callable[..., Evaluator] = Evaluator.from_arguments,
    columns: Sequence[Column] = COLUMNS,
) -> Path:
    """Train and compare the runs of a recipe."""
    model_args, _, _, smile_args, config = arguments
    is_training = is_trained(config)
    has_mle_stage = is_training and smile_args.mle_epochs > 0
    if has_mle_stage and model_args.tune is not None:
        raise ValueError(f"mle_epochs is {smile_args.mle_epochs:g}, without a LoRA. Leave out --tune, or use 0.")
    splits, scorer, evaluator = prepare(arguments, make_evaluator=make_evaluator)
    first_folder = Path(config.output_dir) / "model-mle"

    def make(run: SmileRecipeConfig) -> SmileTrainer:
        if has_mle_stage and run.output_dir != str(first_folder):
            captioner = load_captioner(str(first_folder), prompt=run.prompt, dtype=torch.float32)
        else:
            if model_args.fresh_language_model:
                set_seed(config.seed)
            captioner = model_args.load(run.prompt)
        return make_trainer(captioner, run, splits, scorer, model_args)

    configs = runs_of(config, smile_args.compare_mle_weights if is_training else [])
    runs = [Run(FIRST, _first(config, smile_args, first_folder), make)] if has_mle_stage else []
    runs += [Run(name, run, make, FIRST if has_mle_stage else START) for name, run in configs.items()]
    objective = {
        "objective": "mle" if not is_training or config.mle_weight == 1.0 else "smile",
        "mle_weight": config.mle_weight,
        "first_token": "mle" if config.first_token in (None, "mle") else "smile",
    }
    return compare_runs(runs, evaluator, arguments, splits, title=title, objective=objective, columns=columns)
