"""Builds, reviews and uses a benchmark of look-alikes on the embedded world, for the table of docs/truematch.md.

    python reproduction/truematch_scenes.py --folder truematch --output reproduction/results/truematch_scenes.json

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
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.evaluation.evaluator import draw_references
from hf_captionrl.metrics import paired_test
from hf_captionrl.metrics.suites import SuiteRow
from hf_captionrl.scenes import check, load_scenes
from hf_captionrl.utils.io import write_json, write_jsonl

MODELS = ("scenes:blip-mle", "scenes:clipcap-mle")


def is_kept(facts: Sequence[Mapping[str, Any]]) -> bool:
    """The script's rule."""
    query = facts[0]
    return all(1 <= sum(other[name] != query[name] for name in query) <= 2 for other in facts[1:])


def truth(
    captions: Sequence[str], facts: Sequence[Mapping[str, Any]], bags: Mapping[int, list[list[int]]]
) -> dict[str, dict[str, Any]]:
    """Whether the claims of each caption are true of its image and of no other one of its bag, by size of the bags."""
    row = SuiteRow(captions=captions, facts=facts, check=check, bags=bags)
    row.set_truth_recalls([f"bag_{size}_truth_recall_at_1" for size in bags])
    found = row.result()
    return {key: {"values": values, "groups": found["groups"][key]} for key, values in found["per_sample"].items()}


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
    evaluate = (
        *("evaluate", str(folder), "--captions", str(full), "--models", *MODELS),
        *("--names", "every fact", *MODELS, "--references", "--output_dir"),
    )
    _run(*evaluate, str(results))
    measured = json.loads((results / "results.json").read_text(encoding="utf-8"))
    # The other listeners: the reward scorer, which built the bags, and the truth checker.
    _run(*evaluate, str(results / "reward"), "--scorer", "scenes:clip-reward")
    reward = json.loads((results / "reward" / "results.json").read_text(encoding="utf-8"))["hits"]
    written = {name: read_caption_file(results / "captions" / f"{name.replace(':', '_')}.jsonl") for name in MODELS}
    ids = scenes["image_id"][:]
    captions = {name: [found[0] for found in file.aligned(ids, ids)] for name, file in written.items()}
    captions["references"] = [found[0] for found in draw_references(scenes["captions"][:], 0)]
    kept_bags = load_truematch(folder).kept.rows(ids)
    hits = {
        name: measured["hits"][name]
        | {f"reward_{key}": found for key, found in reward[name].items()}
        | truth(texts, scenes["facts"][:], kept_bags)
        for name, texts in captions.items()
    }
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
    command = f"python reproduction/truematch_scenes.py --output {arguments.output}"
    write_json(arguments.output, {"command": command} | {key: measured[key] for key in keys} | {"rows_gains": gains})
    print((results / "results.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
