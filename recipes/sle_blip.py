"""Finetune a captioner by sequence-level exploration: captions that agree with the references and differ from each other.

Without arguments, on the embedded world (4 minutes on 2 CPU cores, no network): CIDEr-D alone (SLL),
CIDEr-D with a bonus for the entropy of each word (SLL-ME), and CIDEr-D with distances between captions (SLE).

    accelerate launch recipes/sle_blip.py

With the paper's settings on COCO, or on your own photographs with captions in `metadata.jsonl`:

    accelerate launch recipes/sle_blip.py --config recipes/configs/sle_blip/coco.yaml \
        --dataset_name dataset_coco.json --image_root coco/images
    accelerate launch recipes/sle_blip.py --model_name_or_path Salesforce/blip-image-captioning-base \
        --dataset_name imagefolder --data_dir photos --output_dir outputs/photos

On videos, TGIF in its own layout (tgif-v1.0.tsv, splits/, and the GIFs in gifs/), Table 3 of the paper:

    accelerate launch recipes/sle_blip.py --row sle/table3/sle --data_dir TGIF

Source: Chen and Jin 2020, "Better Captioning with Sequence-Level Exploration".
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from hf_captionrl.apps.experiments.arguments import (
    DataArguments,
    ModelArguments,
    RecipeDefaults,
    output_folder,
    parse_arguments,
    with_default,
)
from hf_captionrl.apps.experiments.data import SampleArguments, Sampler, write_samples
from hf_captionrl.apps.experiments.report import (
    START,
    Comparison,
    Run,
    alone_in_folder,
    compare_runs,
    is_trained,
    plan_runs,
    prepare,
)
from hf_captionrl.captioners import Captioner, load_captioner
from hf_captionrl.evaluation.options import EvaluationArguments
from hf_captionrl.metrics.columns import COLUMNS, SAMPLE_COLUMNS
from hf_captionrl.rewards import WeightedRewards
from hf_captionrl.trainers import SLEConfig, SLETrainer
from hf_captionrl.utils.console import run_main
from hf_captionrl.utils.options import documented

__all__ = ["main", "parse_args"]

CONFIGS = Path(__file__).parent / "configs" / "sle_blip"
SLL = "SLL"
"""Row name of the captioner trained with CIDEr-D alone."""
XE = "XE"
"""Row name of the captioner after cross-entropy, which the other runs continue."""
FILES = ("tradeoff.png", "panel.html", "samples.json")
"""What the recipe writes in addition to the report."""


@dataclass
class SLEArguments(SampleArguments):
    """The runs to compare, and how captions are sampled for the table."""

    compare_alphas: list[float] = field(
        default_factory=lambda: [1.0], metadata={"help": "Additional runs with these alphas; 1 is SLL, CIDEr-D alone."}
    )
    compare_entropy_weights: list[float] = field(
        default_factory=lambda: [0.01], metadata={"help": "Additional runs with alpha=1 and these weights: SLL-ME."}
    )
    report_best_alpha: bool = documented(False, "Report the alpha with the most diverse samples at SLL's CIDEr-D.")


@dataclass
class SLEBlipConfig(RecipeDefaults, SLEConfig):  # type: ignore[misc]
    """[`SLEConfig`] with the defaults of a recipe: it evaluates every epoch and keeps the best one."""

    output_dir: str | None = output_folder("sle_blip")
    guard: Literal["off", "warn", "stop", "rollback"] = with_default(SLEConfig, "guard", "rollback")


def parse_args(argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line."""
    types = (ModelArguments, DataArguments, EvaluationArguments, SLEArguments, SLEBlipConfig)
    return parse_arguments(types, argv, default_config=CONFIGS / "scenes.yaml")


def run_name(config: SLEConfig) -> str:
    """Row name of a finetuned captioner."""
    entropy = f"entropy={config.entropy_weight:g}"
    if config.alpha == 1.0:
        return f"SLL-ME ({entropy})" if config.entropy_weight else SLL
    notes = [f"alpha={config.alpha:g}"]
    if config.diversity != "pairwise":
        notes.append(config.diversity.replace("_", "-"))
    elif config.distance != "bleu34":
        notes.append(config.distance)
    return f"SLE ({', '.join([*notes, entropy] if config.entropy_weight else notes)})"


def runs_of(config: SLEBlipConfig, arguments: SLEArguments) -> list[SLEBlipConfig]:
    """The configurations to compare, with the recipe's own at the end.

    All runs share the epochs of cross-entropy, which are therefore trained once, in a separate run.
    """
    pairs = {(alpha, 0.0) for alpha in arguments.compare_alphas}
    pairs |= {(1.0, weight) for weight in arguments.compare_entropy_weights}
    # Only the configured run has its settings; a control must not contain a part of the method.
    own = (config.alpha, config.entropy_weight)
    epochs = {"num_train_epochs": config.num_train_epochs - config.rl_start_epoch, "rl_start_epoch": 0}
    planned = [*sorted(pairs - {own}, key=lambda pair: (-pair[0], pair[1])), own]
    changes = [(None, {"alpha": alpha, "entropy_weight": weight, **epochs}) for alpha, weight in planned]
    runs = list(plan_runs(config, changes, run_name).values())
    if config.rl_start_epoch:
        first = copy.deepcopy(config)
        first.num_train_epochs, first.max_steps = config.rl_start_epoch, -1
        first.load_best_model_at_end = False  # the other runs continue from its last epoch
        first.output_dir = str(Path(str(config.output_dir)) / "model-xe")
        runs.insert(0, first)
    # If cross-entropy takes all epochs, no other run remains to compare with.
    return runs if runs[-1].num_train_epochs > 0 or config.max_steps > 0 else runs[:1]


def name_of(run: SLEConfig) -> str:
    """Row name of a run; cross-entropy is the run in which RL has not started."""
    return XE if run.rl_start_epoch else run_name(run)


def describe_reward(config: SLEConfig) -> str:
    """One sentence on the reward, for the model card."""
    reward = WeightedRewards(*zip(*config.make_rewards(), strict=True)).describe()
    entropy = f", plus {config.entropy_weight:g} times the entropy of each word" if config.entropy_weight else ""
    baseline = "no baseline" if config.baseline in (None, "none") else f"baseline {config.baseline!r}"
    return (
        f"{reward[0].upper()}{reward[1:]}{entropy}; {config.num_generations} sampled captions per image; {baseline}."
    )


def best_alpha(validation: Sampler) -> dict[str, Any]:
    """The run whose samples of the validation split are the most diverse (Div-2) at the CIDEr-D of SLL's, and prints it."""
    compared = validation.at_equal_cider_d(SLL)
    div_2 = {name: numbers["div_2"] for name, numbers in compared.items() if numbers is not None}
    best = max(sorted(div_2.keys() - {SLL}), key=lambda name: div_2[name], default=None)
    if best is None:
        print("No alpha below 1 can be compared at the CIDEr-D of SLL's samples on the validation split.")
    else:
        print(
            f"Best alpha on the validation split: {best}, Div-2 {div_2[best]:.3f} at the CIDEr-D of SLL's samples, "
            f"whose Div-2 is {div_2[SLL]:.3f}."
        )
    return {"name": best, "on": "validation", "at_equal_cider_d": compared}


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the recipe."""
    return compare(parse_args(argv))


def _check(
    model_args: ModelArguments, data_args: DataArguments, sle_args: SLEArguments, config: SLEBlipConfig
) -> None:
    """Refuse invalid settings before videos are read, which can take hours."""
    if data_args.num_frames and not config.cache_image_features:
        raise ValueError(
            f"num_frames is {data_args.num_frames}. Add --freeze_vision_tower and --cache_image_features."
        )
    if sle_args.report_best_alpha:
        own = set() if config.entropy_weight else {config.alpha}
        alphas = {*sle_args.compare_alphas} | own  # those of runs without a bonus for word entropy
        if not (1.0 in alphas and len(alphas) > 2):
            raise ValueError(f"report_best_alpha needs 1 and two other alphas, not the alphas {sorted(alphas)}.")
        if {1.0, *sle_args.sample_temperatures} == {1.0}:
            raise ValueError("report_best_alpha interpolates, but sample_temperatures has only 1. Add others.")
    if model_args.tune is not None and config.rl_start_epoch:
        raise ValueError(f"rl_start_epoch is {config.rl_start_epoch}, without a LoRA. Leave out --tune, or use 0.")


@alone_in_folder
def compare(arguments: tuple[Any, ...]) -> Path:
    """Train and compare the runs of the recipe."""
    model_args, data_args, _, sle_args, config = arguments
    _check(model_args, data_args, sle_args, config)
    output_dir = Path(config.output_dir)
    splits, scorer, evaluator = prepare(arguments)
    is_training = is_trained(config)
    configs = runs_of(config, sle_args) if is_training else [copy.deepcopy(config)]
    configs[-1].output_dir = str(output_dir / "model")
    start_folder = output_dir / "model-xe" if len(configs) > 1 and config.rl_start_epoch else None

    def load(folder: Path | None) -> Captioner:
        if folder is None:
            return model_args.load(config.prompt)
        return load_captioner(str(folder), prompt=config.prompt, dtype=torch.float32)

    def make(run: SLEBlipConfig) -> SLETrainer:
        return SLETrainer(
            load(None if run.rl_start_epoch else start_folder),
            run,
            # Without training, the rewards need no features of the training images.
            train_dataset=splits["train"] if is_training else None,
            eval_dataset=splits["validation"],
            scorer=scorer,
            held_out_scorer=evaluator.held_out_scorer,
            peft_config=model_args.peft_config,
        )

    runs = [Run(name_of(run), run, make, XE if start_folder and not run.rl_start_epoch else START) for run in configs]
    title = "Sequence-level exploration"

    def complete(result: Comparison) -> None:
        """Sample captions of the start and of every trained captioner."""
        sampler = Sampler(splits["test"], sle_args, config)
        validation = Sampler(splits["validation"], sle_args, config) if sle_args.report_best_alpha else None
        with_alpha = {name_of(run) for run in configs if not run.entropy_weight} - {XE, *result.collapsed}
        folders: dict[str, Path | None] = {START: None}
        folders |= {run.name: Path(str(run.config.output_dir)) for run in runs if is_training}
        for row in result.rows:
            if row["name"] == result.main and result.main in result.collapsed:
                row |= sampler.not_measured("the captions have collapsed")
            elif row["name"] in folders:
                captioner = load(folders[row["name"]])
                captioner.model.to(config.device)
                row |= sampler.measure(row["name"], captioner)
                if validation is not None and row["name"] in with_alpha:
                    validation.sample(row["name"], captioner)
            else:
                row |= sampler.not_measured("references are not samples of a captioner")
        sampler.add_equal_cider_d(result.rows, SLL)
        best = {} if validation is None else {"best_alpha": best_alpha(validation)}
        write_samples(output_dir, sampler, title=title, **best)

    objective: dict[str, Any] = {"objective": "mle"}
    if (is_training and config.rl_start_epoch < config.num_train_epochs) or config.max_steps > 0:
        objective = {"objective": "sle", "reward": describe_reward(config)}
    return compare_runs(
        runs,
        evaluator,
        arguments,
        splits,
        complete=complete,
        title=title,
        objective=objective,
        columns=(*COLUMNS, *SAMPLE_COLUMNS),
        more_files=FILES,
    )


if __name__ == "__main__":
    run_main(main)
