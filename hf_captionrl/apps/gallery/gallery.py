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
from hf_captionrl.metrics.suites import spoken
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

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 6 and Appendix C.6, which show such captions. Here every
    pair of captioners is compared on every image. Of two captions of one image with different CIDEr-D:

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
    """Captions without a wrong claim whose CIDEr-D is almost 0.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 6: correct captions whose CIDEr against one long reference
    is about 0. The paper chooses them by hand; the rule here is: at least one right claim, no wrong one, and CIDEr-D below a
    bound.

    Returns `right_captions`, number of captions without a wrong claim; `unrewarded`, those below the bound; `share`, the
    second divided by the first (0 if there are none); `cases`, (row, captioner, score) of each, those with the most
    right claims first; `signature`.
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
    """The claims of a caption as marks for the gallery.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figures 8 and 9.
    """
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


# --- CIDEr-D of the captions of a gallery: where it prefers the worse caption, and right captions with a score near 0 ---


class CiderScores:
    """CIDEr-D of every caption, with the claims and ranks that it is compared with; `ranks` is empty without a scorer."""

    def __init__(
        self, captions: Mapping[str, list[str]], evaluator: Evaluator, ranks: Mapping[str, list[int]]
    ) -> None:
        self.ranks = ranks
        self.scores: dict[str, list[float]] = {}
        self.claims: dict[str, dict[str, Any]] = {}
        for name, mine in captions.items():
            self.scores[name] = cider_d(spoken(mine), evaluator.references)["per_sample"].tolist()
            if evaluator.facts is not None:
                self.claims[name] = faithfulness(spoken(mine), evaluator.facts, check)["per_sample"]

    def of(self, what: str) -> dict[str, Any]:
        """Number of claims of one kind, per caption of each source."""
        return {name: counts[what] for name, counts in self.claims.items()}

    def numbers(self, row: int, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Numbers shown beside the captions of an image."""
        return {name: {"CIDEr-D": f"{self.scores[name][row]:.2f}"} for name in names}


def cider_note(found: Mapping[str, Any]) -> str:
    """The counts as a few sentences."""
    parts = [f"CIDEr-D differs on {found['pairs']} pairs of captions."]
    for name, said in (("faithful", "more faithful"), ("retrieval", "better retrieving")):
        if found[f"{name}_pairs"] is not None:
            share, number = found[f"{name}_failures"], found[f"{name}_pairs"]
            parts.append(f"Where one is {said} ({number}), CIDEr-D prefers the other in {share:.0%}.")
    return " ".join([*parts, f"By every rule at once: {found['failures']}."])


# --- The pages of `captionrl gallery`: bags, wrong claims, and where CIDEr-D fails -----------------------------------


class Shown:
    """The captions of each source with their ranks and marks, and items for the pages."""

    def __init__(self, evaluator: Evaluator, captions: Mapping[str, list[str]]) -> None:
        self.evaluator = evaluator
        self.captions = captions
        self.ids = [str(i) for i in evaluator.dataset["image_id"][:]]
        self.text: dict[str, Any] = {}
        self.ranks: dict[str, list[int]] = {}
        if evaluator.image_features is not None:
            for name, mine in captions.items():
                scored = ScoredCaptions(name, [[caption] for caption in mine], evaluator.references)
                score_sources([scored], CaptionScoring(evaluator.held_out_scorer))
                self.text[name] = scored.text
                self.ranks[name] = ranks(scored.text, evaluator.image_features).tolist()
        self.marks: dict[str, list[list[Mark]]] = {}
        if evaluator.facts is not None:
            facts = evaluator.facts
            self.marks = {
                name: [gallery_marks(caption, truth) for caption, truth in zip(mine, facts, strict=True)]
                for name, mine in captions.items()
            }

    def bag_ranks(self, bag: list[int]) -> dict[str, list[int]]:
        """Ranks within a bag."""
        images: Any = self.evaluator.image_features  # present if any text has features
        return {
            name: bag_ranks(text[bag], images[bag], [list(range(len(bag)))])[0].tolist()
            for name, text in self.text.items()
        }

    def item(
        self,
        row: int,
        *,
        group: str = "",
        names: Sequence[str] | None = None,
        places: Mapping[str, tuple[int, int]] | None = None,
        numbers: Mapping[str, Mapping[str, str]] | None = None,
    ) -> GalleryItem:
        """One image with its captions."""
        shown = []
        for name in names or self.captions:
            rank, size = (self.ranks[name][row], len(self.ids)) if name in self.ranks else (None, None)
            if places is not None and name in places:
                rank, size = places[name]
            shown.append(
                GalleryCaption(
                    name,
                    self.captions[name][row],
                    rank=rank,
                    pool_size=size,
                    marks=self.marks[name][row] if self.marks else None,
                    numbers=(numbers or {}).get(name, {}),
                )
            )
        references = self.evaluator.references[row]
        return GalleryItem(open_still(self.evaluator.dataset[row]), self.ids[row], shown, references, group)


class Pages:
    """The pages of one run; `data` describes the images."""

    names = ("bags.html", "errors.html", "cider.html", "unrewarded.html")

    def __init__(self, folder: Path, data: str) -> None:
        self.folder = folder
        self.data = data
        self.written: dict[str, str] = {}

    def write(self, name: str, items: Sequence[GalleryItem], *, title: str, note: str, summary: str) -> None:
        """Write a page, if it has items."""
        if items:
            write_gallery(self.folder / name, items, title, note=f"{self.data}. {note}")
            self.written[name] = summary

    def remove_others(self) -> None:
        """Remove pages of an earlier run that this run did not write."""
        for name in {*self.names} - set(self.written):
            (self.folder / name).unlink(missing_ok=True)


def bag_items(shown: Shown, bags: Sequence[list[int]]) -> list[GalleryItem]:
    """Images bag by bag, each caption with its rank in the bag."""
    items = []
    for number, bag in enumerate(bags, start=1):
        ranks = shown.bag_ranks(bag)
        found = ", ".join(f"{name} finds {places.count(1)}" for name, places in ranks.items())
        group = f"Bag {number}: {len(bag)} look-alikes{'. ' + found if found else ''}"
        for at, row in enumerate(bag):
            places = {name: (rank[at], len(bag)) for name, rank in ranks.items()}
            items.append(shown.item(row, group=group, places=places))
    return items


def write_errors(pages: Pages, shown: Shown, counts: Mapping[str, Mapping[str, int]], limit: int) -> None:
    """Images with the most wrong claims."""
    rows = most_wrong(shown.marks, limit) if shown.marks else []
    pages.write(
        "errors.html",
        [shown.item(row) for row in rows],
        title="Wrong claims",
        note="; ".join(f"{name}: {counted(count)}" for name, count in counts.items()) + ".",
        summary=f"{len(rows)} images with wrong claims",
    )


def counted(counts: Mapping[str, int]) -> str:
    """Errors of a source as text."""
    return f"{counts['hallucinated']} hallucinated and {counts['misbound']} misbound of {counts['claims']} claims"


def write_cider(pages: Pages, shown: Shown, cider: CiderScores, min_gap: float, limit: int) -> dict[str, Any] | None:
    """Pairs of captions of which CIDEr-D prefers the worse."""
    if len(cider.scores) < 2 or not (cider.claims or cider.ranks):
        return None
    known = {name: cider.of(name) for name in ("wrong", "recalled")} if cider.claims else {}
    failures = cider_failures(cider.scores, ranks=cider.ranks or None, min_gap=min_gap, **known)
    cases = failures["cases"]
    items = [
        shown.item(case.row, names=pair, numbers=cider.numbers(case.row, pair))
        for case in cases[:limit]
        for pair in [(case.preferred, case.better)]
    ]
    pages.write(
        "cider.html",
        items,
        title="Where CIDEr-D prefers the worse caption",
        note=f"{cider_note(failures)} The widest gaps are shown.",
        summary=f"{failures['failures']} pairs on which CIDEr-D fails",
    )
    listed = [
        {"image_id": shown.ids[c.row], "preferred": c.preferred, "better": c.better, "gap": c.gap} for c in cases
    ]
    return {**failures, "cases": listed}


def write_unrewarded(
    pages: Pages, shown: Shown, cider: CiderScores, max_cider: float, limit: int
) -> dict[str, Any] | None:
    """Right captions with a CIDEr-D near 0."""
    if not cider.claims:
        return None
    poor = unrewarded(cider.scores, right=cider.of("right"), wrong=cider.of("wrong"), below=max_cider)
    found = poor["cases"]
    summary = (
        f"{poor['unrewarded']} of {poor['right_captions']} captions with right claims only score below {max_cider:g}"
    )
    pages.write(
        "unrewarded.html",
        [shown.item(row, names=(name,), numbers=cider.numbers(row, (name,))) for row, name, _ in found[:limit]],
        title="Right captions with a CIDEr-D near 0",
        note=f"{summary}. The most detailed are shown.",
        summary=summary,
    )
    listed = [{"image_id": shown.ids[row], "source": name, "cider_d": score} for row, name, score in found]
    return {**poor, "cases": listed}


# --- `captionrl gallery`: captions of several systems side by side, their errors marked, and where CIDEr-D fails -----


def _captions(
    arguments: GalleryOptions, names: Sequence[str], split: LoadedSplit, ids: list[str]
) -> dict[str, list[str]]:
    """For each source, the first caption of each image."""
    files = {
        name: read_caption_file(source, name=name).aligned(ids, split.all_ids)
        for name, source in zip(names, arguments.captions, strict=True)
        if Path(source).is_file() or Path(source).suffix == ".jsonl" or (Path(source) / MANIFEST).is_file()
    }
    found = {}
    for name, source in zip(names, arguments.captions, strict=True):
        if name in files:
            found[name] = [group[0] for group in files[name]]
            continue
        found[name] = generate_captions(
            load_captioner(model_path(source), device=default_device(arguments.device)),
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
    folder = arguments.output_dir
    split = load_split(arguments, quarantine_path=folder / "quarantine.jsonl")
    ids = [str(i) for i in split.dataset["image_id"][:]]
    held_out_scorer = EvaluationArguments(held_out_scorer_name_or_path=arguments.scorer)
    held_out_scorer.resolve(arguments.dataset, is_training=False)
    captions = _captions(arguments, names, split, ids)
    scorer = optional_scorer(held_out_scorer.held_out_scorer_name_or_path)
    evaluator = Evaluator(split.dataset, scorer, None, seed=arguments.seed, cache_dir=arguments.cache_dir)
    bags = _choose_bags(arguments, evaluator, ids)
    shown = Shown(evaluator, captions)
    errors = {name: error_counts(marks) for name, marks in shown.marks.items()}
    cider = CiderScores(shown.captions, evaluator, shown.ranks)

    pages = Pages(folder, f"{len(ids)} images of {Path(arguments.dataset).name}, {arguments.split}")
    pages.write(
        "bags.html",
        bag_items(shown, bags),
        title="The same bags, captioned by " + ", ".join(names),
        note="The rank of a caption is that of its image in the bag.",
        summary=f"{len(bags)} bags",
    )
    write_errors(pages, shown, errors, arguments.max_shown)
    failures = write_cider(pages, shown, cider, arguments.min_gap, arguments.max_shown)
    poor = write_unrewarded(pages, shown, cider, arguments.max_cider, arguments.max_shown)
    pages.remove_others()
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
        "pages": pages.written,
    }
    write_json(folder / "gallery.json", result)
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    for name, counts in errors.items():
        print(f"{name}: {counted(counts)}")
    if failures is not None:
        print(cider_note(failures))
    summary = [f"{name} ({what})" for name, what in pages.written.items()]
    print(f"Written to {folder}: {', '.join([*summary, 'gallery.json'])}")
