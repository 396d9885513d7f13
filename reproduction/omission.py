"""Training captions that omit facts in different ways: how much of what annotators omit can SMILE bring back?

    python reproduction/omission.py --output captions.parquet

Five captions for each training scene, without mistakes, in one column per way. `random_P`: each caption states each fact with probability
P / 100; relation and colour of the second object only with it, and one object always ("a dog"). `shared_40`: the same, but the five
captions of an image state the same facts. `systematic`: every caption states the same kinds of facts, and the others are never stated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path
import datasets

from hf_captionrl.scenes import load_scenes
from hf_captionrl.scenes.grammar import Words, write_sentence
from hf_captionrl.scenes.world import Facts

PERCENT = (20, 40, 60, 80)
SYSTEMATIC = ("count", "second", "colour", "relation")
"""What every caption of `systematic` states beside the kind: about two fifths of a scene's facts."""


def sentence(rng: np.random.Generator, facts: Facts, kept: set[str]) -> str:
    """A true caption of these facts; nothing is said of a second object that is not named."""
    kept = kept | {"kind"} if "second" in kept else (kept | {"kind"}) - {"relation", "second_colour"}
    said = {name: value if name in kept and value != "upright" else "" for name, value in facts.to_dict().items()}
    return write_sentence({**said, "several": not said["count"] and facts.count > 1}, Words(rng))


def drawn(rng: np.random.Generator, facts: Facts, probability: float) -> set[str]:
    """Facts, each with a probability."""
    return {name for name in facts.to_dict() if rng.random() < probability}


def captions(rng: np.random.Generator, facts: Facts, number: int = 5) -> dict[str, list[str]]:
    """The captions of one image, by column."""
    made = {f"random_{p}": [sentence(rng, facts, drawn(rng, facts, p / 100)) for _ in range(number)] for p in PERCENT}
    shared = drawn(rng, facts, 0.4)
    made["shared_40"] = [sentence(rng, facts, shared) for _ in range(number)]
    made["systematic"] = [sentence(rng, facts, set(SYSTEMATIC)) for _ in range(number)]
    return made


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    rng, train = np.random.default_rng(0), load_scenes()["train"]  # without its other splits, train has other scenes
    rows = [
        {"image_id": image_id, **captions(rng, Facts(**facts))}
        for image_id, facts in zip(train["image_id"], train["facts"], strict=True)
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(output))


if __name__ == "__main__":
    main()
