"""Compares the CIDEr-D that self-retrieval loses from a generic and from a detailed captioner.

    python scripts/run_seeds.py self_retrieval_blip --seeds 0 1 2 --runs_dir RUNS --output ...     # the generic start
    for s in 0 1 2; do
        python recipes/smile_blip.py --row smile/scenes/detailed --seed $s \
            --output_dir DETAILED/smile_blip/seed-$s
        python recipes/self_retrieval_blip.py --row ndlb/scenes/from-detailed \
            --seed $s --model_name_or_path DETAILED/smile_blip/seed-$s/model \
            --output_dir DETAILED/self_retrieval_blip/seed-$s
    done
    python scripts/compare_starts.py --generic RUNS/self_retrieval_blip --detailed DETAILED

writes docs/results/detailed_start_seeds.json. Every captioner is compared with both kinds of references on the same
images: the annotators' captions and the full captions. Each start was trained on one of them.
Source: "No Detail Left Behind", Findings 3 and 5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl.captioners import load_captioner  # noqa: E402
from hf_captionrl.io import write_json  # noqa: E402
from hf_captionrl.metrics import cider_d, faithfulness, self_retrieval  # noqa: E402
from hf_captionrl.retrieval import load_scorer  # noqa: E402
from hf_captionrl.scenes import check, load_scenes  # noqa: E402
from hf_captionrl.scenes.models import model_path  # noqa: E402
from hf_captionrl.trainers.caption_generation import generate_captions  # noqa: E402
from scripts.run_seeds import aggregate  # noqa: E402


def measure(captions: list[str], test: Any, held_out_scorer: Any, image_features: torch.Tensor) -> dict[str, float]:
    """Numbers of one captioner.

    Args:
        image_features (`torch.Tensor` of shape `(N, D)`): Features of the test images by the held-out scorer.
    Returns:
        `dict[str, float]`: CIDEr-D with both kinds of references, R@1 among 100, hallucination.
    """
    ranks = self_retrieval(
        held_out_scorer.text_features(captions), image_features, num_distractors=99, num_bootstrap=0
    )
    return {
        "cider_d_annotators": float(cider_d(captions, [list(c) for c in test["captions"]])["cider_d"]),
        "cider_d_full": float(cider_d(captions, [[c] for c in test["full_caption"]])["cider_d"]),
        "rd100_recall_at_1": float(ranks["recall_at_1"]),
        "hallucination": float(faithfulness(captions, list(test["facts"]), check)["hallucination"]),
        "length": float(np.mean([len(caption.split()) for caption in captions])),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generic", type=Path, required=True, help="runs of self_retrieval_blip, one folder per seed")
    parser.add_argument("--detailed", type=Path, required=True, help="runs of both recipes, as above")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/detailed_start_seeds.json")
    arguments = parser.parse_args()
    test = load_scenes()["test"]
    held_out_scorer = load_scorer(model_path("scenes:siglip-held-out"))
    image_features = torch.as_tensor(held_out_scorer.image_features(list(test["image"])))
    runs = []
    for seed in arguments.seeds:
        folder = f"seed-{seed}"
        models = {
            "generic": (model_path("scenes:blip-mle"), arguments.generic / folder / "model-sr-sampled"),
            "detailed": (
                arguments.detailed / "smile_blip" / folder / "model",
                arguments.detailed / "self_retrieval_blip" / folder / "model",
            ),
        }
        rows: list[dict[str, Any]] = []
        for start, (before, after) in models.items():
            found = {}
            for when, path in (("start", before), ("self-retrieval", after)):
                captions = generate_captions(
                    load_captioner(str(path)), list(test["image"]), batch_size=100, num_beams=1, max_new_tokens=40
                )
                found[when] = measure(captions, test, held_out_scorer, image_features)
                rows.append({"name": f"{start}, {when}", **found[when]})
            own = "cider_d_full" if start == "detailed" else "cider_d_annotators"
            kept = {
                name: found["self-retrieval"][name] / found["start"][name]
                for name in found["start"]
                if "cider" in name
            }
            rows.append({"name": f"{start}, share kept", "cider_d_own_references": kept[own], **kept})
        runs.append(rows)
    table = aggregate(runs)
    shares = [next(row for row in table if row["name"] == f"{start}, share kept") for start in ("detailed", "generic")]
    values = [np.array(row["cider_d_own_references"]["values"]) for row in shares]
    difference = values[0] - values[1]
    summary = {
        "share_kept_detailed_minus_generic": float(difference.mean()),
        "standard_error": float(difference.std(ddof=1) / np.sqrt(len(difference))),
    }
    command = f"python scripts/compare_starts.py --seeds {' '.join(map(str, arguments.seeds))}"
    write_json(arguments.output, {"command": command, "seeds": arguments.seeds, "rows": table, "summary": summary})
    for row in table:
        print(
            row["name"],
            {k: (round(v["mean"], 3), round(v["standard_error"], 3)) for k, v in row.items() if k != "name"},
        )
    print(summary)


if __name__ == "__main__":
    main()
