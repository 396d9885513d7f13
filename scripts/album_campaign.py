"""Compares ways to caption an album of look-alikes at equal compute: one caption, best of N, assignment, RSA, finetuning on it.

    python scripts/album_campaign.py                     # three seeds, every setting; continues an interrupted run
    python scripts/album_campaign.py --images 56 --seeds 0 --samples 1 4 --adapt 20 --only MLE --output outputs/try
    python scripts/album_campaign.py --render            # page and plot from existing numbers

An album is a part of the embedded world's test split: bags of 7 look-alikes whose facts are known, so that facts which all images
of a bag share and facts that vary are known, too. The reward scorer chooses captions and rewards finetuning; the held-out scorer and
the exact checker evaluate. Every finished setting and seed is a row of `rows.jsonl`. Compute is the CPU time of the process for
captioning, choosing and finetuning, without loading models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl import load_captioner, load_scorer  # noqa: E402
from hf_captionrl.album.adapt_captioner import adapt_to_album  # noqa: E402
from hf_captionrl.album.distinct_captions import distinct_captions, same_text  # noqa: E402
from hf_captionrl.album.phrase_removal import drop_shared  # noqa: E402
from hf_captionrl.album.pragmatic_decoding import pragmatic_captions  # noqa: E402
from hf_captionrl.album.shared_phrases import shared_phrases  # noqa: E402
from hf_captionrl.io import LineFile, read_jsonl  # noqa: E402
from hf_captionrl.reports.plot_style import COLOURS, MARKERS, new_figure, plain_label, save_figure, tidy  # noqa: E402
from hf_captionrl.retrieval import nearest_neighbours  # noqa: E402
from hf_captionrl.retrieval.ranking import ranks  # noqa: E402
from hf_captionrl.scenes import check, load_scenes  # noqa: E402
from hf_captionrl.scenes.models import model_path  # noqa: E402
from hf_captionrl.trainers.caption_generation import generate_captions  # noqa: E402
from scripts.page_sections import write_section  # noqa: E402

OUTPUT = ROOT / "docs" / "album_campaign"
CAPTIONERS = {"MLE": "scenes:blip-mle", "SMILE": "scenes:blip-smile", "SR": "scenes:blip-sr"}
_BATCH = 16
_TOKENS = 40
COLUMNS = {
    "distinct": "distinct texts",
    "held_out": "R@1, held-out",
    "reward": "R@1, reward scorer",
    "varying": "recall of varying facts",
    "leaked": "shared facts left by --drop_shared",
    "hallucination": "hallucination",
    "words": "words",
    "cpu_s": "CPU s per image",
}
Setting = tuple[str, Callable[["AlbumOfSeed"], list[str]]]


class AlbumOfSeed:
    """Images of one seed with their facts, the scorers' features, and pools of samples that several settings share."""

    def __init__(self, seed: int, number: int, scorers: dict[str, Any], most_samples: int) -> None:
        self.seed, self.scorers, self.most_samples = seed, scorers, most_samples
        rows = load_scenes(num_train=0, num_validation=0, num_test=number, seed=1000 + seed)["test"]
        rows = rows.filter(lambda bag: bag != "", input_columns="bag_id")
        self.images = [image.convert("RGB") for image in rows["image"]]
        self.facts, self.bags = list(rows["facts"]), list(rows["bag_id"])
        self.features = {name: scorer.image_features(self.images) for name, scorer in scorers.items()}
        self.cpu_s = 0.0
        self._models: dict[str, Any] = {}
        self._pools: dict[str, tuple[list[list[str]], float]] = {}

    def model(self, name: str) -> Any:
        """A captioner, loaded once."""
        if name not in self._models:
            self._models[name] = load_captioner(model_path(CAPTIONERS[name]), device="cpu")
        return self._models[name]

    def samples(self, name: str, number: int) -> list[list[str]]:
        """The first samples of each image; their share of the pool's time counts."""
        if name not in self._pools:
            torch.manual_seed(self.seed)
            start = time.process_time()
            texts = generate_captions(
                self.model(name),
                self.images,
                batch_size=_BATCH,
                do_sample=True,
                num_beams=1,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                num_return_sequences=self.most_samples,
                max_new_tokens=_TOKENS,
            )
            each = self.most_samples
            pool = [texts[at : at + each] for at in range(0, len(texts), each)]
            self._pools[name] = (pool, time.process_time() - start)
        pool, seconds = self._pools[name]
        self.cpu_s += seconds * number / self.most_samples
        return [mine[:number] for mine in pool]


def beam(album: AlbumOfSeed, captioner: Any) -> list[str]:
    """One caption per image by beam search."""
    settings: dict[str, Any] = {"do_sample": False, "num_beams": 3, "max_new_tokens": _TOKENS}
    return generate_captions(captioner, album.images, batch_size=_BATCH, **settings)


def chosen(album: AlbumOfSeed, name: str, number: int, *, exclusive: bool) -> list[str]:
    """Of the first samples, the largest margin of each image, or the assignment of all images."""
    candidates = album.samples(name, number)
    scorer = album.scorers["reward"]
    text = scorer.text_features([caption for mine in candidates for caption in mine])
    found = distinct_captions(candidates, text, album.features["reward"], exclusive=exclusive)
    return [caption.caption for caption in found.captions]


def pragmatic(album: AlbumOfSeed, name: str, rationality: float) -> list[str]:
    """One caption per image by beams with a listener that knows the three most similar images."""
    near = nearest_neighbours(album.features["reward"], min(3, len(album.images) - 1))[0].tolist()
    found = []
    for row, others in enumerate(near):
        group = [album.images[i] for i in (row, *others)]
        settings: dict[str, Any] = {"rationality": rationality, "num_beams": 3, "max_new_tokens": _TOKENS}
        found += pragmatic_captions(album.model(name), group, [list(range(len(group)))], **settings)
    return [mine[0] for mine in found]


def adapted(album: AlbumOfSeed, name: str, seconds: float) -> list[str]:
    """One beam of the captioner after finetuning on the album; without the decision, which is not what is measured."""
    with tempfile.TemporaryDirectory() as folder:
        used: list[Any] = []

        def load() -> Any:
            used.append(load_captioner(model_path(CAPTIONERS[name]), device="cpu"))
            return used[-1]

        scorers = (album.scorers["reward"], album.scorers["held_out"])
        adapt_to_album(load, *scorers, album.images, folder, seconds=seconds, cache_dir=folder, seed=album.seed)
        return beam(album, used[0])


def settings_of(names: Sequence[str], samples: Sequence[int], adapt: Sequence[float]) -> Iterator[Setting]:
    """Every setting: its name, and the function that captions an album."""
    for name in names:
        yield f"{name}, one beam", lambda album, name=name: beam(album, album.model(name))  # type: ignore[misc]
        if name == "SMILE":
            continue
        for number in samples:
            yield f"{name}, best of {number}", lambda a, n=name, k=number: chosen(a, n, k, exclusive=False)  # type: ignore[misc]
            if number > 1:
                yield f"{name}, assignment of {number}", lambda a, n=name, k=number: chosen(a, n, k, exclusive=True)  # type: ignore[misc]
        for weight in (1.0, 3.0):
            yield f"{name}, RSA {weight:g}", lambda a, n=name, w=weight: pragmatic(a, n, w)  # type: ignore[misc]
    for seconds in adapt if "MLE" in names else ():
        yield f"MLE, adapted {seconds:g} s", lambda album, s=seconds: adapted(album, "MLE", s)  # type: ignore[misc]


def evaluate(album: AlbumOfSeed, captions: Sequence[str]) -> dict[str, float]:
    """The numbers of the page, without the time."""
    found: dict[str, float] = {}
    texts = [same_text(caption) for caption in captions]
    found["distinct"] = sum(texts.count(text) == 1 for text in texts) / len(texts)
    for name, scorer in album.scorers.items():
        rank = ranks(scorer.text_features(captions), album.features[name])
        found[name] = float((rank == 1).double().mean())
    results = [check(caption, facts) for caption, facts in zip(captions, album.facts, strict=True)]
    claims = sum(len(r.right) + len(r.wrong) for r in results)
    found["hallucination"] = sum(len(r.wrong) for r in results) / max(claims, 1)
    found["words"] = float(np.mean([len(caption.split()) for caption in captions]))
    shared = shared_facts(album)
    varying = [
        (len(set(r.recalled) - same), len((set(r.recalled) | set(r.missed)) - same))
        for r, same in zip(results, shared, strict=True)
    ]
    found["varying"] = sum(a for a, _ in varying) / max(sum(b for _, b in varying), 1)
    found["leaked"] = leakage(album, captions, results, shared)
    return found


def shared_facts(album: AlbumOfSeed) -> list[set[str]]:
    """For each image, names of the facts that all images of its bag have in common."""
    of_bag: dict[str, set[str]] = {}
    for bag in dict.fromkeys(album.bags):
        facts = [f for f, b in zip(album.facts, album.bags, strict=True) if b == bag]
        of_bag[bag] = {name for name in facts[0] if len({str(f[name]) for f in facts}) == 1}
    return [of_bag[bag] for bag in album.bags]


def leakage(album: AlbumOfSeed, captions: Sequence[str], results: Sequence[Any], shared: Sequence[set[str]]) -> float:
    """Of the shared facts that the captions name, the share that `--drop_shared` leaves in them."""
    phrases = {
        bag: shared_phrases([c for c, b in zip(captions, album.bags, strict=True) if b == bag]) for bag in album.bags
    }
    left = total = 0
    for caption, bag, facts, before, same in zip(captions, album.bags, album.facts, results, shared, strict=True):
        named = set(before.recalled) & same
        after = set(check(drop_shared(caption, phrases[bag]), facts).recalled)
        left, total = left + len(named & after), total + len(named)
    return left / max(total, 1)


def measure(arguments: argparse.Namespace) -> None:
    """Write the missing rows."""
    path = arguments.output / "rows.jsonl"
    arguments.output.mkdir(parents=True, exist_ok=True)
    names = arguments.only or list(CAPTIONERS)
    scorers = {
        "reward": load_scorer(model_path("scenes:clip-reward"), device="cpu"),
        "held_out": load_scorer(model_path("scenes:siglip-held-out"), device="cpu"),
    }
    with LineFile(path) as file:
        data = path.read_bytes()
        file.truncate(data.rfind(b"\n") + 1)  # a killed run may leave an incomplete line
        done = {(row["setting"], row["seed"], row["images"]) for _, row in read_jsonl(path)}
        for seed in arguments.seeds:
            album = None
            for name, caption in settings_of(names, arguments.samples, arguments.adapt):
                if (name, seed, arguments.images) in done:
                    continue
                album = album or AlbumOfSeed(seed, arguments.images, scorers, max(arguments.samples))
                before, album.cpu_s = time.process_time(), 0.0
                pools = sum(seconds for _, seconds in album._pools.values())
                captions = caption(album)
                # The pool was drawn now for all settings that use it; only the part of this setting counts.
                drawn = sum(seconds for _, seconds in album._pools.values()) - pools
                seconds = time.process_time() - before - drawn + album.cpu_s
                row = {"setting": name, "seed": seed, "images": arguments.images, **evaluate(album, captions)}
                row["cpu_s"] = seconds / len(album.images)
                file.append_bytes((json.dumps(row) + "\n").encode())
                print(json.dumps(row), flush=True)


def aggregated(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Mean and standard error over seeds, by setting and column."""
    found: dict[str, dict[str, tuple[float, float | None]]] = {}
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        found[name] = {}
        for column in COLUMNS:
            values = np.array([row[column] for row in mine])
            error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
            found[name][column] = (float(values.mean()), error)
    return found


def render(output: Path) -> None:
    """Write page and plot from the rows."""
    rows = [row for _, row in read_jsonl(output / "rows.jsonl")]
    found = aggregated(rows)
    seeds, images = sorted({row["seed"] for row in rows}), sorted({row["images"] for row in rows})
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|:--|" + "--:|" * len(COLUMNS)]
    for name, values in found.items():
        cells = []
        for column, (mean, error) in values.items():
            digits = 1 if column == "words" else 2 if column == "cpu_s" else 3
            cells.append(f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    note = (
        f"Albums of {', '.join(f'{n:,}' for n in images)} images, {len(seeds)} seeds; ± is the standard error over seeds. The reward "
        "scorer chooses and rewards, so its R@1 is higher than that of the held-out scorer where it is exploited."
    )
    write_section(output / "page.md", "album-campaign", "\n".join([*lines, "", note]), title="Captioning an album")
    plot(output / "compute.png", found)


def plot(path: Path, found: dict[str, dict[str, tuple[float, float | None]]]) -> None:
    """Compute against R@1 of the held-out scorer, and against hallucination."""
    figure, axes = new_figure(10.0, 4.5, columns=2)
    kinds = list(dict.fromkeys(_kind(name) for name in found))
    for axis, column in zip(axes, ("held_out", "hallucination"), strict=True):
        for index, kind in enumerate(kinds):
            points = sorted((v["cpu_s"][0], *v[column]) for name, v in found.items() if _kind(name) == kind)
            axis.errorbar(
                [x for x, _, _ in points],
                [y for _, y, _ in points],
                yerr=[error or 0 for _, _, error in points],
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                label=plain_label(kind),
            )
        axis.set_xscale("log")
        axis.set_xlabel("CPU seconds per image")
        axis.set_ylabel(COLUMNS[column])
        tidy(axis)
    axes[0].legend(fontsize=8)
    save_figure(path, figure)


def _kind(name: str) -> str:
    """Settings that differ in a number are one line of the plot."""
    return name.rstrip(" s").rstrip("0123456789.").removesuffix(" of ").strip()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then write page and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=350, help="of the album of a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--adapt", type=float, nargs="*", default=[60.0, 180.0, 600.0], help="seconds")
    parser.add_argument("--only", nargs="+", choices=list(CAPTIONERS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args(argv)
    if not arguments.render:
        measure(arguments)
    render(arguments.output)


if __name__ == "__main__":
    main()
