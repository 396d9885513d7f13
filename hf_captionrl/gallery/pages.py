"""The pages of `captionrl gallery`: bags, wrong claims, and where CIDEr-D fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.gallery.cider_examples import CiderScores
    from hf_captionrl.reports.gallery import GalleryItem, Mark

__all__ = ["Pages", "Shown", "bag_items", "counted", "write_cider", "write_errors", "write_unrewarded"]


class Shown:
    """The captions of each source with their ranks and marks, and items for the pages."""

    def __init__(self, evaluator: Evaluator, captions: Mapping[str, list[str]]) -> None:
        from hf_captionrl.evaluation.paper_tables import ScoredCaptions
        from hf_captionrl.evaluation.scored_captions import score_sources
        from hf_captionrl.gallery.caption_errors import gallery_marks
        from hf_captionrl.retrieval.ranking import ranks

        self.evaluator = evaluator
        self.captions = captions
        self.ids = [str(i) for i in evaluator.dataset["image_id"][:]]
        self.text: dict[str, Any] = {}
        self.ranks: dict[str, list[int]] = {}
        if evaluator.image_features is not None:
            for name, mine in captions.items():
                scored = ScoredCaptions(name, [[caption] for caption in mine], evaluator.references)
                score_sources([scored], evaluator.held_out_scorer)
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
        from hf_captionrl.retrieval.ranking import bag_ranks

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
        from hf_captionrl.data.video import open_still
        from hf_captionrl.reports.gallery import GalleryCaption, GalleryItem

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
        from hf_captionrl.reports.gallery import write_gallery

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
    from hf_captionrl.gallery.caption_errors import most_wrong

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
    from hf_captionrl.gallery.cider_examples import cider_note

    failures = cider.failures(min_gap)
    if failures is None:
        return None
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
    poor = cider.unrewarded(max_cider)
    if poor is None:
        return None
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
