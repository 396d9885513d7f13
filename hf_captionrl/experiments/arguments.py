"""Arguments shared by the recipes: captioner, data, determinism."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_captionrl.captioners import Captioner, load_captioner
from hf_captionrl.data.caption_simplifying import LEVELS
from hf_captionrl.evaluation.split_arguments import SplitArguments
from hf_captionrl.scenes.models import PREFIX, model_path
from hf_captionrl.trainers.policy import check_model_init_kwargs

__all__ = [
    "DataArguments",
    "ModelArguments",
    "RunArguments",
    "describe",
    "enable_determinism",
]


_QUANTIZED = ("load_in_4bit", "load_in_8bit")


@dataclass
class ModelArguments:
    """The captioner, and the parts of it that are finetuned."""

    model_name_or_path: str = field(
        default="scenes:blip-mle",
        metadata={
            "help": "Captioner to start from: a folder, a name on the Hub (e.g. Salesforce/blip-image-captioning-base), or "
            "a shipped model (scenes:blip-mle)."
        },
    )
    model_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."}
    )
    dtype: str = field(
        default="float32",
        metadata={
            "help": "Dtype of the weights. 'bfloat16' and 'float16' need --tune and apply to the frozen base; "
            "trainable weights are fp32. 'auto': the dtype of the checkpoint."
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "'sdpa', 'eager', 'flash_attention_2', ...; None: transformers' choice."}
    )
    load_in_4bit: bool = field(
        default=False,
        metadata={"help": "Quantize the frozen base of a LoRA to 4 bits. Needs --tune, bitsandbytes and a GPU."},
    )
    load_in_8bit: bool = field(
        default=False,
        metadata={"help": "Quantize the frozen base of a LoRA to 8 bits. Needs --tune, bitsandbytes and a GPU."},
    )
    # Copied from the trainer's configuration, because the recipe loads the model; not an argument.
    model_init_kwargs: dict[str, Any] = field(default_factory=dict, init=False)
    fresh_language_model: bool = field(
        default=False,
        metadata={"help": "Start with random weights in all parts but the vision tower."},
    )
    tune: str | None = field(
        default=None, metadata={"help": "Train a LoRA on 'language', 'vision' or 'both'. None: train all weights."}
    )
    lora_r: int = field(default=32, metadata={"help": "Rank of the LoRA."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale of the LoRA."})
    lora_init: str = field(
        default="peft",
        metadata={
            "help": "Initial values of the LoRA: 'peft', PEFT's default, or 'paper', N(0, 1) and 0 as in the code of No Detail Left "
            "Behind."
        },
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the LoRA."})
    model_license: str | None = field(
        default=None,
        metadata={
            "help": "Licence of the base model, for the model card. None: apache-2.0 for shipped models, else 'other'."
        },
    )

    def load(self, prompt: str | None = None) -> Captioner:
        """Load the captioner, in fp32 by default.

        Args:
            prompt: Text that every caption continues; None for the default of the family.

        Returns:
            [`Captioner`]: The captioner.
        """
        settings: dict[str, Any] = {"revision": self.model_revision, "dtype": self.dtype}
        if self.attn_implementation is not None:
            settings["attn_implementation"] = self.attn_implementation
        settings |= {name: True for name in _QUANTIZED if getattr(self, name)}
        settings |= self.model_init_kwargs
        captioner = load_captioner(model_path(self.model_name_or_path), prompt=prompt, **settings)
        if self.fresh_language_model:
            _randomise_language_model(captioner)
        return captioner

    def __post_init__(self) -> None:
        check_model_init_kwargs({"dtype": self.dtype})
        for name in _QUANTIZED:
            if getattr(self, name) and self.tune is None:
                raise ValueError(
                    f"{name} is set, but tune is not, so all weights are trained, which quantized weights cannot be. Use --tune language, "
                    "vision or both."
                )
        if self.lora_init not in ("peft", "paper"):
            raise ValueError(f"lora_init is {self.lora_init!r}. Use 'peft' or 'paper'.")
        if self.lora_init == "paper" and self.tune is None:
            raise ValueError(
                "lora_init is 'paper', but tune is not set, so all weights are trained without a LoRA. Use --tune language, "
                "vision or both, or leave lora_init out."
            )

    @property
    def public_name(self) -> str:
        """Name of the captioner for the model card, never a local path."""
        name = self.model_name_or_path
        if name.startswith(PREFIX):
            return f"hf-captionrl-scenes-{name.removeprefix(PREFIX)}"
        return Path(name).name if Path(name).exists() else name

    @property
    def license(self) -> str:
        """Licence of the finetuned model, in the Hub's spelling."""
        shipped = self.model_name_or_path.startswith(PREFIX)
        return self.model_license or ("apache-2.0" if shipped else "other")

    @property
    def peft_config(self) -> dict[str, Any] | None:
        """Arguments of `Captioner.add_lora`, or None if all weights are trained."""
        if self.tune is None:
            return None
        return {
            "tune": self.tune,
            "r": self.lora_r,
            "alpha": self.lora_alpha,
            "dropout": self.lora_dropout,
            "init": self.lora_init,
        }


def _randomise_language_model(captioner: Captioner) -> None:
    """Replace all weights outside of the vision tower by those of a new model."""
    model = captioner.base_model
    kept = {id(p) for p in captioner.find_vision_tower(model).parameters()}
    fresh = dict(type(model)(model.config).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) not in kept:
                parameter.copy_(fresh[name])


@dataclass
class DataArguments(SplitArguments):
    """The images and captions for training and evaluation."""

    dataset_name: str = field(
        default="scenes",
        metadata={
            "help": "'scenes' (the embedded world), 'moving_scenes' (its clips), 'imagefolder' with --data_dir, a Karpathy-split JSON with --image_root, "
            "'concadia' with --data_dir, 'nocaps' with --data_dir for an evaluation, 'tgif' or 'msr-vtt' with --data_dir and --num_frames, or any data set on the Hub or on disk."
        },
    )
    train_captions: str | None = field(
        default=None,
        metadata={
            "help": "Parquet or JSONL file with image_id and captions that replace those of the training split, such "
            "as captions.parquet of `captionrl boost`, or a folder of shards of `captionrl caption`. Images that are not in it "
            "are left out."
        },
    )
    train_captions_column: str = field(
        default="captions",
        metadata={"help": "Caption column of train_captions, a string or a list of strings, e.g. 'blend_caption'."},
    )
    test_references: str | None = field(
        default=None,
        metadata={
            "help": "File like train_captions for the test split; the table then has CIDEr-D against these references as well."
        },
    )
    test_references_column: str = field(default="captions", metadata={"help": "Caption column of test_references."})
    simplify: str | None = field(
        default=None,
        metadata={
            "help": "Shorten all captions to 'simplest' (subject with article) or 'simpler' (subject, verb, object), "
            "as in SMILE's "
            "Figure 4(b). Needs spaCy, except on 'scenes'."
        },
    )
    num_frames: int = field(
        default=0,
        metadata={
            "help": "0: the data are images. Otherwise the number of frames per video; frame_pooling pools their "
            "features. Needs freeze_vision_tower and cache_image_features."
        },
    )
    max_train_images: int | None = field(default=None, metadata={"help": "Maximum number of training images."})
    table_split: str = field(
        default="test",
        metadata={
            "help": "Split of the results table: 'test' or 'validation', as in DiscriTune's Tables 8 and 9. With 'validation', the "
            "test split selects the checkpoints. An evaluation by self-retrieval can use any split, such as 'near_domain' of nocaps."
        },
    )
    max_eval_images: int | None = field(default=None, metadata={"help": "Maximum number of validation images."})
    max_test_images: int | None = field(default=None, metadata={"help": "Maximum number of test images."})

    def __post_init__(self) -> None:
        if self.simplify not in (None, *LEVELS):
            raise ValueError(f"simplify is {self.simplify!r}. Use one of {list(LEVELS)}, or leave it out.")
        shares = (self.validation_share, self.test_share)
        if min(shares) < 0 or sum(shares) >= 1:
            raise ValueError(
                f"validation_share is {shares[0]} and test_share {shares[1]}; both must be at least 0, and together below 1. "
                "Use 0.1 for a tenth."
            )
        if self.num_frames < 0:
            raise ValueError(f"num_frames is {self.num_frames}. Use 0 for images, or the number of frames per video.")


@dataclass
class RunArguments:
    """Arguments of the run itself; `experiments.parsing` adds them to those of the recipe."""

    deterministic: bool = field(
        default=False,
        metadata={
            "help": "Use deterministic kernels where they exist, so that two runs on a GPU are bit-exact. For the "
            "cost see docs/reproducibility.md."
        },
    )
    total_train_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Images or captions per optimizer step on all processes together. It sets gradient_accumulation_steps, "
            "and per_device_train_batch_size is the most that a device holds at once. The papers' presets have it."
        },
    )


def enable_determinism() -> None:
    """Use the deterministic version of every operation that has one; other operations warn and continue.

    Call it before anything runs on a GPU, because cuBLAS reads its workspace once. Random numbers depend only on the
    seed in any case; this setting fixes the order of sums on a GPU.
    """
    # Without a workspace of fixed size, cuBLAS may select another algorithm when streams compete.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def describe(arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments by the names of their dataclasses, for results.json.

    Args:
        arguments: Dataclass instances.

    Returns:
        `dict`: From class name to fields, including whether the run was deterministic.
    """
    run = RunArguments(deterministic=torch.are_deterministic_algorithms_enabled())
    return {type(a).__name__: {f.name: getattr(a, f.name) for f in dataclasses.fields(a)} for a in (*arguments, run)}
