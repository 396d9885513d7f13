"""Train a ClipCap from a pretrained vision tower and a pretrained language model, with maximum likelihood.

DiscriTune and "No Detail Left Behind" start from such a captioner: the vision tower is frozen, mapper and language
model are trained.

Without arguments, on the embedded world (minutes on 2 CPU cores, no network):

    accelerate launch recipes/mle_clipcap.py

With the settings of "No Detail Left Behind", Table 11, on COCO:

    accelerate launch recipes/mle_clipcap.py --config recipes/configs/mle_clipcap/coco.yaml \
        --dataset_name dataset_coco.json --image_root coco/images

Pass the folder `model/` that it writes to `recipes/self_retrieval_clipcap.py --model_name_or_path`.

Sources: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning"; "No Detail Left Behind: Revisiting
Self-Retrieval for Fine-Grained Image Captioning", Appendix C.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from hf_captionrl.apps.experiments.arguments import (
    DataArguments,
    ModelArguments,
    RecipeDefaults,
    output_folder,
    parse_arguments,
)
from hf_captionrl.apps.experiments.report import (
    START,
    Run,
    alone_in_folder,
    check_models,
    compare_runs,
    plan_runs,
    prepare,
)
from hf_captionrl.apps.experiments.smile import make_trainer
from hf_captionrl.captioners import Captioner, load_captioner
from hf_captionrl.captioners.clipcap.assembly import assemble
from hf_captionrl.evaluation.options import EvaluationArguments
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.utils.console import run_main
from hf_captionrl.utils.model_files import PREFIX, model_path
from hf_captionrl.utils.options import documented

__all__ = ["main", "parse_args"]

CONFIGS = Path(__file__).parent / "configs" / "mle_clipcap"


@dataclass
class ClipCapArguments(ModelArguments):
    """The parts of the ClipCap."""

    model_name_or_path: str = documented(
        "", "A ClipCap to continue. Empty: a new one from the two models below.", aliases=["--model"]
    )
    vision_model: str = documented(
        "openai/clip-vit-base-patch32",
        "Vision tower of a CLIP, SigLIP or similar model, or of a shipped scorer (scenes:clip-reward).",
    )
    language_model: str = documented("openai-community/gpt2", "Causal language model, with its tokenizer.")
    prefix_length: int = documented(10, "Number of prefix vectors before a caption.")
    mapping_type: str = documented("mlp", "Mapper from the image to the prefix: 'mlp' or 'transformer'.")
    normalize_image_embeds: bool = documented(False, "Scale image embeddings to unit length.")
    stop_at_period: bool = documented(
        False, "End captions with a full stop, as in the papers, instead of an end token."
    )

    def load(self, prompt: str | None = None) -> Captioner:
        """Load or make the captioner."""
        if self.model_name_or_path:
            return super().load(prompt)
        if self.model_init_kwargs:
            raise ValueError("model_init_kwargs needs a ClipCap in model_name_or_path.")
        model, processor = assemble(
            model_path(self.vision_model),
            model_path(self.language_model),
            fresh_language_model=self.fresh_language_model,
            prefix_length=self.prefix_length,
            mapping_type=self.mapping_type,
            normalize_image_embeds=self.normalize_image_embeds,
            stop_at_period=self.stop_at_period,
        )
        if self.attn_implementation:
            model.language_model.set_attn_implementation(self.attn_implementation)
        if self.dtype != "auto":
            model = model.to(getattr(torch, self.dtype))
        return load_captioner(model, processor=processor, prompt=prompt or "")

    @property
    def base(self) -> ModelArguments:
        """Base model for the model card: the language model, which contains most of the trained weights."""
        return ModelArguments(model_name_or_path=self.model_name_or_path or self.language_model)

    @property
    def public_name(self) -> str:
        """Name of the base model for the model card, never a local path."""
        return self.base.public_name

    @property
    def license(self) -> str:
        """Licence of the trained model, in the Hub's spelling."""
        shipped = all(n.startswith(PREFIX) for n in (self.vision_model, self.language_model))
        return self.model_license or ("apache-2.0" if shipped and not self.model_name_or_path else self.base.license)


@dataclass
class MleClipCapConfig(RecipeDefaults, SmileConfig):
    """[`SmileConfig`] at lambda = 1 with the settings of "No Detail Left Behind", Table 11."""

    output_dir: str | None = output_folder("mle_clipcap")
    mle_weight: float = documented(1.0, "lambda of SMILE; 1 is maximum likelihood.")
    learning_rate: float = documented(2e-5, "Peak learning rate.")
    lr_scheduler_type: str = documented("linear", "Learning rate schedule.")
    weight_decay: float = documented(0.0, "AdamW weight decay; the paper does not state one.")
    max_steps: int = documented(30_000, "Number of optimizer steps.")
    save_strategy: str = documented("steps", "When to save: 'no', 'steps' or 'epoch'.")
    save_total_limit: int | None = documented(None, "Number of checkpoints to keep. None: all.")
    eval_strategy: str = documented("no", "When to evaluate: 'no', 'steps' or 'epoch'.")
    load_best_model_at_end: bool | None = documented(False, "Select the checkpoint with the best R@1.")
    warmup_steps: float = documented(1_000, "Number of optimizer steps with a rising learning rate.")
    per_device_train_batch_size: int = documented(40, "Captions per device and step.")
    freeze_vision_tower: bool = documented(True, "Do not train the vision tower.")
    cache_image_features: bool = documented(True, "Encode each image once for the whole run.")
    generation_num_beams: int = documented(5, "Number of beams for evaluation.")
    # DiscriTune's 40 tokens minus 10 for the prefix.
    generation_max_new_tokens: int = documented(30, "Maximum length of a caption in evaluation.")


def parse_args(argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line."""
    types = (ClipCapArguments, DataArguments, EvaluationArguments, MleClipCapConfig)
    return parse_arguments(types, argv, default_config=CONFIGS / "scenes.yaml")


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the recipe."""
    return train(parse_args(argv))


@alone_in_folder
def train(arguments: tuple[Any, ...]) -> Path:
    """Train and evaluate the ClipCap."""
    model_args, _, _, config = arguments
    check_models(arguments)
    set_seed(config.seed)  # initialises the mapper
    captioner = model_args.load(config.prompt)  # what is wrong with it is said before the data are read
    splits, scorer, evaluator = prepare(arguments)

    def make(run: MleClipCapConfig) -> SmileTrainer:
        return make_trainer(captioner, run, splits, scorer, model_args)

    (run,) = plan_runs(config, [(START, {})], lambda _: START).values()
    objective = {"objective": "mle", "mle_weight": 1.0, "first_token": "mle"}
    runs = [Run(START, run, make, starts_from=None)]
    return compare_runs(runs, evaluator, arguments, splits, title="ClipCap, MLE", objective=objective)


if __name__ == "__main__":
    run_main(main)
