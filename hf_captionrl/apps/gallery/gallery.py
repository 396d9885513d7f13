"""`captionrl gallery`: captions of several systems side by side, their errors marked, and where CIDEr-D fails."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from hf_captionrl.apps.gallery.options import GalleryOptions
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.language_models import default_device
from hf_captionrl.captioners.pipeline import LazyImages, generate_captions
from hf_captionrl.data.options import LoadedSplit, load_split
from hf_captionrl.data.video import open_still
from hf_captionrl.evaluation.caption_files import read_caption_file, source_names
from hf_captionrl.evaluation.evaluator import Evaluator, ScoredCaptions
from hf_captionrl.evaluation.options import EvaluationArguments, optional_scorer
from hf_captionrl.evaluation.pages import GalleryCaption, GalleryItem, Mark, write_gallery
from hf_captionrl.evaluation.scored_captions import CaptionScoring, score_sources
from hf_captionrl.metrics import cider_d, faithfulness
from hf_captionrl.metrics.bootstrap import check_values, signature
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval.bags import load_bags
from hf_captionrl.retrieval.ranking import bag_ranks, ranks
from hf_captionrl.scenes.truth_checker import check, mark_caption
from hf_captionrl.scenes.world import Facts
from hf_captionrl.utils.io import installed_versions, to_plain, write_json
from hf_captionrl.utils.model_files import model_path
from hf_captionrl.utils.parts import MANIFEST

# --- Finds and counts pairs of captions of one image of which CIDEr-D prefers the worse one --------------------------
# Legend: N images.


@dataclass(frozen=True)
class CiderFailure:
    """One pair of captions on which CIDEr-D fails."""

    row: int  # the image
    preferred: str  # the captioner with the higher CIDEr-D
    better: str  # the other one, whose caption is the better one
    gap: float  # difference of the two scores, at least 0


def _columns(values: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """One array of N numbers per captioner; empty if `values` is None."""
    return {name: check_values(numbers, name) for name, numbers in (values or {}).items()}


def cider_failures(
    scores: Mapping[str, Any],
    *,
    wrong: Mapping[str, Any] | None = None,
    recalled: Mapping[str, Any] | None = None,
    ranks: Mapping[str, Any] | None = None,
    min_gap: float = 0.0,
) -> dict[str, Any]:
    """Find pairs of captions of which CIDEr-D prefers the less faithful one, or the one with the larger rank.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 6 and Appendix C.6. Of two captions with different CIDEr-D:

    - the more faithful one makes no more wrong claims and mentions no fewer facts, and is strictly better in one of them;
    - the one that retrieves better has the smaller rank;
    - CIDEr-D fails on the pair if the caption with the lower score is the better one by every rule whose numbers are given.
    """
    cider, places = _columns(scores), _columns(ranks)
    errors, facts = _columns(wrong), _columns(recalled)
    counts = {"pairs": 0, "faithful": 0, "faithful_failures": 0, "retrieval": 0, "retrieval_failures": 0}
    cases = []
    for row in range(len(next(iter(cider.values())))):
        for one, other in combinations(cider, 2):
            high, low = (one, other) if cider[one][row] > cider[other][row] else (other, one)
            gap = float(cider[high][row] - cider[low][row])
            if gap <= min_gap:
                continue
            counts["pairs"] += 1
            verdicts = []
            if errors:
                fewer, more = errors[high][row] - errors[low][row], facts[low][row] - facts[high][row]
                low_wins = fewer >= 0 and more >= 0 and (fewer > 0 or more > 0)
                high_wins = fewer <= 0 and more <= 0 and (fewer < 0 or more < 0)
                counts["faithful"] += low_wins or high_wins
                counts["faithful_failures"] += low_wins
                verdicts.append(low_wins)
            if places:
                low_wins = places[low][row] < places[high][row]
                counts["retrieval"] += low_wins or places[high][row] < places[low][row]
                counts["retrieval_failures"] += low_wins
                verdicts.append(low_wins)
            if all(verdicts):
                cases.append(CiderFailure(row, high, low, gap))
    result: dict[str, Any] = {"pairs": counts["pairs"]}
    for rule, known in (("faithful", errors), ("retrieval", places)):
        number, failures = int(counts[rule]), counts[f"{rule}_failures"]
        result[f"{rule}_pairs"] = number if known else None
        result[f"{rule}_failures"] = float(failures / max(number, 1)) if known else None
    return result | {
        "failures": len(cases),
        "cases": sorted(cases, key=lambda case: (-case.gap, case.row)),
        "signature": signature(
            metric="cider_failures",
            captioners=len(cider),
            rules="+".join(["faithful"] * bool(errors) + ["retrieval"] * bool(places)),
            min_gap=min_gap,
        ),
    }


def unrewarded(
    scores: Mapping[str, Any], *, right: Mapping[str, Any], wrong: Mapping[str, Any], below: float = 0.1
) -> dict[str, Any]:
    """Captions with at least one right claim, no wrong one, and a CIDEr-D below a bound.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 6, where they are chosen by hand. `cases` are (row, captioner,
    score), those with the most right claims first.
    """
    cider, said, errors = _columns(scores), _columns(right), _columns(wrong)
    rows = range(len(next(iter(cider.values()))))
    good = [(row, name) for row in rows for name in cider if said[name][row] > 0 and errors[name][row] == 0]
    cases = [(row, name, float(cider[name][row])) for row, name in good if cider[name][row] < below]
    return {
        "right_captions": len(good),
        "unrewarded": len(cases),
        "share": len(cases) / max(len(good), 1),
        "cases": sorted(cases, key=lambda case: (-said[case[1]][case[0]], case[2], case[0])),
        "signature": signature(metric="unrewarded", captioners=len(cider), below=below),
    }


# --- Hallucinations and binding errors of captions of the embedded world, for the gallery and counted ----------------


def gallery_marks(caption: str, facts: Facts | Mapping[str, Any]) -> list[Mark]:
    """The claims of a caption as marks (No Detail Left Behind, Figures 8 and 9)."""
    return [Mark(m.claim.text, m.verdict, m.start, m.end, m.owner) for m in mark_caption(caption, facts)]


def error_counts(marks: Sequence[Sequence[Mark]]) -> dict[str, int]:
    """Numbers of wrong captions and claims of a captioner."""
    verdicts = [[mark.verdict for mark in group] for group in marks]
    return {
        "captions": len(verdicts),
        "claims": sum(map(len, verdicts)),
        "hallucinated": sum(group.count("wrong") for group in verdicts),
        "misbound": sum(group.count("misbound") for group in verdicts),
        "wrong_captions": sum(any(verdict != "right" for verdict in group) for group in verdicts),
        "misbound_captions": sum("misbound" in group for group in verdicts),
    }


def most_wrong(marks: Mapping[str, Sequence[Sequence[Mark]]], number: int) -> list[int]:
    """The images with the most wrong claims, binding errors first."""
    rows = []
    for row, groups in enumerate(zip(*marks.values(), strict=True)):
        verdicts = [mark.verdict for group in groups for mark in group]
        errors = (verdicts.count("misbound"), verdicts.count("wrong"))
        if any(errors):
            rows.append((-errors[0], -errors[1], row))
    return [row for _, _, row in sorted(rows)[:number]]


# --- `captionrl gallery`: bags, wrong claims, and where CIDEr-D fails ------------------------------------------------

_PAGES = ("bags.html", "errors.html", "cider.html", "unrewarded.html")


class Shown:
    """The captions of each source with their ranks, marks, claims and scores, and items for the pages."""

    def __init__(self, evaluator: Evaluator, captions: Mapping[str, list[str]]) -> None:
        self.evaluator, self.captions = evaluator, captions
        self.ids = [str(i) for i in evaluator.dataset["image_id"][:]]
        self.text: dict[str, Any] = {}
        self.ranks: dict[str, list[int]] = {}
        self.marks: dict[str, list[list[Mark]]] = {}
        self.claims: dict[str, dict[str, Any]] = {}
        self.cider: dict[str, list[float]] = {}
        for name, mine in captions.items():
            self.cider[name] = cider_d(spoken(mine), evaluator.references)["per_sample"].tolist()
            if evaluator.image_features is not None:
                scored = ScoredCaptions(name, [[caption] for caption in mine], evaluator.references)
                score_sources([scored], CaptionScoring(evaluator.held_out_scorer))
                self.text[name] = scored.text
                self.ranks[name] = ranks(scored.text, evaluator.image_features).tolist()
            if (facts := evaluator.facts) is not None:
                self.marks[name] = [gallery_marks(caption, truth) for caption, truth in zip(mine, facts, strict=True)]
                self.claims[name] = faithfulness(spoken(mine), facts, check)["per_sample"]

    def counts(self, what: str) -> dict[str, Any]:
        """Number of claims of one kind, per caption of each source."""
        return {name: counts[what] for name, counts in self.claims.items()}

    def item(
        self,
        row: int,
        names: Sequence[str] | None = None,
        *,
        group: str = "",
        places: Mapping[str, tuple[int, int]] | None = None,
    ) -> GalleryItem:
        """One image with the captions of all sources, or those of some and their CIDEr-D; `places` are ranks in a bag."""
        shown = []
        for name in names or self.captions:
            place = (self.ranks[name][row], len(self.ids)) if name in self.ranks else (None, None)
            rank, size = (places or {}).get(name, place)
            marks = self.marks[name][row] if self.marks else None
            numbers = {} if names is None else {"CIDEr-D": f"{self.cider[name][row]:.2f}"}
            text = self.captions[name][row]
            shown.append(GalleryCaption(name, text, rank=rank, pool_size=size, marks=marks, numbers=numbers))
        references = self.evaluator.references[row]
        return GalleryItem(open_still(self.evaluator.dataset[row]), self.ids[row], shown, references, group)

    def bag_items(self, bags: Sequence[list[int]]) -> list[GalleryItem]:
        """Images bag by bag, each caption with its rank in the bag."""
        items = []
        images: Any = self.evaluator.image_features  # present if any text has features
        for number, bag in enumerate(bags, start=1):
            inside = [list(range(len(bag)))]
            places = {name: bag_ranks(text[bag], images[bag], inside)[0].tolist() for name, text in self.text.items()}
            found = ", ".join(f"{name} finds {mine.count(1)}" for name, mine in places.items())
            group = f"Bag {number}: {len(bag)} look-alikes{'. ' + found if found else ''}"
            for at, row in enumerate(bag):
                own = {name: (mine[at], len(bag)) for name, mine in places.items()}
                items.append(self.item(row, group=group, places=own))
        return items


def _captions(
    arguments: GalleryOptions, names: Sequence[str], split: LoadedSplit, ids: list[str]
) -> dict[str, list[str]]:
    """For each source, the first caption of each image."""
    sources = dict(zip(names, arguments.captions, strict=True))
    found: dict[str, list[str]] = {name: [] for name in sources}
    for name, source in sources.items():  # files first, because a captioner is slow
        if Path(source).is_file() or Path(source).suffix == ".jsonl" or (Path(source) / MANIFEST).is_file():
            groups = read_caption_file(source, name=name).aligned(ids, split.all_ids)
            found[name] = [group[0] for group in groups]
    for name in [name for name, captions in found.items() if not captions]:
        found[name] = generate_captions(
            load_captioner(model_path(sources[name]), device=default_device(arguments.device)),
            LazyImages(split.dataset, range(len(split.dataset))),
            batch_size=arguments.batch_size,
            do_sample=False,
            num_beams=arguments.num_beams,
            max_new_tokens=arguments.max_new_tokens,
        )
    return found


def _choose_bags(arguments: GalleryOptions, evaluator: Evaluator, ids: list[str]) -> list[list[int]]:
    """Random bags of one size, in the order of the data set."""
    bags = evaluator.bags
    if arguments.bags is not None:
        bags = load_bags(arguments.bags, image_ids=ids).rows(ids)
    sizes = sorted(size for size, found in bags.items() if found)
    if arguments.bag_size is not None and arguments.bag_size not in sizes:
        raise ValueError(
            f"There is no complete bag of {arguments.bag_size} images. Use --bag_size with one of {sizes}."
        )
    if not sizes:
        return []
    found = bags[arguments.bag_size or (5 if 5 in sizes else sizes[0])]
    chosen = random.Random(arguments.seed).sample(range(len(found)), min(arguments.max_bags, len(found)))
    return [found[number] for number in sorted(chosen)]


def write_pages(arguments: GalleryOptions) -> None:
    """Write the pages."""
    names = source_names(arguments.captions, arguments.names)  # before anything slow
    folder, limit = arguments.output_dir, arguments.max_shown
    split = load_split(arguments, quarantine_path=folder / "quarantine.jsonl")
    ids = [str(i) for i in split.dataset["image_id"][:]]
    held_out_scorer = EvaluationArguments(held_out_scorer_name_or_path=arguments.scorer)
    held_out_scorer.resolve(arguments.dataset, is_training=False)
    captions = _captions(arguments, names, split, ids)
    scorer = optional_scorer(held_out_scorer.held_out_scorer_name_or_path)
    evaluator = Evaluator(split.dataset, scorer, None, seed=arguments.seed, cache_dir=arguments.cache_dir)
    bags = _choose_bags(arguments, evaluator, ids)
    shown = Shown(evaluator, captions)
    pages: dict[str, str] = {}

    def write(name: str, items: Sequence[GalleryItem], *, title: str, note: str, summary: str) -> None:
        if items:
            data = f"{len(ids)} images of {Path(arguments.dataset).name}, {arguments.split}"
            write_gallery(folder / name, items, title, note=f"{data}. {note}")
            pages[name] = summary

    write(
        "bags.html",
        shown.bag_items(bags),
        title="The same bags, captioned by " + ", ".join(names),
        note="The rank of a caption is that of its image in the bag.",
        summary=f"{len(bags)} bags",
    )
    errors = {name: error_counts(marks) for name, marks in shown.marks.items()}
    counted = {
        name: f"{name}: {count['hallucinated']} hallucinated and {count['misbound']} misbound of {count['claims']} claims"
        for name, count in errors.items()
    }
    rows = most_wrong(shown.marks, limit) if shown.marks else []
    write(
        "errors.html",
        [shown.item(row) for row in rows],
        title="Wrong claims",
        note="; ".join(counted.values()) + ".",
        summary=f"{len(rows)} images with wrong claims",
    )
    failures = None
    if len(shown.cider) > 1 and (shown.claims or shown.ranks):
        known = {name: shown.counts(name) for name in ("wrong", "recalled")} if shown.claims else {}
        failures = cider_failures(shown.cider, ranks=shown.ranks or None, min_gap=arguments.min_gap, **known)
        write(
            "cider.html",
            [shown.item(case.row, (case.preferred, case.better)) for case in failures["cases"][:limit]],
            title="Where CIDEr-D prefers the worse caption",
            note=f"{cider_note(failures)} The widest gaps are shown.",
            summary=f"{failures['failures']} pairs on which CIDEr-D fails",
        )
        failures["cases"] = [
            {"image_id": ids[c.row], "preferred": c.preferred, "better": c.better, "gap": c.gap}
            for c in failures["cases"]
        ]
    poor = None
    if shown.claims:
        right, wrong = shown.counts("right"), shown.counts("wrong")
        poor = unrewarded(shown.cider, right=right, wrong=wrong, below=arguments.max_cider)
        what = f"{poor['unrewarded']} of {poor['right_captions']} captions with right claims only score below"
        write(
            "unrewarded.html",
            [shown.item(row, (name,)) for row, name, _ in poor["cases"][:limit]],
            title="Right captions with a CIDEr-D near 0",
            note=f"{what} {arguments.max_cider:g}. The most detailed are shown.",
            summary=f"{what} {arguments.max_cider:g}",
        )
        poor["cases"] = [
            {"image_id": ids[row], "source": name, "cider_d": score} for row, name, score in poor["cases"]
        ]
    for name in set(_PAGES) - set(pages):  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    result: dict[str, Any] = {
        "num_images": len(ids),
        "sources": dict(zip(names, map(str, arguments.captions), strict=True)),
        "scorer": None if evaluator.held_out_scorer is None else evaluator.held_out_scorer.signature,
        "bags": [[ids[row] for row in bag] for bag in bags],
        "errors": errors or None,
        "cider": failures,
        "unrewarded": poor,
        "seed": arguments.seed,
        "versions": installed_versions(),
        "pages": pages,
    }
    write_json(folder / "gallery.json", result)
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    for text in counted.values():
        print(text)
    if failures is not None:
        print(cider_note(failures))
    print(f"Written to {folder}: {', '.join([*(f'{name} ({what})' for name, what in pages.items()), 'gallery.json'])}")


def cider_note(found: Mapping[str, Any]) -> str:
    """The counts as a few sentences."""
    parts = [f"CIDEr-D differs on {found['pairs']} pairs of captions."]
    for name, said in (("faithful", "more faithful"), ("retrieval", "better retrieving")):
        if found[f"{name}_pairs"] is not None:
            share, number = found[f"{name}_failures"], found[f"{name}_pairs"]
            parts.append(f"Where one is {said} ({number}), CIDEr-D prefers the other in {share:.0%}.")
    return " ".join([*parts, f"By every rule at once: {found['failures']}."])
