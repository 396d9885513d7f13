"""Compares ways to caption an album of look-alikes at equal compute: one caption, best of N, assignment, RSA, finetuning on it.

    python scripts/album_campaign.py                     # three seeds, every setting; continues an interrupted run
    python scripts/album_campaign.py --images 56 --seeds 0 --samples 1 4 --adapt 20 --only MLE --output outputs/try
    python scripts/album_campaign.py --render            # result and page from existing rows

An album is a part of the embedded world's test split: bags of 7 look-alikes whose facts are known, so that facts which all images
of a bag share and facts that vary are known, too. A seed draws other images and other samples; the captioners are the same. The reward
scorer chooses captions and rewards finetuning; the held-out scorer and the exact checker evaluate. The held-out scorer also guards and
judges finetuning, so the exact checker is the only judge of it that has no part in it. Every finished setting and seed is a row of
`rows.jsonl`. Compute is the CPU time of the process for encoding images, captioning, choosing and finetuning, without loading models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl import load_captioner, load_scorer  # noqa: E402
from hf_captionrl.apps.album.album import describe_album  # noqa: E402
from hf_captionrl.apps.album.candidates import (
    adapt_to_album,
    pragmatic_captions,
)
from hf_captionrl.apps.album.distinct import (  # noqa: E402
    distinct_captions,
    drop_shared,
    same_text,
    shared_phrases,
)
from hf_captionrl.captioners.pipeline import generate_captions  # noqa: E402
from hf_captionrl.retrieval import nearest_neighbours  # noqa: E402
from hf_captionrl.retrieval.ranking import ranks  # noqa: E402
from hf_captionrl.scenes import check, load_scenes  # noqa: E402
from hf_captionrl.utils.io import LineFile, read_jsonl, write_json  # noqa: E402
from hf_captionrl.utils.model_files import model_path  # noqa: E402
from scripts.album_numbers import CAPTIONERS, result_of, to_markdown  # noqa: E402
from scripts.page_sections import write_section  # noqa: E402

ROWS = ROOT / "outputs" / "album_campaign"
RESULT = ROOT / "docs" / "results" / "album_campaign.json"
PAGE = ROOT / "docs" / "best_of_n.md"
_BATCH = 16
_TOKENS = 40
Setting = tuple[str, Callable[["AlbumOfSeed"], list[str]]]


class AlbumOfSeed:
    """Images of one seed with their facts, the scorers' features, and pools of samples that several settings share."""

    def __init__(self, seed: int, number: int, scorers: dict[str, Any], most_samples: int) -> None:
        self.seed, self.scorers, self.most_samples = seed, scorers, most_samples
        rows = load_scenes(num_train=0, num_validation=0, num_test=number, seed=1000 + seed)["test"]
        rows = rows.filter(lambda bag: bag != "", input_columns="bag_id")
        self.images = [image.convert("RGB") for image in rows["image"]]
        self.facts, self.bags = list(rows["facts"]), list(rows["bag_id"])
        start = time.process_time()
        self.features = {"reward": scorers["reward"].image_features(self.images)}
        self.encoding_s = time.process_time() - start
        self.features["held_out"] = scorers["held_out"].image_features(self.images)
        self.charged_s = 0.0  # of what several settings share
        self.facts_of_adapter: dict[str, Any] = {}
        self._models: dict[str, Any] = {}
        self._pools: dict[str, tuple[list[list[str]], list[float]]] = {}

    def model(self, name: str) -> Any:
        """A captioner, loaded once."""
        if name not in self._models:
            self._models[name] = load_captioner(model_path(CAPTIONERS[name]), device="cpu")
        return self._models[name]

    def reward_features(self) -> Any:
        """The reward scorer's image features; their time counts for every setting that uses them."""
        self.charged_s += self.encoding_s
        return self.features["reward"]

    def samples(self, name: str, number: int) -> list[list[str]]:
        """The first samples of each image. A run that draws only these would encode all images, and this time counts."""
        if name not in self._pools:
            seconds = [self._draw(name, 1)[1]]
            pool, longest = self._draw(name, self.most_samples)
            seconds.append(max(longest, seconds[0]))
            self._pools[name] = (pool, seconds)
        pool, (one, all_of_them) = self._pools[name]
        self.charged_s += one + (all_of_them - one) * (number - 1) / max(self.most_samples - 1, 1)
        return [mine[:number] for mine in pool]

    def drawn_s(self) -> float:
        """CPU time of all pools so far."""
        return sum(sum(seconds) for _, seconds in self._pools.values())

    def _draw(self, name: str, each: int) -> tuple[list[list[str]], float]:
        model = self.model(name)
        torch.manual_seed(self.seed)
        start = time.process_time()
        texts = generate_captions(
            model,
            self.images,
            batch_size=_BATCH,
            do_sample=True,
            num_beams=1,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_return_sequences=each,
            max_new_tokens=_TOKENS,
        )
        seconds = time.process_time() - start
        return [texts[at : at + each] for at in range(0, len(texts), each)], seconds


def beam(album: AlbumOfSeed, captioner: Any) -> list[str]:
    """One caption per image by beam search."""
    settings: dict[str, Any] = {"do_sample": False, "num_beams": 3, "max_new_tokens": _TOKENS}
    return generate_captions(captioner, album.images, batch_size=_BATCH, **settings)


def one_beam(album: AlbumOfSeed, name: str) -> list[str]:
    """One caption per image by beam search of a shipped captioner."""
    return beam(album, album.model(name))


def chosen(album: AlbumOfSeed, name: str, number: int, *, exclusive: bool) -> list[str]:
    """Of the first samples, the largest margin of each image, or the assignment of all images."""
    candidates = album.samples(name, number)
    if number == 1:
        return [mine[0] for mine in candidates]
    scorer = album.scorers["reward"]
    text = scorer.text_features([caption for mine in candidates for caption in mine])
    found = distinct_captions(candidates, text, album.reward_features(), exclusive=exclusive)
    return [caption.caption for caption in found.captions]


def by_command(album: AlbumOfSeed, name: str, **settings: Any) -> list[str]:
    """What `captionrl album` writes, with its default settings or others."""
    return list(describe_album(album.images, album.model(name), album.scorers["reward"], **settings).captions)


def pragmatic(album: AlbumOfSeed, name: str, rationality: float) -> list[str]:
    """One caption per image by beams with a listener that knows the three most similar images."""
    near = nearest_neighbours(album.reward_features(), min(3, len(album.images) - 1))[0].tolist()
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
        found = adapt_to_album(
            load, *scorers, album.images, folder, seconds=seconds, cache_dir=folder, seed=album.seed
        )
        album.facts_of_adapter = {key: found.facts[key] for key in ("kept", "steps", "before", "after")}
        return beam(album, used[0])


def settings_of(names: Sequence[str], samples: Sequence[int], adapt: Sequence[float]) -> Iterator[Setting]:
    """Every setting: its name, and the function that captions an album."""
    for name in names:
        yield f"{name}, one beam", partial(one_beam, name=name)
        if name == "SMILE":
            continue
        for number in samples:
            yield f"{name}, best of {number}", partial(chosen, name=name, number=number, exclusive=False)
            if number > 1:
                yield f"{name}, assignment of {number}", partial(chosen, name=name, number=number, exclusive=True)
        beams: dict[str, dict[str, Any]] = {f"{number} beams": {"num_beams": number} for number in (4, 8, 16)}
        beams["4 beams and 12 samples"] = {"num_beams": 4, "num_samples": 12}
        beams["8 RSA beams"] = {"num_beams": 8, "decoding": "rsa"}
        for candidates, settings in beams.items():
            yield (
                f"{name}, assignment of {candidates}",
                partial(by_command, name=name, **{"num_samples": 0, **settings}),
            )
        for weight in (1.0, 3.0):
            yield f"{name}, RSA {weight:g}", partial(pragmatic, name=name, rationality=weight)
    for seconds in adapt if "MLE" in names else ():
        yield f"MLE, adapted {seconds:g} s", partial(adapted, name="MLE", seconds=seconds)


def evaluate(album: AlbumOfSeed, captions: Sequence[str]) -> dict[str, Any]:
    """The numbers of the page without the time, and what each image contributes to them."""
    texts = [same_text(caption) for caption in captions]
    each: dict[str, list[int]] = {"distinct": [int(texts.count(text) == 1) for text in texts]}
    for name, scorer in album.scorers.items():
        each[name] = (ranks(scorer.text_features(captions), album.features[name]) == 1).int().tolist()
    results = [check(caption, facts) for caption, facts in zip(captions, album.facts, strict=True)]
    each["truth"] = [int(fits_only(album, row, caption)) for row, caption in enumerate(captions)]
    found: dict[str, Any] = {name: float(np.mean(values)) for name, values in each.items()}
    each["wrong"] = [len(r.wrong) for r in results]
    each["claims"] = [len(r.right) + len(r.wrong) for r in results]
    found["hallucination"] = sum(each["wrong"]) / max(sum(each["claims"]), 1)
    found["words"] = float(np.mean([len(caption.split()) for caption in captions]))
    shared = shared_facts(album)
    varying = [
        (len(set(r.recalled) - same), len((set(r.recalled) | set(r.missed)) - same))
        for r, same in zip(results, shared, strict=True)
    ]
    found["varying"] = sum(a for a, _ in varying) / max(sum(b for _, b in varying), 1)
    found["leaked"] = leakage(album, captions, results, shared)
    return found | {"each": each}


def fits_only(album: AlbumOfSeed, row: int, caption: str) -> bool:
    """Whether the claims of a caption are true of its image and of no other of the bag."""
    bag = [other for other, name in enumerate(album.bags) if name == album.bags[row]]
    return [other for other in bag if not check(caption, album.facts[other]).wrong] == [row]


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
                for one in names:
                    album.model(one)  # loading is not counted
                album.charged_s, album.facts_of_adapter = 0.0, {}
                before, pools = time.process_time(), album.drawn_s()
                captions = caption(album)
                # The pool was drawn now for all settings that use it; only the part of this setting counts.
                seconds = time.process_time() - before - (album.drawn_s() - pools) + album.charged_s
                row = {"setting": name, "seed": seed, "images": arguments.images, **evaluate(album, captions)}
                row |= {"cpu_s": seconds / len(album.images), "bags": album.bags, "adapter": album.facts_of_adapter}
                file.append_bytes((json.dumps(row) + "\n").encode())
                print(json.dumps(row), flush=True)


def render(output: Path, result_file: Path, page: Path) -> None:
    """Write result and page from the rows."""
    result = result_of([row for _, row in read_jsonl(output / "rows.jsonl")])
    write_json(result_file, result)
    write_section(page, "album-campaign", to_markdown(result), title="Captioning an album")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then write page and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=350, help="of the album of a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--adapt", type=float, nargs="*", default=[60.0, 180.0, 600.0], help="seconds")
    parser.add_argument("--only", nargs="+", choices=list(CAPTIONERS))
    parser.add_argument("--output", type=Path, default=ROWS)
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args(argv)
    if not arguments.render:
        torch.set_num_threads(1)  # the page says so
        measure(arguments)
    own = arguments.output == ROWS
    render(arguments.output, *((RESULT, PAGE) if own else (arguments.output / n for n in ("result.json", "page.md"))))


if __name__ == "__main__":
    main()
