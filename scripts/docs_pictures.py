"""The pictures of README.md and of the pages.

    python scripts/docs_pictures.py                                    # those made from the committed results, into docs/images
    python scripts/docs_pictures.py --check                            # do they show them? part of `make check`
    captionrl gallery --captions scenes:blip-mle scenes:blip-smile scenes:blip-sr --names MLE SMILE Self-retrieval \
        --max_images 105 --bag_size 3
    python scripts/docs_pictures.py --gallery outputs/gallery/bags.html    # docs/images/gallery.png too, by a headless Chromium

The gallery's picture shows the page as it opens: its first bag, whatever that is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from hf_captionrl.io import atomic_write_bytes
from hf_captionrl.reports.plot_style import COLOURS, new_figure, save_figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python scripts/docs_pictures.py` puts scripts/ there, not the folder that holds it

from scripts.docs_plots import PLOTS  # noqa: E402

RESULTS = ROOT / "docs" / "results"
IMAGES = ROOT / "docs" / "images"

ROWS = (
    ("MLE (start)", "smile_blip_seeds.json", "MLE"),
    ("further MLE", "smile_blip_seeds.json", "MLE+MLE"),
    ("SMILE", "smile_blip_seeds.json", "SMILE"),
    ("self-retrieval, random distractors", "self_retrieval_bags_seeds.json", "SR (random)"),
    ("self-retrieval, bag curriculum", "self_retrieval_bags_seeds.json", "SR (bag curriculum)"),
)
"""Rows of the picture: label, file, and name of the row in it."""

COLUMNS = (
    ("length", "words"),
    ("rd100_recall_at_1", "R@1 among\n100 images"),
    ("bag_7_recall_at_1", "R@1 in bags of\n7 look-alikes"),
    ("fact_recall", "fact recall"),
    ("hallucination", "hallucination"),
    ("cider_d", "CIDEr-D"),
)
"""Keys of the results and what they are called."""


def before_after() -> list[tuple[str, list[tuple[float, float]]]]:
    """The numbers of the picture.

    Returns for each row its name and, for each column, mean and standard error over seeds.
    """
    table = []
    for name, file, key in ROWS:
        rows = {row["name"]: row for row in json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]}
        table.append(
            (name, [(rows[key][column]["mean"], rows[key][column]["standard_error"]) for column, _ in COLUMNS])
        )
    return table


def numbers() -> str:
    """The numbers of the picture as text, which the picture carries along."""
    return json.dumps({"columns": [key for key, _ in COLUMNS], "rows": before_after()})


def is_current(path: Path, wanted: str) -> bool:
    """Whether a picture was drawn from the committed results."""
    if not path.is_file():
        return False
    with Image.open(path) as picture:
        return picture.info.get("Numbers") == wanted


def draw(path: Path) -> Path:
    """Draw the table, a bar behind each number."""
    table = before_after()
    figure, axis = new_figure(9.6, 2.9)
    figure.patch.set_facecolor("white")
    axis.set_xlim(0, 2.1 + len(COLUMNS))
    axis.set_ylim(len(table) - 0.45, -1.15)
    axis.axis("off")
    for column, (_, title) in enumerate(COLUMNS):
        axis.text(2.1 + column, -0.6, title, fontsize=8.5, color="#5d6370", va="bottom")
        top = max(values[column][0] for _, values in table)
        for row, (_, values) in enumerate(table):
            mean, error = values[column]
            axis.barh(
                row, 0.86 * mean / top, left=2.1 + column, height=0.62, color=_colour(row), alpha=0.28, linewidth=0
            )
            digits = 1 if column == 0 else 2 if column == len(COLUMNS) - 1 else 3
            text = f"{mean:.{digits}f} ±{error:.{digits}f}"
            axis.text(2.1 + column + 0.03, row, text, fontsize=8.5, color="#1d2129", va="center")
    for row, (name, _) in enumerate(table):
        axis.text(0, row, name, fontsize=9, color="#1d2129", va="center", weight="bold" if row > 1 else "normal")
    axis.axhline(-0.5, color="#b9b6ae", linewidth=0.8)
    return save_figure(path, figure, text={"Numbers": numbers()})


def _colour(row: int) -> Any:
    return COLOURS[0] if row < 2 else COLOURS[row - 1]


def photograph(page: Path, path: Path, *, width: int = 1180, height: int = 930) -> Path:
    """The top of a page as Chromium shows it."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise FileNotFoundError("There is no Chromium on this machine. Install chromium, or leave --gallery out.")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += f" --disable-component-update --disable-sync --hide-scrollbars --window-size={width},{height}"
        command = [chromium, *flags.split(), f"--user-data-dir={folder}/profile", f"--screenshot={shot}"]
        subprocess.run([*command, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
        return atomic_write_bytes(path, shot.read_bytes())


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gallery", type=Path, metavar="PAGE", help="bags.html of `captionrl gallery`")
    parser.add_argument("--output_dir", type=Path, default=IMAGES, metavar="DIR", help="(default: docs/images)")
    parser.add_argument("--check", action="store_true", help="only say whether the pictures are current; 1 if not")
    options = parser.parse_args(arguments)
    if options.check:
        wanted = {"before_after.png": numbers()} | {p.file: p.numbers() for p in PLOTS}
        old = [name for name, text in wanted.items() if not is_current(options.output_dir / name, text)]
        for name in old:
            print(f"{name} does not show the committed results. Run python scripts/docs_pictures.py.")
        return int(bool(old))
    print(draw(options.output_dir / "before_after.png").name)
    for plot in PLOTS:
        print(plot.draw(options.output_dir / plot.file).name)
    if options.gallery is not None:
        print(photograph(options.gallery, options.output_dir / "gallery.png").name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
