"""What the captions of Visual Caption Boosting state of the test scenes of a seed, and who finds the images from them.

    python reproduction/boosted.py --seed 0 --output RUN/seed-0

Rules blend and combine the captions; the describer's claims are wrong at `--error_rate`. The row "references" is one of an image's
five. `wrong_claims` is their number per caption, and `conflicts` the share of captions that contradict their BlendCap by the truth
checker, of which `conflicts_by_words` are also found in the text; `false_conflicts` are found there alone.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path
from hf_captionrl import load_scorer
from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.apps.boosting.boost import boost_rows
from hf_captionrl.apps.boosting.conflicts import Conflict, scene_conflicts, source_statistics
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.metrics import faithfulness
from hf_captionrl.scenes import check, load_scenes
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.model_files import model_path

SOURCES = {"BlendCap": "blend_caption", "VisualCap": "visual_caption", "HolisticCap": "holistic_caption"}
REWARD = "scenes:clip-reward"


# --- Contradictions by word lists, in any text ------------------------------------------------------------------------
# The lists find different numbers or colours of the same noun, and pairs of kinds that exclude each other. They know neither
# synonyms nor grammar.

_NUMBERS = {word: str(n) for n, word in enumerate("one two three four five six seven eight nine ten".split(), start=1)}
_NUMBERS |= {number: number for number in _NUMBERS.values()}
_NUMBERS |= {"single": "1", "pair": "2", "couple": "2", "trio": "3"}
_COLOURS = {
    c: c for c in "black blue brown gray green orange pink purple red white yellow teal gold silver tan beige".split()
}
_COLOURS |= {"grey": "gray", "violet": "purple", "golden": "gold", "silvery": "silver"}
# Kinds (singular) that rarely occur together in an image if people name only one of them.
_EXCLUSIVE = [set(kinds.split()) for kinds in ("man woman", "boy girl", "dog cat", "indoor outdoor", "lake ocean")]
_EXCLUSIVE += [{"day", "night"}, {"left", "right"}]
# Words that can occur between a number or a colour and its noun.
_ADJECTIVES = frozenset(
    "small little tiny large big huge old young new tall short long round square wooden brick metal plastic glass stone "
    "sandy grassy striped spotted shiny bright dark light pale fluffy furry sideways upside down of and".split()
)
_IRREGULAR = {"people": "person", "men": "man", "women": "woman", "children": "child", "mice": "mouse", "buses": "bus"}
_BREAKS = frozenset("a an the on in at with to is are by for from near it its this that".split())


def _singular(noun: str) -> str:
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if len(noun) > 3 and noun.endswith("s") and not noun.endswith(("ss", "us")):
        return noun[:-3] + "y" if noun.endswith("ies") and len(noun) > 4 else noun[:-1]
    return noun


def _named(text: str) -> set[str]:
    """Words of a caption in the singular, without negated ones ("no dogs", "without any dog")."""
    text = re.sub(r"\b(?:no|not|without)\s+(?:(?:a|an|any)\s+)?[a-z]+", " ", text.lower())
    return {_singular(word) for word in re.findall(r"[a-z]+", text)}


def _attached(text: str, values: Mapping[str, str]) -> dict[str, set[str]]:
    """For each noun the listed words before it, with only adjectives in between."""
    words = re.findall(r"[a-z0-9]+(?:['’-][a-z]+)*|[.,;]", text.lower())
    attached: dict[str, set[str]] = {}
    for at, word in enumerate(words):
        if word not in values:
            continue
        for after in words[at + 1 : at + 6]:
            if after in _ADJECTIVES or after in _COLOURS or after in _NUMBERS:
                continue
            if after not in _BREAKS and after.isalpha():
                attached.setdefault(_singular(after), set()).add(values[word])
            break
    return attached


def text_conflicts(blend: str, holistic: str) -> list[Conflict]:
    """Contradictions between two captions of free text.

    - *count*, *colour*: listed words before the same noun, none in common. "A white and brown plate" and "a white plate" agree.
      Articles are not numbers: a second dog does not contradict "a dog".
    - *kind*: each caption has exactly one, and not the same, of two words that exclude each other.
    """
    conflicts: list[Conflict] = []
    for attribute, values in (("count", _NUMBERS), ("colour", _COLOURS)):
        ours, theirs = _attached(blend, values), _attached(holistic, values)
        for noun in ours:
            if noun in theirs and not ours[noun] & theirs[noun]:
                texts = (" ".join(sorted(words)) for words in (ours[noun], theirs[noun]))
                conflicts.append(Conflict(f"{attribute} of {noun!r}", *texts))
    first, second = _named(blend), _named(holistic)
    for group in _EXCLUSIVE:
        if len(first & group) == 1 and len(second & group) == 1 and first & group != second & group:
            conflicts.append(Conflict("kind", *(first & group), *(second & group)))
    return conflicts


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
            masks = {"conflicts": exact, "conflicts_by_words": exact & words, "false_conflicts": ~exact & words}
            row |= {name: float(values.mean()) for name, values in masks.items()}
    write_json(args.output / "results.json", {"rows": rows})


if __name__ == "__main__":
    main()
