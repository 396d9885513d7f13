"""Visual Caption Boosting of some rows: ask, check, write to the journal, ask again; resumable.

Source: Gaur et al. 2024, "No Detail Left Behind", section 2. BlendCap and VisualCap are independent; the HolisticCap needs
both. Each answer is in the journal before the next question is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.boosting.answers import ANSWER_REMEDIES, MAX_ANSWER_WORDS, answer_fault, clean_answer, is_truncated
from hf_captionrl.boosting.journal import JournalWriter, journal_name, read_journals
from hf_captionrl.boosting.prompts import STAGES
from hf_captionrl.boosting.rows import Known, Row, checked_rows, entry_of
from hf_captionrl.data.caption_columns import undecoded
from hf_captionrl.data.images import ImageError, open_image
from hf_captionrl.data.quarantine import QuarantineReport
from hf_captionrl.language_models.backend import Backend, BackendError, Failure, Truncated

__all__ = ["INPUT", "ShardReport", "boost_shard"]

logger = logging.getLogger(__name__)

INPUT = "input"
"""Stage of journal entries about faults of the input, found before any question."""


@dataclass(frozen=True)
class ShardReport:
    """Counts of the rows.

    Args:
        rows (`int`): All rows.
        done (`int`): Rows with all three captions.
        resumed (`int`): Rows that were done before this run.
        quarantined (`int`): Rows left out, with a reason in the journal.
        asked (`int`): Answers received in this run, including bad ones.
        torn (`int`): Bytes of an incomplete last line of a killed run.
    """

    rows: int
    done: int
    resumed: int
    quarantined: int
    asked: int
    torn: int


class _Work:
    """The questions about some rows; keeps their journal open."""

    def __init__(self, journal: JournalWriter, known: Known, backends: dict[str, Backend], options: dict[str, Any]):
        self.journal, self.known, self.backends = journal, known, backends
        self.attempts, self.max_words = options["attempts"], options["max_words"]
        self.retry_quarantined, self.max_failures = options["retry_quarantined"], options["max_failures"]
        self.asked = self.failures = 0

    def note(self, entry: dict[str, Any]) -> None:
        self.journal.append(entry)
        self.known.add(entry)

    def image_fault(self, row: Row, error: ImageError) -> None:
        prompt, backend = row.prompt("visual"), self.backends["visual"]
        entry = entry_of(prompt, backend, "", (error.reason, error.detail)) | {"remedy": error.remedy}
        row.fault = entry
        if all(old["reason"] != error.reason for old in self.known.faults(prompt, backend)):
            self.note(entry)

    def ask(self, rows: Iterable[Row], stage: str, images: dict[int, Any]) -> None:
        """Ask for one stage of some rows; each row gets an answer or a fault."""
        backend = self.backends[stage]
        pending: list[
            tuple[Row, int, int]
        ] = []  # row, bad answers in all runs, bad answers that count against `attempts`
        for row in rows:
            if row.fault is not None or stage in row.answers:
                continue
            question = row.prompt(stage)
            # Two vision models may give the same VisualCap; then the HolisticCap is shared.
            if (known := self.known.answer(question, backend)) is not None:
                row.answers[stage] = known
                continue
            # Broken images and unreachable backends are not answers.
            faults = self.known.faults(question, backend)
            answers = [e for e in faults if e["reason"] in ANSWER_REMEDIES and e["reason"] != "backend_failed"]
            given_up = len(answers) >= self.attempts or any(e["reason"] == "backend_rejected" for e in answers)
            if given_up and not self.retry_quarantined:
                row.fault = answers[-1]
            else:
                pending.append((row, len(answers), 0 if given_up else len(answers)))
        while pending:
            prompts = [replace(row.prompt(stage, images.get(row.number)), attempt=ever) for row, ever, _ in pending]
            again, answered = [], set()
            for position, answer in backend.complete(prompts):
                answered.add(position)
                row, ever, now = pending[position]
                if isinstance(answer, Failure):
                    row.fault = entry_of(prompts[position], backend, "", (answer.reason, answer.detail))
                    self.note(row.fault)
                    self._count_failure(answer)
                    continue
                self.failures, self.asked = 0, self.asked + 1
                said = answer.text if isinstance(answer, Truncated) else answer
                text = clean_answer(said)
                fault = answer_fault(text, prompts[position], max_words=self.max_words)
                if fault is None and isinstance(answer, Truncated) and is_truncated(said):
                    fault = ("answer_truncated", f"the answer stops at the length limit: {('...' + text[-60:])!r}")
                entry = entry_of(prompts[position], backend, text, fault)
                self.note(entry)
                if fault is None:
                    row.answers[stage] = entry
                elif now + 1 >= self.attempts:
                    row.fault = entry
                else:
                    again.append((row, ever + 1, now + 1))
            if len(answered) != len(prompts):
                raise BackendError(
                    f"{backend.model} answered {len(answered)} of {len(prompts)} prompts. Fix the backend: it must answer each."
                )
            pending = again

    def _count_failure(self, failure: Failure) -> None:
        # Rejections count too: if every prompt is rejected, the prompts are not the problem.
        self.failures += 1
        if self.failures >= self.max_failures:
            raise BackendError(
                f"No answer {self.failures} times in a row ({failure.detail}). The journal stays; give the same command again "
                "when the backend answers, with --retry_quarantined if it rejected prompts."
            )


def _input_faults(report: QuarantineReport) -> list[dict[str, Any]]:
    return [
        {"image_id": e.image_id, "stage": INPUT, "reason": e.reason, "detail": e.detail, "remedy": e.remedy}
        for e in report.entries
        if e.dropped == "row"
    ]


def boost_shard(
    dataset: datasets.Dataset,
    folder: str | Path,
    *,
    text: Backend,
    vision: Backend,
    rows: range | None = None,
    attempts: int = 3,
    max_words: int = MAX_ANSWER_WORDS,
    rows_at_once: int = 64,
    max_bad_fraction: float | None = 0.05,
    max_failures: int = 20,
    retry_quarantined: bool = False,
) -> ShardReport:
    """Ask for all captions of some rows, and write each answer to their journal.

    A killed run resumes, because the journals of the rows are read. Rows are checked before any question, so a missing
    image costs no request.

    Args:
        dataset (`datasets.Dataset`): The whole data set, with `image`, `image_id` and `captions` as returned by
            `load_captions`.
        folder (`str` or `Path`): Folder of the journals.
        text ([`Backend`]): Writes BlendCap and HolisticCap.
        vision ([`Backend`]): Writes VisualCap.
        rows (`range`, *optional*): The rows; by default all.
        attempts (`int`): Largest number of answers per stage of a row until one passes the checks.
        max_words (`int`): Longest accepted answer.
        rows_at_once (`int`): Rows per batch of prompts, and of images in memory.
        max_bad_fraction (`float`, *optional*): Largest fraction of unusable rows, in [0, 1]; above it nothing is asked. None:
            no limit.
        max_failures (`int`): Failures in a row after which the run stops.
        retry_quarantined (`bool`): Ask again for rows with `attempts` bad answers.

    Returns:
        [`ShardReport`]: Counts.

    Raises:
        ValueError: If an option is out of range, the vision backend does not see images, too many rows are bad, or another
            process works on the rows.
        BackendError: If a backend fails for every prompt.
    """
    if min(attempts, rows_at_once, max_failures, max_words) < 1:
        raise ValueError(
            f"attempts ({attempts}), rows_at_once ({rows_at_once}), max_failures ({max_failures}) and max_words "
            f"({max_words}) must be at least 1."
        )
    if not vision.is_multimodal:
        raise ValueError(f"The vision backend {vision.model!r} does not see images. Use one that does.")
    backends = {"blend": text, "visual": vision, "holistic": text}
    folder, mine = Path(folder), range(len(dataset)) if rows is None else rows
    with JournalWriter(folder / journal_name(mine)) as journal:
        entries = read_journals(folder, mine)
        known = Known(entries)
        if not len(mine):
            return ShardReport(0, 0, 0, 0, 0, journal.torn)
        options = {"attempts": attempts, "max_words": max_words, "max_failures": max_failures}
        work = _Work(journal, known, backends, options | {"retry_quarantined": retry_quarantined})
        chosen = dataset.select(mine)
        # Only headers: images are decoded once, when they are sent.
        good, report = checked_rows(chosen, check_images="header", max_bad_fraction=max_bad_fraction)
        seen = {(entry["image_id"], entry["reason"]) for entry in entries if entry["stage"] == INPUT}
        for entry in _input_faults(report):
            if (entry["image_id"], entry["reason"]) not in seen:
                journal.append(entry)
        number_of = {str(image_id): number for image_id, number in zip(chosen["image_id"][:], mine, strict=True)}
        done = resumed = 0
        images_of = undecoded(good)
        for start in range(0, len(good), rows_at_once):
            part = images_of.select(range(start, min(start + rows_at_once, len(good))))
            batch = [
                Row(number_of[str(image_id)], str(image_id), references)
                for image_id, references in zip(part["image_id"][:], part["captions"][:], strict=True)
            ]
            images: dict[int, Any] = {}
            for at, row in enumerate(batch):
                row.recall(known, backends)
                resumed += row.is_done
                if "visual" not in row.answers:
                    try:
                        images[row.number] = open_image(part[at]["image"])
                    except ImageError as error:
                        work.image_fault(row, error)
            for stage in STAGES:
                work.ask(batch, stage, images)
            journal.flush()
            done += sum(row.is_done for row in batch)
        result = ShardReport(len(mine), done, resumed, len(mine) - done, work.asked, journal.torn)
    logger.info("rows %d to %d: %s", mine.start, mine.stop - 1, result)
    return result
