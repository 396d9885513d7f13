"""Builds, reviews and uses a benchmark of look-alikes on the embedded world, for the table of docs/truematch.md.

    python scripts/truematch_scenes.py --folder truematch --output docs/results/truematch_scenes.json

A bag is kept if every image differs from the query in one or two facts, and otherwise dropped ("Any caption distinguishes them").
How people would decide is not known.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.apps.truematch.build import bag_id, load_truematch
from hf_captionrl.cli import main as captionrl
from hf_captionrl.metrics import paired_test
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.io import write_json, write_jsonl

MODELS = ("scenes:blip-mle", "scenes:clipcap-mle")


def is_kept(facts: Sequence[Mapping[str, Any]]) -> bool:
    """The script's rule."""
    query = facts[0]
    return all(1 <= sum(other[name] != query[name] for name in query) <= 2 for other in facts[1:])


def _run(*arguments: str) -> None:
    if captionrl(["truematch", *arguments]) != 0:
        raise SystemExit(f"captionrl truematch {' '.join(arguments)} failed")


def main(argv: Sequence[str] | None = None) -> None:
    """Run it all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/truematch-scenes"))
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--max_images", type=int, default=1000)
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    _run(
        *("build", "--output", str(folder), "--max_images", str(arguments.max_images)),
        *("--license", "apache-2.0", "--repo_id", "truematch-scenes"),
    )
    scenes = load_scenes(num_train=0, num_validation=0)["test"].select(range(arguments.max_images))
    facts = dict(zip(scenes["image_id"][:], scenes["facts"][:], strict=True))
    bags = load_truematch(folder).bags.bags
    kept = ["keep" if is_kept([facts[image] for image in bag]) else "drop" for bag in bags]
    decisions = folder.parent / "decisions.jsonl"
    write_jsonl(decisions, [{"bag": bag_id(bag), "decision": said} for bag, said in zip(bags, kept, strict=True)])
    _run("apply", str(folder), "--decisions", str(decisions))
    full = folder.parent / "full_captions.jsonl"
    pairs = zip(scenes["image_id"][:], scenes["full_caption"][:], strict=True)
    write_jsonl(full, [{"image_id": i, "caption": caption} for i, caption in pairs])
    results = folder.parent / "results"
    _run(
        *("evaluate", str(folder), "--captions", str(full), "--models", *MODELS),
        *("--names", "every fact", *MODELS, "--references", "--output_dir", str(results)),
    )
    _run("leaderboard", str(folder), str(results / "results.json"))
    measured = json.loads((results / "results.json").read_text(encoding="utf-8"))
    hits = measured["hits"]
    tests = {
        f"{name} - references": {
            key: paired_test(hits[name][key]["values"], human["values"], groups=human["groups"])
            for key, human in hits["references"].items()
        }
        for name in MODELS
    }
    gains = {
        pair: {key: {"value": t["difference"], "interval": t["interval"]} for key, t in of_pair.items()}
        for pair, of_pair in tests.items()
    }
    keys = ("benchmark", "fingerprint", "bags", "review", "num_images", "scorer", "rows", "seed", "versions")
    command = f"python scripts/truematch_scenes.py --output {arguments.output}"
    write_json(arguments.output, {"command": command} | {key: measured[key] for key in keys} | {"rows_gains": gains})
    print((folder / "leaderboard.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
