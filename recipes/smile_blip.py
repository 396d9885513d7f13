# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["hf-captionrl"]
#
# [tool.uv.sources]
# hf-captionrl = { path = "..", editable = true }
# ///
"""Finetune a captioner with SMILE, and compare it with its start and with as many further steps of maximum likelihood.

Without arguments, on the embedded world (3 minutes on 2 CPU cores, no network):

    accelerate launch recipes/smile_blip.py
    uv run recipes/smile_blip.py                 # without an installation: uv makes an environment with this package

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
from hf_captionrl.utils.io import shipped_path

__all__ = ["main", "parse_args", "run_name"]


@dataclass
class SmileBlipConfig(SmileRecipeConfig):
    """[`SmileRecipeConfig`] with its default folder."""

    output_dir: str | None = output_folder("smile_blip")


def parse_args(argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line."""
    types = (ModelArguments, DataArguments, EvaluationArguments, SmileArguments, SmileBlipConfig)
    return parse_arguments(types, argv, default_config=shipped_path("recipes", "configs", "smile_blip", "dose.yaml"))


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the recipe."""
    return compare_smile(parse_args(argv))


if __name__ == "__main__":
    run_main(main)
