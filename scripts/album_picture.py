"""The picture of an album before and after on the front page: one caption per image by beam search, and the album's choice.

python scripts/album_picture.py          # writes docs/images/album.png with the shipped captioner and scorer
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl import load_captioner, load_scorer  # noqa: E402
from hf_captionrl.album.album import describe_album  # noqa: E402
from hf_captionrl.reports.plot_style import new_figure, plain_label, save_figure  # noqa: E402
from hf_captionrl.scenes import bags, check, load_scenes  # noqa: E402
from hf_captionrl.scenes.models import model_path  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "album.png"
_RIGHT, _WRONG = "#116329", "#b3261e"
_LINE = 0.115
"""Height of a line of text, of that of an image."""


def draw(path: Path, images: Sequence[Any], captions: dict[str, Sequence[tuple[str, bool]]]) -> Path:
    """Images in a row; under each its captions, green where they are good.

    Args:
        captions: For each name, such as `before`, a caption per image and whether it is good.
    """
    figure, axes = new_figure(2.1 * len(images), 4.6, columns=len(images))
    figure.set_layout_engine(None)
    figure.subplots_adjust(bottom=0.55, top=0.99, left=0.01, right=0.99, wspace=0.06)
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
    return save_figure(path, figure)


def marked(album: Any, facts: Sequence[Any]) -> list[tuple[str, bool]]:
    """Captions, and whether each is unique, ranks its image first and claims nothing that is wrong."""
    return [
        (image.caption, image.is_distinct and image.rank == 1 and not check(image.caption, true).wrong)
        for image, true in zip(album.images, facts, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Caption the first bag of five look-alikes, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scenes:blip-mle")
    parser.add_argument("--scorer", default="scenes:siglip-held-out")
    parser.add_argument("--bag", type=int, default=0, help="which bag of five")
    parser.add_argument("--output", type=Path, default=PICTURE)
    arguments = parser.parse_args(argv)
    rows = load_scenes(num_train=0, num_validation=0, num_test=45)["test"]
    bag = bags(list(rows["bag_id"]), 5)[arguments.bag]
    images, facts = [rows[row]["image"] for row in bag], [rows[row]["facts"] for row in bag]
    captioner = load_captioner(model_path(arguments.model), device="cpu")
    scorer = load_scorer(model_path(arguments.scorer), device="cpu")
    before = describe_album(images, captioner, scorer, num_beams=3, num_samples=0, choice="first")
    after = describe_album(images, captioner, scorer)
    draw(arguments.output, images, {"before": marked(before, facts), "after": marked(after, facts)})


if __name__ == "__main__":
    main()
