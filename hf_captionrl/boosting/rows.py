"""Rows and their answers and faults in the journals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import datasets

from hf_captionrl.boosting.answers import ANSWER_REMEDIES
from hf_captionrl.boosting.prompts import STAGES, blend_prompt, holistic_prompt, visual_prompt
from hf_captionrl.data.quarantine import QuarantineError, QuarantineReport, check_captions
from hf_captionrl.language_models.backend import Backend
from hf_captionrl.language_models.prompt import Prompt

__all__ = ["Known", "Row", "checked_rows", "entry_of"]

_FIELDS = ("model", "revision", "prompt_hash", "time", "attempt")


def entry_of(prompt: Prompt, backend: Backend, text: str, fault: tuple[str, str] | None) -> dict[str, Any]:
    """Journal entry of an answer: text, source, and fault if there is one."""
    entry: dict[str, Any] = {"image_id": prompt.image_id, "stage": prompt.stage, "text": text}
    entry |= {"model": backend.model, "revision": backend.revision, "prompt_hash": prompt.hash}
    entry |= {"time": datetime.now(UTC).isoformat(timespec="seconds"), "attempt": prompt.attempt}
    return entry if fault is None else entry | {"reason": fault[0], "detail": fault[1]}


class Known:
    """Entries of the journals by prompt, model and revision, so that no question is asked twice.

    With another vision model, the BlendCaps are kept. With other references of one image, only this image is asked about
    again.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._good: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._bad: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for entry in entries:
            self.add(entry)

    @staticmethod
    def _key(stage: str, image_id: str, model: str, revision: str, prompt_hash: str) -> tuple[Any, ...]:
        return stage, image_id, model, revision, prompt_hash

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry; of two answers to one question, the first counts."""
        key = self._key(*(entry.get(n, "") for n in ("stage", "image_id", "model", "revision", "prompt_hash")))
        if "reason" in entry:
            self._bad.setdefault(key, []).append(dict(entry))
        else:
            self._good.setdefault(key, dict(entry))

    def answer(self, prompt: Prompt, backend: Backend) -> dict[str, Any] | None:
        """The good answer to a prompt."""
        return self._good.get(self._key(prompt.stage, prompt.image_id, backend.model, backend.revision, prompt.hash))

    def faults(self, prompt: Prompt, backend: Backend) -> list[dict[str, Any]]:
        """Bad answers to a prompt, and failures."""
        return self._bad.get(
            self._key(prompt.stage, prompt.image_id, backend.model, backend.revision, prompt.hash), []
        )


@dataclass
class Row:
    """One image with its answers so far."""

    number: int  # its row in the data set
    image_id: str
    references: Sequence[str]
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)  # entry of each finished stage
    fault: dict[str, Any] | None = None  # why it cannot be finished: `stage`, `reason`, `detail`

    def prompt(self, stage: str, image: Any = None) -> Prompt:
        """The prompt of a stage."""
        if stage == "blend":
            return blend_prompt(self.image_id, self.references)
        if stage == "visual":
            return visual_prompt(self.image_id, image)
        return holistic_prompt(self.image_id, *(self.answers[s]["text"] for s in ("blend", "visual")))

    def recall(self, known: Known, backends: Mapping[str, Backend]) -> None:
        """Fill in known answers."""
        for stage in STAGES:
            if stage == "holistic" and len(self.answers) < 2:
                return
            if (answer := known.answer(self.prompt(stage), backends[stage])) is not None:
                self.answers[stage] = answer

    @property
    def is_done(self) -> bool:
        """Whether the row has all three captions."""
        return len(self.answers) == len(STAGES)

    def provenance(self) -> dict[str, dict[str, Any]]:
        """Source of each caption."""
        return {stage: {name: self.answers[stage][name] for name in _FIELDS} for stage in STAGES}

    def quarantine_entry(self, split: str) -> dict[str, Any]:
        """The row as a `hf_captionrl.data.QuarantineEntry`."""
        if self.fault is None:
            raise ValueError(f"Image {self.image_id!r} has no fault. Quarantine only rows that have one.")
        reason = self.fault["reason"]
        return {
            "row": self.number,
            "image_id": self.image_id,
            "split": split,
            "column": self.fault["stage"],
            "reason": reason,
            "detail": self.fault["detail"],
            "remedy": self.fault.get("remedy") or ANSWER_REMEDIES[reason],
            "dropped": "row",
        }


def checked_rows(
    dataset: datasets.Dataset, *, check_images: bool | Literal["header"] = False, max_bad_fraction: float | None = None
) -> tuple[datasets.Dataset, QuarantineReport]:
    """`check_captions`; without a limit, all rows may be bad."""
    try:
        return check_captions(
            dataset, check_images=check_images, max_bad_fraction=1.0 if max_bad_fraction is None else max_bad_fraction
        )
    except QuarantineError as error:
        if max_bad_fraction is not None:
            raise
        return dataset.select([]), error.report
