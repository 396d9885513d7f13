"""Finetune a captioner with SMILE, and compare it with its start and with as many further steps of maximum likelihood.

Without arguments, on the embedded world (3 minutes on 2 CPU cores, no network):

    accelerate launch recipes/smile_blip.py

With the paper's settings on COCO, or on your own photographs with captions in `metadata.jsonl`:

    accelerate launch recipes/smile_blip.py --config recipes/configs/smile_blip/coco.yaml \
        --dataset_name dataset_coco.json --image_root coco/images
    accelerate launch recipes/smile_blip.py --model_name_or_path Salesforce/blip-image-captioning-base \
        --dataset_name imagefolder --data_dir photos --output_dir outputs/photos

Source: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.apps.experiments.arguments import DataArguments, ModelArguments, output_folder, parse_arguments
from hf_captionrl.apps.experiments.smile import SmileArguments, SmileRecipeConfig, compare_smile, run_name
from hf_captionrl.evaluation.options import EvaluationArguments
from hf_captionrl.utils.console import run_main

__all__ = ["main", "parse_args", "run_name"]

CONFIGS = Path(__file__).parent / "configs" / "smile_blip"


@dataclass
class SmileBlipConfig(SmileRecipeConfig):
    """[`SmileRecipeConfig`] with its default folder."""

    output_dir: str | None = output_folder("smile_blip")


def parse_args(argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line."""
    types = (ModelArguments, DataArguments, EvaluationArguments, SmileArguments, SmileBlipConfig)
    return parse_arguments(types, argv, default_config=CONFIGS / "dose.yaml")


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the recipe."""
    return compare_smile(parse_args(argv))


if __name__ == "__main__":
    run_main(main)
