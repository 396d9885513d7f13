"""What the captions of Visual Caption Boosting state of the test scenes of a seed, and who finds the images from them.

    python reproduction/boosted.py --seed 0 --output RUN/seed-0

Rules blend and combine the captions; the describer's claims are wrong at `--error_rate`. The row "references" is one of an image's
five. `wrong_claims` is their number per caption, and `conflicts` the share of captions that contradict their BlendCap by the truth
checker, of which `conflicts_by_words` are also found in the text; `false_conflicts` are found there alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path
from hf_captionrl import load_scorer
from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.apps.boosting.boost import boost_rows
from hf_captionrl.apps.boosting.conflicts import scene_conflicts, source_statistics, text_conflicts
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.metrics import faithfulness
from hf_captionrl.scenes import check, load_scenes
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.model_files import model_path

SOURCES = {"BlendCap": "blend_caption", "VisualCap": "visual_caption", "HolisticCap": "holistic_caption"}
REWARD = "scenes:clip-reward"


def main() -> None:
    """Write a row per source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenes and of the describer")
    parser.add_argument("--error_rate", type=float, default=0.15, help="share of facts that the describer gets wrong")
    parser.add_argument("--scenes", type=int, default=1000, help="number of scenes")
    parser.add_argument("--output", type=Path, required=True, help="folder of results.json")
    args = parser.parse_args()
    scenes = load_scenes(seed=args.seed, num_train=0, num_validation=0, num_test=args.scenes)["test"]
    facts = scenes["facts"][:]
    by_id = dict(zip(scenes["image_id"][:], facts, strict=True))
    describer = SceneDescriber(by_id, error_rate=args.error_rate, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        boosted = list(boost_rows(scenes, folder, text=SceneWriter(), vision=describer))
    held_out, reward = (load_scorer(model_path(name)) for name in ("scenes:siglip-held-out", REWARD))
    evaluator = Evaluator(scenes, held_out, None, seed=args.seed, reward_scorer=reward)
    row, drawn = evaluator.reference_row()
    written = {"references": drawn} | {name: [one[column] for one in boosted] for name, column in SOURCES.items()}
    rows = [row, *(evaluator.row(name, written[name]) for name in SOURCES)]
    tokenizer = AutoTokenizer.from_pretrained(model_path(REWARD), trust_remote_code=False)
    lengths = source_statistics(
        written, count_tokens=lambda texts: [len(ids) for ids in tokenizer(texts)["input_ids"]]
    )
    for row in rows:
        captions = written[row["name"]]
        row |= {key: lengths[row["name"]][key] for key in ("mean_words", "std_words", "mean_tokens", "std_tokens")}
        row["wrong_claims"] = float(np.mean(faithfulness(captions, facts, check)["per_sample"]["wrong"]))
        if row["name"] in ("VisualCap", "HolisticCap"):
            three = list(zip(written["BlendCap"], captions, facts, strict=True))
            exact = np.array([bool(scene_conflicts(*one)) for one in three])
            words = np.array([bool(text_conflicts(blend, caption)) for blend, caption, _ in three])
            found = {"conflicts": exact, "conflicts_by_words": exact & words, "false_conflicts": ~exact & words}
            row |= {name: float(values.mean()) for name, values in found.items()}
    write_json(args.output / "results.json", {"rows": rows})


if __name__ == "__main__":
    main()
