"""Finetune a captioner with SMILE on a few frames of videos, and compare it as `smile_blip.py` does.

Without arguments, on the moving variant of the embedded world (2 minutes on a CPU core, no network): an image captioner
first learns the words for motion with maximum likelihood, then trains with SMILE.

    accelerate launch recipes/smile_video.py

On MSR-VTT (videodatainfo.json, and the videos in videos/) and on TGIF (tgif-v1.0.tsv, splits/, and the GIFs in gifs/):

    accelerate launch recipes/smile_video.py --config recipes/configs/smile_video/msrvtt.yaml --data_dir MSRVTT
    accelerate launch recipes/smile_video.py --row smile/table6/tgif --data_dir TGIF

Source: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation"; concatenated frames as in Li et al. 2022, "BLIP", section 5.6; EMScore by Shi et al. 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.apps.experiments.arguments import DataArguments, ModelArguments, output_folder, parse_arguments
from hf_captionrl.apps.experiments.smile import SmileArguments, SmileRecipeConfig, VideoEvaluator, compare_smile
from hf_captionrl.evaluation.options import EvaluationArguments
from hf_captionrl.metrics.columns import COLUMNS, VIDEO_COLUMNS
from hf_captionrl.utils.console import run_main

__all__ = ["main", "parse_args"]

CONFIGS = Path(__file__).parent / "configs" / "smile_video"


@dataclass
class SmileVideoConfig(SmileRecipeConfig):
    """[`SmileRecipeConfig`] with its default folder."""

    output_dir: str | None = output_folder("smile_video")


def parse_args(argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line."""
    types = (ModelArguments, DataArguments, EvaluationArguments, SmileArguments, SmileVideoConfig)
    return parse_arguments(types, argv, default_config=CONFIGS / "dose.yaml")


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the recipe."""
    arguments = parse_args(argv)
    _, data_args, _, _, config = arguments
    # Refused before videos are read, which can take hours.
    if not data_args.num_frames:
        raise ValueError("num_frames is 0, but videos need at least one frame. Use --num_frames 8, for example.")
    if not config.cache_image_features:
        raise ValueError(
            f"num_frames is {data_args.num_frames}. Add --freeze_vision_tower and --cache_image_features."
        )
    return compare_smile(
        arguments,
        title="SMILE on videos",
        make_evaluator=VideoEvaluator.from_arguments,
        columns=(*COLUMNS, *VIDEO_COLUMNS),
    )


if __name__ == "__main__":
    run_main(main)
