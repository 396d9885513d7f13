"""Hallucinations and binding errors of captions of the embedded world, for the gallery and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_captionrl.reports.gallery import Mark
from hf_captionrl.scenes.claim_spans import mark_caption
from hf_captionrl.scenes.world import Facts

__all__ = ["error_counts", "gallery_marks", "most_wrong"]


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
