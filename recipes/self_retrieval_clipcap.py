"""Finetune a ClipCap by self-retrieval: captions from which a frozen image-text model finds their image.

ClipCap is the captioner of both papers: CLIP, a mapper, and a language model that continues the mapper's output.
Without arguments, on the embedded world (minutes on 2 CPU cores, no network): compares random distractors with a
curriculum of bags of look-alikes, by the reward scorer and by a held-out scorer.

    accelerate launch recipes/self_retrieval_clipcap.py

With the papers' settings on COCO, from a ClipCap trained with maximum likelihood, or on your own photographs with
captions in `metadata.jsonl`:

    accelerate launch recipes/self_retrieval_clipcap.py \
        --row discritune/coco \
        --model_name_or_path outputs/clipcap-coco --dataset_name dataset_coco.json --image_root coco/images
    accelerate launch recipes/self_retrieval_clipcap.py --model_name_or_path outputs/clipcap-coco \
        --dataset_name imagefolder --data_dir photos --output_dir outputs/photos

docs/self_retrieval.md lists the rows of the papers' tables, which `--row` selects.

Sources: Dessi et al. 2023, "Cross-Domain Image Captioning with Discriminative Finetuning"; "No Detail Left Behind:
Revisiting Self-Retrieval for Fine-Grained Image Captioning"; Mokady et al. 2021, "ClipCap: CLIP Prefix for Image
Captioning".
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hf_captionrl.apps.experiments import self_retrieval
from hf_captionrl.utils.console import run_main

__all__ = ["main", "parse_args"]

DEFAULT = Path(__file__).parent / "configs" / "self_retrieval_clipcap" / "scenes.yaml"

parse_args = partial(self_retrieval.parse_args, default_config=DEFAULT)
main = partial(self_retrieval.main, default_config=DEFAULT)

if __name__ == "__main__":
    run_main(main)
