"""Measures the time and memory of `captionrl album` without captioning and encoding, each size in a process of its own.

    python scripts/album_speed.py                    # 1,000 and 10,000 images: a minute
    python scripts/album_speed.py --sizes 1000 10000 100000
    python scripts/album_speed.py --render           # the table of docs/scaling.md from existing numbers

Every image has 16 candidates with features of 512 numbers, which are made when they are read; candidates repeat as those of a
captioner do. One thread. Memory is the largest resident set of the process, which measures nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl.apps.album.album import AlbumEngine  # noqa: E402
from hf_captionrl.apps.album.model_work import LoadedWork  # noqa: E402
from hf_captionrl.apps.album.result import diagnose  # noqa: E402
from hf_captionrl.apps.album.settings import AlbumSettings  # noqa: E402
from hf_captionrl.apps.album.sources import ImageFacts  # noqa: E402
from hf_captionrl.metrics.table import installed_versions  # noqa: E402
from hf_captionrl.utils.io import write_json  # noqa: E402
from scripts.page_sections import write_section  # noqa: E402
from scripts.scaling_stages import features_of  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "album_speed.json"
PAGE = ROOT / "docs" / "scaling.md"
CANDIDATES = 16
_WIDTH = 512
_BANK = 4096
_WORDS = "a the red blue small large old young dog cat man woman boat house tree ball left right above near grass sea".split()


class MadeScorer:
    """Features of a candidate: those of its image and noise, made when they are read."""

    logit_scale = 1.0
    max_text_tokens = 77
    signature = "made"

    def __init__(self, images: torch.Tensor, row_of: dict[str, int]) -> None:
        self.images, self.row_of = images, row_of
        self.noise = torch.randn(_BANK, _WIDTH, generator=torch.Generator().manual_seed(2)) / _WIDTH**0.5

    def text_features(self, captions: Sequence[str]) -> torch.Tensor:
        """`(N, D)`, unit length."""
        rows = torch.tensor([self.row_of[caption] for caption in captions])
        features = self.images[rows % len(self.images)] + 0.8 * self.noise[rows % _BANK]
        return torch.nn.functional.normalize(features, dim=1)

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        """Tokens of captions."""
        return [len(caption.split()) for caption in captions]


def made_album(count: int) -> tuple[ImageFacts, list[list[str]], MadeScorer]:
    """Images, 16 candidates of each, and their scorer."""
    rng = np.random.default_rng(0)
    features = torch.nn.functional.normalize(features_of(count, _WIDTH), dim=1)
    # Texts of 8 words; a tenth of the candidates are texts that many images have.
    texts = [" ".join(_WORDS[w] for w in words) for words in rng.integers(0, len(_WORDS), (count, 6))]
    candidates = [
        [f"{texts[row]} {n}" for n in range(CANDIDATES - 2)]
        + [f"{texts[common]} of many" for common in (rng.random(2) ** 3 * count / 4).astype(int)]
        for row in range(count)
    ]
    row_of: dict[str, int] = {}
    for row, mine in enumerate(candidates):
        for text in mine:
            row_of.setdefault(text, row)
    pictures = rng.integers(0, 256, (count, 768), dtype=np.uint8)
    facts = ImageFacts(list(range(count)), [f"{n:032x}" for n in range(count)], pictures, features)
    return facts, candidates, MadeScorer(features, row_of)


def measure(count: int) -> dict[str, Any]:
    """Describe an album of so many images; seconds of each stage, and MiB."""
    facts, candidates, scorer = made_album(count)
    held = resident_mib()
    ids = [str(row) for row in range(count)]
    settings = AlbumSettings()
    images: Any = range(count)
    work = LoadedWork(images, ids, None, scorer, settings)  # type: ignore[arg-type]
    engine = AlbumEngine(images, ids, candidates, work, scorer, settings, [""] * count)  # type: ignore[arg-type]
    times = [time.process_time()]
    engine.prepare(facts, threshold=0.99)
    times.append(time.process_time())
    album = engine.choose()
    times.append(time.process_time())
    engine.find_shared(album)
    diagnose(album, scorer)  # type: ignore[arg-type]
    times.append(time.process_time())
    neighbours, choice, report = (later - earlier for earlier, later in itertools.pairwise(times))
    summary = album.summary()
    return {
        "images": count,
        "candidates": count * CANDIDATES,
        "neighbours_s": round(neighbours, 2),
        "choice_s": round(choice, 2),
        "report_s": round(report, 2),
        "total_s": round(times[-1] - times[0], 2),
        "input_mib": round(held),
        "peak_mib": round(_peak_mib()),
        "distinct": round(summary["distinct"], 4),
    }


def measure_alone(count: int) -> dict[str, Any]:
    """[`measure`] in a new process, because the largest resident set of a process includes everything before."""
    # A forked process would begin with the memory of this one.
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,)) as pool:
        return pool.apply(measure, (count,))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib() -> float:
    """Resident set of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def table(results: dict[str, Any]) -> str:
    """The rows of the page."""
    head = "| images | candidates | neighbours and copies, s | comparing and choosing, s | what varies, diagnosis, s | total, s | peak MiB |"
    lines = [head, "|" + "--:|" * 7]
    for row in results["rows"]:
        times = " | ".join(f"{row[name]:.1f}" for name in ("neighbours_s", "choice_s", "report_s", "total_s"))
        lines.append(f"| {row['images']:,} | {row['candidates']:,} | {times} | {row['peak_mib']:,} |")
    versions = ", ".join(
        f"{name} {results['versions'][name]}" for name in ("python", "torch", "numpy") if name in results["versions"]
    )
    return "\n".join(
        [*lines, "", f"CPU seconds of one thread; the largest resident set of the whole process. {versions}."]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the numbers and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--render", action="store_true", help="write the page from existing numbers")
    arguments = parser.parse_args(argv)
    if not arguments.render:
        rows = []
        for size in sorted(arguments.sizes):
            rows.append(measure_alone(size))
            print(json.dumps(rows[-1]), flush=True)
        write_json(arguments.results, {"rows": rows, "versions": installed_versions()})
    results = json.loads(arguments.results.read_text(encoding="utf-8"))
    write_section(arguments.page, "album-speed", table(results))


if __name__ == "__main__":
    main()
