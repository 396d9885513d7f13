"""Visual Caption Boosting of one shard: ask, check, write down, ask again, and go on where a run was stopped.

Source: Gaur et al. 2024, "No Detail Left Behind", section 2. BlendCap and VisualCap are asked for independently; the
HolisticCap needs both. An answer is in the journal before the next question is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.boosting.answers import ANSWER_REMEDIES, MAX_ANSWER_WORDS, answer_fault, clean_answer, is_truncated
from hf_captionrl.boosting.journal import JournalWriter, journal_name, journals, read_journal
from hf_captionrl.boosting.prompts import STAGES
from hf_captionrl.boosting.rows import Known, Row, entry_of
from hf_captionrl.data.caption_columns import undecoded
from hf_captionrl.data.images import ImageError, open_image
from hf_captionrl.data.quarantine import QuarantineReport, check_captions
from hf_captionrl.language_models.backend import Backend, BackendError, Failure, Truncated

__all__ = ["INPUT", "ShardReport", "boost_shard"]

logger = logging.getLogger(__name__)

INPUT = "input"
"""Stage, in a journal, of what was wrong with a row before anything was asked."""


@dataclass(frozen=True)
class ShardReport:
    """What became of the rows of a shard.

    Args:
        rows (`int`): Rows of the shard.
        done (`int`): With all three captions.
        resumed (`int`): Of them, done before this run.
        quarantined (`int`): Left out, with a reason in the journal.
        asked (`int`): Answers paid for in this run, bad ones included.
        torn (`int`): Bytes of a torn last line that a killed run had left.
    """

    rows: int
    done: int
    resumed: int
    quarantined: int
    asked: int
    torn: int


class _Shard:
    """The loop of one shard; holds its journal open."""

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
        """Answer one stage of some rows; each ends with an answer or a fault."""
        backend = self.backends[stage]
        pending: list[tuple[Row, int, int]] = []  # row, bad answers ever, bad answers of this run
        for row in rows:
            if row.fault is not None or stage in row.answers:
                continue
            question = row.prompt(stage)
            # Two vision models may say the same; what was then asked for the one holds for the other.
            if (known := self.known.answer(question, backend)) is not None:
                row.answers[stage] = known
                continue
            # Neither a broken image nor a backend that was away is an answer.
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
                    fault = ("answer_cut", f"the answer stops at the length limit: {('...' + text[-60:])!r}")
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
                    f"{backend.model} answered {len(answered)} of {len(prompts)} prompts. Mend the backend."
                )
            pending = again

    def _count_failure(self, failure: Failure) -> None:
        # Rejections count, too: where every prompt is rejected, something else is wrong than the prompts.
        self.failures += 1
        if self.failures >= self.max_failures:
            raise BackendError(
                f"No answer {self.failures} times in a row ({failure.detail}). What is written stays; give the same command "
                "again once the backend answers, with --retry_quarantined if it had rejected prompts."
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
    shard: int = 0,
    num_shards: int = 1,
    attempts: int = 3,
    max_words: int = MAX_ANSWER_WORDS,
    rows_at_once: int = 64,
    max_bad_fraction: float = 0.05,
    max_failures: int = 20,
    retry_quarantined: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ShardReport:
    """Ask for all captions of every `num_shards`-th row, and write each answer into the shard's journal.

    A run that was killed goes on where it was; so does one with another number of shards, for all journals of the folder
    are read. Rows are looked at before anything is asked: one whose image is missing costs nothing.

    Args:
        dataset (`datasets.Dataset`): With `image`, `image_id` and `captions`, as `load_captions` gives it; every shard
            gets the whole of it.
        folder (`str` or `Path`): Where the journals are.
        text ([`Backend`]): Writes BlendCap and HolisticCap.
        vision ([`Backend`]): Writes VisualCap.
        shard (`int`): Which shard, from 0.
        num_shards (`int`): How many there are.
        attempts (`int`): How often a stage of a row is asked for at most, until its answer passes the checks.
        max_words (`int`): Longest accepted answer.
        rows_at_once (`int`): Rows whose images are open and whose prompts are handed over together.
        max_bad_fraction (`float`): Largest share of unusable rows, in [0, 1], with which anything is asked at all.
        max_failures (`int`): Answers in a row that did not come, after which the run stops.
        retry_quarantined (`bool`): Ask anew for rows whose answers were bad `attempts` times.
        progress (`Callable`, *optional*): Called with the number of rows finished since the last call.

    Returns:
        [`ShardReport`]: Counts.

    Raises:
        ValueError: If an option is out of range, a backend cannot see, too many rows are bad, or another process works on
            the shard.
        BackendError: If a backend cannot answer at all.
    """
    if not 0 <= shard < num_shards:
        raise ValueError(f"shard is {shard} of {num_shards}. Count shards from 0 to {num_shards - 1}.")
    if min(attempts, rows_at_once, max_failures, max_words) < 1:
        raise ValueError(
            f"attempts ({attempts}), rows_at_once ({rows_at_once}), max_failures ({max_failures}) and max_words "
            f"({max_words}) must be 1 or more."
        )
    if not vision.sees_images:
        raise ValueError(f"The vision backend {vision.model!r} does not see images. Choose one that does.")
    backends = {"blend": text, "visual": vision, "holistic": text}
    folder = Path(folder)
    mine = range(shard, len(dataset), num_shards)
    with JournalWriter(folder / journal_name(shard, num_shards)) as journal:
        entries = [entry for path in journals(folder) for entry in read_journal(path)]
        known = Known(entries)
        if not len(mine):
            return ShardReport(0, 0, 0, 0, 0, journal.torn)
        options = {"attempts": attempts, "max_words": max_words, "max_failures": max_failures}
        work = _Shard(journal, known, backends, options | {"retry_quarantined": retry_quarantined})
        chosen = dataset.select(mine)
        # Headers only: whole images are decoded once, when they are sent.
        good, report = check_captions(chosen, check_images="header", max_bad_fraction=max_bad_fraction)
        seen = {(entry["image_id"], entry["reason"]) for entry in entries if entry["stage"] == INPUT}
        for entry in _input_faults(report):
            if (entry["image_id"], entry["reason"]) not in seen:
                journal.append(entry)
        number_of = {str(image_id): number for image_id, number in zip(chosen["image_id"][:], mine, strict=True)}
        done = resumed = 0
        images_of = undecoded(good)
        for start in range(0, len(good), rows_at_once):
            part = images_of.select(range(start, min(start + rows_at_once, len(good))))
            rows = [
                Row(number_of[str(image_id)], str(image_id), references)
                for image_id, references in zip(part["image_id"][:], part["captions"][:], strict=True)
            ]
            images: dict[int, Any] = {}
            for at, row in enumerate(rows):
                row.recall(known, backends)
                resumed += row.is_done
                if "visual" not in row.answers:
                    try:
                        images[row.number] = open_image(part[at]["image"])
                    except ImageError as error:
                        work.image_fault(row, error)
            for stage in STAGES:
                work.ask(rows, stage, images)
            journal.flush()
            done += sum(row.is_done for row in rows)
            if progress is not None:
                progress(len(rows))
        result = ShardReport(len(mine), done, resumed, len(mine) - done, work.asked, journal.torn)
    logger.info("shard %d of %d: %s", shard, num_shards, result)
    return result
