"""Finetune a captioner with SMILE and compare it with what it was, and with as many more steps of maximum likelihood.

Without arguments, on the embedded world (3 minutes on 2 CPU cores, no network):

    accelerate launch recipes/smile_blip.py

With the paper's settings on COCO, or on a folder of one's own photographs with captions in `metadata.jsonl`:

    accelerate launch recipes/smile_blip.py --config recipes/configs/smile_blip/coco.yaml \
        --dataset_name dataset_coco.json --image_root coco/images
    accelerate launch recipes/smile_blip.py --model_name_or_path Salesforce/blip-image-captioning-base \
        --dataset_name imagefolder --data_dir photos --output_dir outputs/photos

Source: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation".
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_captionrl.recipe import (
    DataArguments,
    EvaluationArguments,
    Evaluator,
    ModelArguments,
    Run,
    defer_push,
    finish,
    load_data,
    optional_scorer,
    parse_arguments,
    resumes,
    train_runs,
)
from hf_captionrl.trainers import SmileConfig, SmileTrainer

__all__ = ["main", "parse_args"]

CONFIGS = Path(__file__).parent / "configs" / "smile_blip"


@dataclass
class SmileArguments:
    """What is compared."""

    compare_mle_weights: list[float] = field(
        default_factory=lambda: [1.0, 0.01],
        metadata={"help": "Further runs with these lambdas beside the configured one; 1 is the control, more MLE."},
    )


@dataclass
class SmileBlipConfig(SmileConfig):
    """[`SmileConfig`] with what a recipe adds: it evaluates each epoch and keeps the epoch that retrieves best."""

    output_dir: str | None = field(default="outputs/smile_blip", metadata={"help": "Where everything is written."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to save."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints kept, besides the best one."})
    load_best_model_at_end: bool = field(default=True, metadata={"help": "Keep the best epoch by validation R@1."})


def parse_args(argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line.

    Args:
        argv: Arguments without the program's name; None for `sys.argv`.

    Returns:
        Model, data, evaluation, comparison and trainer arguments.
    """
    types = (ModelArguments, DataArguments, EvaluationArguments, SmileArguments, SmileBlipConfig)
    return parse_arguments(types, argv, default_config=CONFIGS / "scenes.yaml")


def run_name(config: SmileConfig) -> str:
    """Row name of a finetuned captioner.

    Args:
        config: Its configuration.

    Returns:
        `str`: For instance `SMILE (lambda=0.01)`.
    """
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


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the recipe.

    Args:
        argv: Arguments without the program's name; None for `sys.argv`.

    Returns:
        `pathlib.Path`: results.json.

    Raises:
        ValueError: If arguments contradict each other, or the data are not fit for training.
    """
    arguments = parse_args(argv)
    model_args, data_args, eval_args, smile_args, config = arguments
    eval_args.resolve(data_args.dataset_name)
    output_dir = Path(config.output_dir)
    push = defer_push(config, eval_args.judge_name_or_path)
    resume = resumes(config)
    with config.main_process_first(local=False, desc="loading the data"):
        splits = load_data(data_args, output_dir=output_dir, seed=config.seed)
    scorer = optional_scorer(eval_args.scorer_name_or_path)
    evaluator = Evaluator.from_arguments(
        splits["test"], eval_args, seed=config.seed, cache_dir=config.feature_cache_dir
    )

    def run_of(weight: float) -> Run:
        run = copy.deepcopy(config)  # TrainingArguments' __post_init__ must not run a second time
        run.mle_weight = weight
        if weight == 1.0:  # the control is plain maximum likelihood, whatever is done to SMILE
            run.first_token, run.subset = None, "caption"
        folder = "model" if weight == config.mle_weight else f"model-lambda-{weight:g}"
        run.output_dir = str(output_dir / folder)

        def make() -> SmileTrainer:
            return SmileTrainer(
                model_args.load(run.prompt),
                run,
                train_dataset=splits["train"],
                eval_dataset=splits["validation"],
                scorer=scorer,
                peft_config=model_args.peft_config,
            )

        return Run(run_name(run), folder, make, trains=trains)

    trains = config.num_train_epochs > 0 or config.max_steps > 0
    # In the order of the table: the control, what was asked for, the mixtures.
    weights = sorted({config.mle_weight, *smile_args.compare_mle_weights}, key=lambda w: (w != 1.0, w))
    runs = [run_of(weight) for weight in (weights if trains else [config.mle_weight])]
    result = train_runs(runs, evaluator, splits["test"], resume=resume, output_dir=output_dir)
    if not result.is_main_process:
        return output_dir / "results.json"
    objective = {
        "objective": "mle" if not trains or config.mle_weight == 1.0 else "smile",
        "mle_weight": config.mle_weight,
        "first_token": "mle" if config.first_token in (None, "mle") else "smile",
    }
    return finish(result, evaluator, arguments, splits, title="SMILE", push=push, objective=objective)


if __name__ == "__main__":
    main()
