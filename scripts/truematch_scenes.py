"""Builds, reviews and uses a benchmark of look-alikes on the embedded world, for the table of docs/truematch.md.

    python scripts/truematch_scenes.py --folder truematch --output docs/results/truematch_scenes.json

A script reviews the page in headless Chromium. It reads the ids of the images on the page and looks up their facts. It
presses k if every image differs from the query in at most two facts, and 2 ("Any caption distinguishes them")
otherwise. How people would decide is not known.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.apps.truematch.build import load_truematch
from hf_captionrl.apps.truematch.review import ReviewServer, review_images
from hf_captionrl.cli import main as captionrl
from hf_captionrl.data.options import DatasetOptions
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.io import write_json, write_jsonl

MODELS = ("scenes:blip-mle", "scenes:clipcap-mle")


def is_kept(facts: Sequence[Mapping[str, Any]]) -> bool:
    """The script's rule."""
    query = facts[0]
    return all(1 <= sum(other[name] != query[name] for name in query) <= 2 for other in facts[1:])


def decide_in_browser(browser: Any, address: str, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Decide on every open bag by pressing keys."""
    count = "Number(document.getElementById('count').textContent.split(' ')[0])"
    total = "Number(document.getElementById('count').textContent.split(' ')[2])"
    browser.open(address)
    for before in range(*browser.evaluate(f"[{count}, {total}]")):
        ids = browser.evaluate("[...document.querySelectorAll('#images code')].map((code) => code.textContent)")
        browser.key("k" if is_kept([facts[i] for i in ids]) else "2")
        browser.wait(f"{count} === {before + 1}")


def _run(*arguments: str) -> None:
    if captionrl(["truematch", *arguments]) != 0:
        raise SystemExit(f"captionrl truematch {' '.join(arguments)} failed")


def main(argv: Sequence[str] | None = None) -> None:
    """Run it all."""
    from tests.browser import Browser

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
    rows = review_images(load_truematch(folder), DatasetOptions(dataset=""))
    with ReviewServer(folder, rows) as server, Browser() as browser:
        decide_in_browser(browser, server.address, facts)
    _run("apply", str(folder))
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
    kept = ("benchmark", "fingerprint", "bags", "review", "num_images", "scorer", "rows", "seed", "versions")
    command = f"python scripts/truematch_scenes.py --output {arguments.output}"
    write_json(arguments.output, {"command": command} | {name: measured[name] for name in kept})
    print((folder / "leaderboard.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
