"""The picture of an album before and after on the front page: one caption per image by beam search, and the album's choice.

    python scripts/album_picture.py     # docs/images/album.png and docs/results/album_picture.json

Albums of five look-alikes of the embedded world, with the shipped captioner; the reward scorer chooses. The picture shows the
album whose numbers of good captions are nearest to the means. A caption is good if no other image has it, the held-out scorer ranks its
image first, and all its claims are true.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl import load_captioner, load_scorer  # noqa: E402
from hf_captionrl.apps.album.album import describe_album  # noqa: E402
from hf_captionrl.evaluation.plots import new_figure, plain_label, save_figure  # noqa: E402
from hf_captionrl.metrics.bootstrap import bootstrap_interval  # noqa: E402
from hf_captionrl.retrieval.ranking import ranks  # noqa: E402
from hf_captionrl.scenes import bags, check, load_scenes  # noqa: E402
from hf_captionrl.utils.io import write_json  # noqa: E402
from hf_captionrl.utils.model_files import model_path  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "album.png"
RESULTS = ROOT / "docs" / "results" / "album_picture.json"
_RIGHT, _WRONG = "#116329", "#b3261e"
_LINE = 0.115
"""Height of a line of text, of that of an image."""


def draw(path: Path, images: Sequence[Any], captions: dict[str, Sequence[tuple[str, bool]]]) -> Path:
    """Images in a row; under each its captions, green where they are good."""
    figure, axes = new_figure(2.1 * len(images), 4.2, columns=len(images))
    figure.set_layout_engine(None)
    figure.subplots_adjust(bottom=0.5, top=0.99, left=0.01, right=0.99, wspace=0.06)
    for number, (axis, image) in enumerate(zip(np.atleast_1d(axes), images, strict=True)):
        axis.imshow(image)
        axis.set_axis_off()
        axis.set_anchor("N")
        line = 1.0
        for name, mine in captions.items():
            wrapped = [textwrap.wrap(text, 23) or ["-"] for text, _ in mine]
            settings = {"transform": axis.transAxes, "va": "top", "fontsize": 9}
            if number == 0:
                axis.text(0.0, -_LINE * line, name, fontweight="bold", **settings)
            colour = _RIGHT if mine[number][1] else _WRONG
            text = plain_label("\n".join(wrapped[number]))
            axis.text(0.0, -_LINE * (line + 1), text, color=colour, **settings)
            line += 1.6 + max(map(len, wrapped))
    return save_figure(path, figure, text={"Numbers": numbers(captions)})


def numbers(captions: Any) -> str:
    """What the picture carries along, so that `make check` compares it with the committed results."""
    return json.dumps(captions)


def ranks_by(scorer: Any, images: Sequence[Any], captions: Sequence[str]) -> list[int]:
    """Rank of each caption's image among those of the album, by the scorer that evaluates."""
    return ranks(scorer.text_features(list(captions)), scorer.image_features(list(images))).tolist()


def marked(album: Any, facts: Sequence[Any], places: Sequence[int]) -> list[tuple[str, bool]]:
    """Captions, and whether each is unique, ranks its image first and claims nothing that is wrong."""
    return [
        (image.caption, image.is_distinct and place == 1 and not check(image.caption, true).wrong)
        for image, true, place in zip(album.images, facts, places, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Caption albums of five look-alikes, and draw one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scenes:blip-mle")
    parser.add_argument("--scorer", default="scenes:clip-reward", help="chooses captions")
    parser.add_argument("--held_out_scorer", default="scenes:siglip-held-out", help="evaluates them")
    parser.add_argument("--albums", type=int, default=24)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    rows = load_scenes(num_train=0, num_validation=0)["test"]
    captioner = load_captioner(model_path(arguments.model), device="cpu")
    scorer, held_out = (
        load_scorer(model_path(name), device="cpu") for name in (arguments.scorer, arguments.held_out_scorer)
    )
    albums: list[tuple[list[Any], dict[str, Sequence[tuple[str, bool]]]]] = []
    for bag in bags(list(rows["bag_id"]), 5)[: arguments.albums]:
        images, facts = [rows[row]["image"] for row in bag], [rows[row]["facts"] for row in bag]
        found = {
            "before": describe_album(images, captioner, scorer, num_beams=3, num_samples=0, choice="first"),
            "after": describe_album(images, captioner, scorer),
        }
        captions: dict[str, Sequence[tuple[str, bool]]] = {
            name: marked(album, facts, ranks_by(held_out, images, [image.caption for image in album.images]))
            for name, album in found.items()
        }
        albums.append((images, captions))
    good = {name: [sum(fine for _, fine in captions[name]) for _, captions in albums] for name in ("before", "after")}
    gains = [after - before for before, after in zip(good["before"], good["after"], strict=True)]
    means = [sum(counts) / len(counts) for counts in good.values()]
    distances = [
        sum(abs(n - m) for n, m in zip(counts, means, strict=True)) for counts in zip(*good.values(), strict=True)
    ]
    shown = min(range(len(albums)), key=distances.__getitem__)
    draw(arguments.output, *albums[shown])
    values = {
        "command": "python scripts/album_picture.py",
        "albums": len(albums),
        "images_per_album": 5,
        "shown": shown,
        "captions": albums[shown][1],
        "good": {
            name: {
                "value": sum(counts) / (5 * len(counts)),
                "interval": [bound / 5 for bound in bootstrap_interval(counts)],
            }
            for name, counts in good.items()
        },
        "gain": {
            "value": sum(gains) / (5 * len(gains)),
            "interval": [bound / 5 for bound in bootstrap_interval(gains)],
        },
    }
    write_json(arguments.results, values)
    print(values)


if __name__ == "__main__":
    main()
