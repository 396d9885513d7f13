"""Self-retrieval among the frames of a clip, as ImageCoDe has it.

    python reproduction/frames.py --seed 0 --output RUN/seed-0 --models scenes:blip-mle MODEL --names MLE SR-L

Clips of the moving world whose thing goes up or down over two rows, ten frames each: frames of a clip differ in the place of the
thing alone, for which captions have three words. The row "facts" states every fact of a frame, so that at most three of ten captions
can be first; where R@1 is higher, look at the share of wrong claims.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path
from hf_captionrl import load_captioner, load_scorer
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.metrics import faithfulness, self_retrieval
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.words import length_statistics
from hf_captionrl.scenes.grammar import full_caption
from hf_captionrl.scenes.moving_world import Clip, sample_clip
from hf_captionrl.scenes.render import render_clip
from hf_captionrl.scenes.truth_checker import check
from hf_captionrl.scenes.world import POSITIONS, Facts
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.model_files import model_path

CLIPS, FRAMES = 100, 10
SCORERS = {"": "scenes:siglip-held-out", "reward_": "scenes:clip-reward"}


def clips(seed: int, number: int = CLIPS) -> list[Clip]:
    """Clips in which a thing goes from the first to the last row, or back."""
    rng = np.random.default_rng(seed)
    found: list[Clip] = []
    while len(found) < number:
        clip = sample_clip(rng)
        if clip.facts.motion in ("up", "down") and clip.facts.speed == "fast":
            found.append(clip)
    return found


def frame_facts(clip: Clip) -> list[Facts]:
    """What is true of each frame: the thing is in the row that is nearest to it."""
    still = {field.name: getattr(clip.facts, field.name) for field in fields(Facts)}
    rows = (clip.cell(number / (FRAMES - 1))[0] for number in range(FRAMES))
    return [Facts(**still | {"position": POSITIONS[round(row)]}) for row in rows]


def main() -> None:
    """Write the R@1 of each captioner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="captioners")
    parser.add_argument("--names", nargs="+", required=True, help="their names in the result")
    parser.add_argument("--seed", type=int, default=0, help="seed of the clips")
    parser.add_argument("--output", type=Path, required=True, help="folder of results.json")
    args = parser.parse_args()
    chosen = clips(args.seed)
    images = [frame for clip in chosen for frame in render_clip(clip, FRAMES)]
    sets = [list(range(row // FRAMES * FRAMES, (row // FRAMES + 1) * FRAMES)) for row in range(len(images))]
    facts = [frame for clip in chosen for frame in frame_facts(clip)]
    captions = {"facts": list(map(full_caption, facts))}
    for name, model in zip(args.names, args.models, strict=True):
        captioner = load_captioner(model_path(model))
        captions[name] = generate_captions(captioner, images, batch_size=250, num_beams=1, max_new_tokens=40)
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "length": length_statistics(of)["mean_words"],
            "hallucination": faithfulness(of, facts, check)["hallucination"],
        }
        for name, of in captions.items()
    ]
    for prefix, scorer_name in SCORERS.items():
        scorer = load_scorer(model_path(scorer_name))
        pool = scorer.image_features(images)
        for row in rows:
            text = scorer.text_features(spoken(captions[row["name"]]))
            found = self_retrieval(text, pool, sets=sets, ks=(1,), num_bootstrap=0)
            row[f"{prefix}recall_at_1_all"] = found["recall_at_1"]
    write_json(args.output / "results.json", {"rows": rows})


if __name__ == "__main__":
    main()
