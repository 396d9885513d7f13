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
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from hf_captionrl.hub import ModelCardFacts, push_folder, write_model_card
from hf_captionrl.recipe import (
    DataArguments,
    EvaluationArguments,
    Evaluator,
    ModelArguments,
    describe,
    describe_data,
    load_data,
    optional_scorer,
    parse_arguments,
    write_report,
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
    model_args, data_args, eval_args, smile_args, config = parse_args(argv)
    eval_args.resolve(data_args.dataset_name)
    output_dir = Path(config.output_dir)
    # The card needs the table: the recipe pushes at the end, the Trainer never.
    push, config.push_to_hub = config.push_to_hub, False
    if push and eval_args.judge_name_or_path == "none":
        raise ValueError(
            "push_to_hub needs a judge: no card is written without retrieval numbers. Set judge_name_or_path."
        )
    resuming = str(config.resume_from_checkpoint or "false").lower()
    if resuming not in ("true", "false"):
        raise ValueError(
            f"resume_from_checkpoint is {config.resume_from_checkpoint!r}. This recipe trains several captioners, each with checkpoints of its own: "
            "use 'true' to go on from the last one of each, in the same output_dir."
        )
    resume = resuming == "true"
    with config.main_process_first(local=False, desc="loading the data"):
        splits = load_data(data_args, output_dir=output_dir, seed=config.seed)
    scorer = optional_scorer(eval_args.scorer_name_or_path)
    evaluator = Evaluator.from_arguments(
        splits["test"], eval_args, seed=config.seed, cache_dir=config.feature_cache_dir
    )

    rows: list[dict[str, Any]] = []
    before: dict[str, float] = {}
    captions: dict[str, list[str]] = {}
    histories: dict[str, list[dict[str, float]]] = {}
    # In the order of the table: the control, what was asked for, the mixtures.
    weights = sorted({config.mle_weight, *smile_args.compare_mle_weights}, key=lambda w: (w != 1.0, w))
    trained = config.num_train_epochs > 0 or config.max_steps > 0
    if not trained:  # a row without further training
        weights = [config.mle_weight]
    for weight in weights:
        run = copy.deepcopy(config)  # TrainingArguments' __post_init__ must not run a second time
        run.mle_weight = weight
        if weight == 1.0:  # the control is plain maximum likelihood, whatever is done to SMILE
            run.first_token, run.subset = None, "caption"
        name = run_name(run)
        main_run = weight == config.mle_weight
        run.output_dir = str(output_dir / ("model" if main_run else f"model-lambda-{weight:g}"))
        trainer = SmileTrainer(
            model_args.load(run.prompt),
            run,
            train_dataset=splits["train"],
            eval_dataset=splits["validation"],
            scorer=scorer,
            peft_config=model_args.peft_config,
        )
        if not captions:
            captions["MLE"] = trainer.generate_captions(splits["test"])
            rows.append(evaluator.row("MLE", captions["MLE"]))
            before = trainer.evaluate()  # the first point of every curve
        if not trained:
            trainer.save_model()
            main_name, captioner = "MLE", trainer.captioner
            break
        # After an interruption each run goes on from its own last checkpoint, if it has one.
        trainer.train(resume_from_checkpoint=get_last_checkpoint(run.output_dir) if resume else None)
        history = [entry for entry in trainer.state.log_history if "eval_length" in entry]
        histories[name] = [
            {"epoch": e.get("epoch") or 0.0, "length": e["eval_length"], "recall_at_1": e.get("eval_recall_at_1")}
            for e in ([{**before, "epoch": 0.0}, *history])
        ]
        captions[name] = trainer.generate_captions(splits["test"])
        rows.append(evaluator.row(name, captions[name]))
        trainer.save_model()
        if main_run:
            main_name, captioner = name, trainer.captioner
    reference_row, _ = evaluator.reference_row()
    rows.append(reference_row)
    if not trainer.is_world_process_zero():
        return output_dir / "results.json"
    arguments = (model_args, data_args, eval_args, smile_args, config)
    path = write_report(
        output_dir,
        evaluator,
        rows,
        captions,
        histories,
        title="SMILE",
        seed=config.seed,
        config=describe(arguments),
        gallery_size=eval_args.gallery_size,
    )
    if evaluator.judge is not None:
        card = ModelCardFacts(
            model_id=config.hub_model_id or output_dir.name,
            base_model=model_args.public_name,
            family=captioner.family,
            dataset="hf_captionrl scenes" if data_args.dataset_name == "scenes" else Path(data_args.dataset_name).name,
            dataset_description=describe_data(data_args, splits),
            objective="mle" if not trained or config.mle_weight == 1.0 else "smile",
            mle_weight=config.mle_weight,
            first_token="mle" if config.first_token in (None, "mle") else "smile",
            scorer=evaluator.judge.signature,
            scorer_max_text_tokens=evaluator.judge.max_text_tokens,
            truncated_fraction=evaluator.judge.count_truncated(captions[main_name]) / len(captions[main_name]),
            generation={"num_beams": config.generation_num_beams, "max_new_tokens": config.generation_max_new_tokens},
            prompt=captioner.prompt,
            row=main_name,
            license=model_args.license,
        )
        write_model_card(output_dir / "model", json.loads(path.read_text()), card)
    if push:
        for name in ("results.json", "results.md", "gallery.html", "curves.png"):
            if (output_dir / name).exists():
                shutil.copy(output_dir / name, output_dir / "model" / name)
        private = True if config.hub_private_repo is None else config.hub_private_repo
        print(
            push_folder(
                output_dir / "model", config.hub_model_id or output_dir.name, private=private, token=config.hub_token
            )
        )
    print(f"Written to {output_dir}: results.json, results.md, gallery.html, curves.png; the checkpoint is model/")
    return path


if __name__ == "__main__":
    main()
