"""`captionrl boost`: blend references, describe images, combine both; on shards, and resumable."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import datasets
import pyarrow as pa
import pyarrow.parquet

from hf_captionrl.apps.boosting.backends import is_local
from hf_captionrl.apps.boosting.conflicts import scene_conflicts, text_conflicts
from hf_captionrl.apps.boosting.prompts import (
    ANSWER_REMEDIES,
    MAX_ANSWER_WORDS,
    STAGES,
    answer_fault,
    blend_prompt,
    clean_answer,
    holistic_prompt,
    is_truncated,
    visual_prompt,
)
from hf_captionrl.captioners.language_models import Backend, BackendError, Failure, Prompt, Truncated
from hf_captionrl.data.columns import CAPTIONS, undecoded
from hf_captionrl.data.images import ImageError, image_bytes, open_image, verify_image
from hf_captionrl.data.options import ids_digest, load_split, source_settings
from hf_captionrl.data.quarantine import QuarantineError, QuarantineReport, check_captions
from hf_captionrl.utils.io import LineFile, atomic_file, to_plain
from hf_captionrl.utils.parts import ShardFolder, Stage, read_shard

if TYPE_CHECKING:
    from hf_captionrl.apps.boosting.options import BoostOptions


# --- The journal: one line per answer, appended when the answer arrives, so that no answer is lost -------------------
# Each line reaches the operating system immediately, so it survives `kill -9`; flushes to the disk, against a loss of power, come
# in batches. Readers skip an incomplete last line of a killed run, and the next writer removes it. A journal is
# named after the rows that its shard covers. A shard reads every journal of its rows, so the size of shards can change between runs.

_FSYNC_EVERY = 64
_PATTERN = "journal-*.jsonl"
_NAME = re.compile(r"journal-(\d{9,})-(\d{9,})\.jsonl")


def journal_name(rows: range) -> str:
    """File name of the journal of some rows."""
    return f"journal-{rows.start:09d}-{rows.stop:09d}.jsonl"


def journals(folder: str | os.PathLike[str], rows: range | None = None) -> list[Path]:
    """Journals of a folder that cover some of the rows, sorted by name; None: all."""
    found = sorted(Path(folder).glob(_PATTERN))
    return found if rows is None else [path for path in found if _overlaps(path, rows)]


def _overlaps(path: Path, rows: range) -> bool:
    match = _NAME.fullmatch(path.name)
    # A journal with another name may be about any row.
    return match is None or (int(match[1]) < rows.stop and rows.start < int(match[2]))


def _lines(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """Entries of complete lines; text after the last line break is being written, or is left from a kill."""
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is not JSON ({error}): {line[:60]!r}. A kill can damage only the last line, so "
                "another program changed the file. Remove that line; its question is asked again."
            ) from None
        if not isinstance(entry, dict) or not {"image_id", "stage"} <= set(entry):
            raise ValueError(f"{path}, line {number}, is not an entry of a journal: {line[:60]!r}. Remove that line.")
        yield entry


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All entries of a journal, also while another process writes it."""
    path = Path(path)
    return list(_lines(path.read_bytes(), path))


def read_journals(folder: str | os.PathLike[str], rows: range | None = None) -> list[dict[str, Any]]:
    """All entries of the journals that cover some of the rows; None: of all journals."""
    return [entry for path in journals(folder, rows) for entry in read_journal(path)]


class JournalWriter(LineFile):
    """Appends entries to the journal of one shard, which it locks; a context manager. `torn`: bytes removed from its end."""

    busy = "Wait until it has finished, or use another --output."

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._waiting = 0
        super().__init__(path)

    def _begin(self, data: bytes) -> None:
        for _ in _lines(data, self.path):
            pass  # fails on a broken line before anything is asked or written
        whole = data.rfind(b"\n") + 1
        self.torn = len(data) - whole
        self.truncate(whole)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one entry; it survives a kill of the process when this returns."""
        # ASCII escapes: a lone surrogate in an answer cannot be encoded as UTF-8.
        self.append_bytes((json.dumps(to_plain(entry)) + "\n").encode("ascii"), flush=False)
        self._waiting += 1
        if self._waiting >= _FSYNC_EVERY:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            super().flush()
            self._waiting = 0

    def close(self) -> None:
        try:
            self.flush()
        finally:
            super().close()


# --- Rows and their answers and faults in the journals ---------------------------------------------------------------

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


# --- Visual Caption Boosting of some rows: ask, check, write to the journal, ask again; resumable --------------------
# Source: Gaur et al. 2024, "No Detail Left Behind", section 2. BlendCap and VisualCap are independent; the HolisticCap needs
# both. Each answer is in the journal before the next question is asked.

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


# --- Rows of boosted captions from the journals, and the Parquet file with all of them -------------------------------

CAPTIONS_FILE = "captions.parquet"
"""Name of the result."""

QUARANTINE_FILE = "quarantine.jsonl"
"""Name of the list of quarantined rows."""

_ROWS_AT_ONCE = 100
_ROWS_OF_TEXT = 4096
_GROUP_BYTES = 2**25
"""Bytes of a row group, before compression. Groups of many rows keep the list of groups short."""

_STRING = datasets.Value("string")
_PROVENANCE = dict.fromkeys(("model", "revision", "prompt_hash", "time"), _STRING) | {
    "attempt": datasets.Value("int32")
}


class UnfinishedError(ValueError):
    """Some rows have no answers, or their journals are in another folder."""


@dataclass(frozen=True)
class BoostedFile:
    """The file and its counts.

    Args:
        path (`pathlib.Path`): The Parquet file.
        rows (`int`): Rows in it.
        quarantined (`int`): Rows that are not in it.
        conflicts (`int`): Rows whose HolisticCap contradicts the BlendCap.
    """

    path: Path
    rows: int
    quarantined: int
    conflicts: int


def _image_value(value: Any, embed: bool) -> Any:
    """An image as it is stored: its bytes, or an absolute path."""
    if not isinstance(value, dict):
        return value
    if embed or value.get("bytes") is not None:
        return image_bytes(value)
    return {"bytes": None, "path": os.path.abspath(value["path"])}


def _public(source: dict[str, Any]) -> dict[str, Any]:
    """Source of a caption without the folders of this machine, because the file may be published."""
    model = str(source["model"])
    return {**source, "model": os.path.basename(model.rstrip("/")) if os.path.isabs(model) else model}


def _last_fault(
    row: Row, known: Known, backends: dict[str, Backend], inputs: dict[str, Any], images: datasets.Dataset, at: int
) -> dict[str, Any] | None:
    """Why a row is not done; None if it was not tried. The fault of an image counts until the image is repaired."""
    tried: list[dict[str, Any]] = []
    broken = [inputs[row.image_id]] if row.image_id in inputs else []
    for stage in STAGES:
        if stage in row.answers or (stage == "holistic" and len(row.answers) < 2):
            continue
        for fault in known.faults(row.prompt(stage), backends[stage]):
            (tried if fault["reason"] in ANSWER_REMEDIES else broken).append(fault)
        if tried:
            break
    if broken:
        try:
            verify_image(images[at]["image"])
        except ImageError:
            return broken[-1]
    return tried[-1] if tried else None


def _conflicts(row: Row, facts: Any) -> list[str]:
    blend, holistic = row.answers["blend"]["text"], row.answers["holistic"]["text"]
    found = text_conflicts(blend, holistic) if facts is None else scene_conflicts(blend, holistic, facts)
    return [str(conflict) for conflict in found]


def boosted_rows(
    dataset: datasets.Dataset,
    folder: str | Path,
    *,
    text: Backend,
    vision: Backend,
    rows: range | None = None,
    exact_facts: bool = False,
) -> list[dict[str, Any]]:
    """The captions of rows, from their journals.

    Args:
        dataset (`datasets.Dataset`): The whole data set.
        folder (`str` or `Path`): Folder of the journals.
        text ([`Backend`]): The text backend; answers of other backends are ignored.
        vision ([`Backend`]): The vision backend.
        rows (`range`, *optional*): The rows; by default all.
        exact_facts (`bool`): Find conflicts with the column `facts` of embedded scenes.

    Returns:
        `list[dict[str, Any]]`: One per row, in their order: `row`, `image_id`, and either `references`, `captions` (only the
        HolisticCap), `conflicts` in words, `blend_caption`, `visual_caption`, `holistic_caption`, and `blend_source`,
        `visual_source`, `holistic_source` with model, revision, prompt hash, time (UTC) and attempt; or `quarantine`, the
        reason as JSON.

    Raises:
        UnfinishedError: If a row was not tried.
        ValueError: If a journal is broken.
    """
    mine = range(len(dataset)) if rows is None else rows
    backends = {"blend": text, "visual": vision, "holistic": text}
    entries = read_journals(folder, mine)
    known, inputs = Known(entries), {e["image_id"]: e for e in entries if e["stage"] == INPUT}
    chosen = dataset.select(mine)
    number_of = {str(image_id): number for image_id, number in zip(chosen["image_id"][:], mine, strict=True)}
    # The same cleaning as before the questions, because answers are looked up by the exact prompt.
    good, report = checked_rows(chosen)
    split = str(dataset.split or "train")
    bad = [asdict(entry) | {"row": mine[entry.row]} for entry in report.entries if entry.dropped == "row"]
    found: list[dict[str, Any]] = []
    missing: list[str] = []
    images = undecoded(good).select_columns("image")
    pairs = zip(good["image_id"][:], good["captions"][:], strict=True)
    for at, (image_id, references) in enumerate(pairs):
        row = Row(number_of[str(image_id)], str(image_id), references)
        row.recall(known, backends)
        if row.is_done:
            found.append(_boosted(row, good[at]["facts"] if exact_facts else None))
        elif (fault := _last_fault(row, known, backends, inputs, images, at)) is not None:
            row.fault = fault
            bad.append(row.quarantine_entry(split))
        else:
            missing.append(row.image_id)
    if missing:
        raise UnfinishedError(
            f"{len(missing)} of {len(mine)} rows are unfinished, such as {missing[0]!r}. Give the command again with the same "
            "models."
        )
    # ASCII escapes: a lone surrogate or U+2028 in an answer would break the encoding or the lines.
    found += [
        {"row": entry["row"], "image_id": str(entry["image_id"]), "quarantine": json.dumps(entry)} for entry in bad
    ]
    return sorted(found, key=lambda row: row["row"])


def _boosted(row: Row, facts: Any) -> dict[str, Any]:
    texts = {stage: row.answers[stage]["text"] for stage in STAGES}
    found = {"row": row.number, "image_id": row.image_id, "references": list(row.references)}
    found |= {"captions": [texts["holistic"]], "conflicts": _conflicts(row, facts), "quarantine": None}
    for stage in STAGES:
        found |= {f"{stage}_caption": texts[stage], f"{stage}_source": _public(row.provenance()[stage])}
    return found


def write_boosted_captions(
    dataset: datasets.Dataset,
    folder: str | Path,
    found: Iterable[Mapping[str, Any]],
    *,
    embed_images: bool = False,
    with_images: bool = True,
) -> BoostedFile:
    """Write `captions.parquet` and `quarantine.jsonl`, each atomically.

    Rows are read, and images copied, a hundred at a time. The Parquet file has the rows and columns of the data set (`image`, `image_id`, ...) and those of `boosted_rows`: `captions`
    holds only the HolisticCap, on which `load_captions` trains, and `references` the human captions.

    Args:
        dataset (`datasets.Dataset`): The whole data set.
        folder (`str` or `Path`): Folder of the output.
        found (`Iterable[Mapping[str, Any]]`): [`boosted_rows`], or the rows of the shards.
        embed_images (`bool`): Store the images in the file, not their paths.
        with_images (`bool`): If False, leave out the column `image`, to publish only the captions and the ids.

    Returns:
        [`BoostedFile`]: Path and counts.

    Raises:
        ValueError: If no row is done.
    """
    folder, counts = Path(folder), Counter[str]()
    path = folder / CAPTIONS_FILE
    with atomic_file(path) as file:
        with atomic_file(folder / QUARANTINE_FILE) as quarantine:
            done = _without_quarantine(found, quarantine, counts)
            _write_rows(dataset, done, file, embed_images=embed_images, with_images=with_images)
        if not counts["rows"]:  # the list of reasons is written, and an old file of captions stays
            raise ValueError(
                f"All {len(dataset)} rows are in quarantine. Read the reasons in {folder / QUARANTINE_FILE}."
            )
    return BoostedFile(path, counts["rows"], counts["quarantined"], counts["conflicts"])


def _without_quarantine(
    found: Iterable[Mapping[str, Any]], quarantine: BinaryIO, counts: Counter[str]
) -> Iterator[Mapping[str, Any]]:
    """The finished rows; reasons of the others are written, and all are counted."""
    for row in found:
        if row["quarantine"] is not None:
            counts["quarantined"] += 1
            quarantine.write(row["quarantine"].encode() + b"\n")
            continue
        counts["rows"] += 1
        counts["conflicts"] += bool(row["conflicts"])
        yield row


def _write_rows(
    dataset: datasets.Dataset,
    done: Iterator[Mapping[str, Any]],
    file: BinaryIO,
    *,
    embed_images: bool,
    with_images: bool,
) -> None:
    """Write the finished rows as Parquet, of which one row group is in memory."""
    texts: dict[str, Any] = dict.fromkeys(("references", "captions", "conflicts"), CAPTIONS)
    for stage in STAGES:
        texts |= {f"{stage}_caption": _STRING, f"{stage}_source": _PROVENANCE}
    kept = {name: kind for name, kind in dataset.features.items() if name not in texts and name != "image"}
    image = {"image": datasets.Image()} if with_images else {}
    schema = datasets.Features({**kept, **image, **texts}).arrow_schema
    source = undecoded(dataset).with_format("arrow")
    # As `Dataset.to_parquet`: the pieces of a file that changes little are found again when it is uploaded again.
    chunking = datasets.config.DEFAULT_CDC_OPTIONS
    options = {"use_content_defined_chunking": chunking, "write_page_index": True}
    with pyarrow.parquet.ParquetWriter(file, schema, **options) as writer:
        group: list[pa.Table] = []
        while rows := list(islice(done, _ROWS_AT_ONCE)):
            table = source[[row["row"] for row in rows]]
            columns = {name: table.column(name) for name in kept}
            columns |= {name: pa.array([row[name] for row in rows], schema.field(name).type) for name in texts}
            if with_images:
                images = [_image_value(value, embed_images) for value in table.column("image").to_pylist()]
                columns["image"] = pa.array(images, schema.field("image").type)
            group.append(pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema))
            if sum(part.nbytes for part in group) >= _GROUP_BYTES:
                _write_group(writer, group)
        if group:
            _write_group(writer, group)
        writer.add_key_value_metadata({"content_defined_chunking": json.dumps(chunking)})


def _write_group(writer: pyarrow.parquet.ParquetWriter, group: list[pa.Table]) -> None:
    table = pa.concat_tables(group)
    writer.write_table(table, row_group_size=len(table))
    group.clear()


class CaptionsOf:
    """The captions of a column of the Parquet file, which is read again by each iterator, a few thousand rows at a time."""

    def __init__(self, path: Path, column: str) -> None:
        self._path, self._column = path, column

    def __iter__(self) -> Iterator[str]:
        with pyarrow.parquet.ParquetFile(self._path) as file:
            for batch in file.iter_batches(_ROWS_OF_TEXT, columns=[self._column]):
                values = batch.column(0)
                yield from (values.flatten() if pa.types.is_list(values.type) else values).to_pylist()


# --- Boosting of shards: each asks about its rows, keeps the answers in its journal, and writes its captions ---------

_ROLES = ("text", "vision")


class BoostStage(Stage):
    """Boosted captions of shards; see `boosted_rows`."""

    def __init__(self, options: BoostOptions, ids: str) -> None:
        self.options, self.ids = copy.copy(options), ids
        self.needs_gpu = any(is_local(options, role) for role in _ROLES)

    def load(self) -> None:
        from hf_captionrl.apps.boosting.backends import load_backend

        self._dataset = load_split(self.options, quarantine_path=None, expected_ids=self.ids).dataset
        self._backends = {role: load_backend(self.options, role, self._dataset) for role in _ROLES}

    def made_by(self) -> dict[str, Any]:
        return {role: [backend.model, backend.revision] for role, backend in self._backends.items()}

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        text, texts = pa.string(), pa.list_(pa.string())
        source = pa.struct(dict.fromkeys(("model", "revision", "prompt_hash", "time"), text) | {"attempt": pa.int32()})
        columns = {"row": pa.int64(), "image_id": text, "references": texts, "captions": texts, "conflicts": texts}
        for stage in STAGES:
            columns |= {f"{stage}_caption": text, f"{stage}_source": source}
        return pa.schema({**columns, "quarantine": text})

    def __call__(self, rows: range) -> list[dict[str, Any]]:

        options = self.options
        boost_shard(
            self._dataset,
            options.output,
            **self._backends,
            rows=rows,
            attempts=options.attempts,
            max_words=options.max_words,
            rows_at_once=options.rows_at_once,
            max_bad_fraction=None,  # checked before, over all rows
            max_failures=options.max_failures,
            retry_quarantined=options.retry_quarantined,
        )
        exact = options.dataset == "scenes"
        return boosted_rows(self._dataset, options.output, **self._backends, rows=rows, exact_facts=exact)


def reopen_shards(shards: ShardFolder, retry_quarantined: bool) -> None:
    """Remove finished shards that may gain rows: a backend failed, an image was broken, or `retry_quarantined`."""
    missing = set(shards.unfinished())
    for shard, name in enumerate(shards.names):
        if shard in missing or not shards.is_mine(shard):
            continue
        column = read_shard(shards.folder / name, ["quarantine"])["quarantine"]
        reasons = {json.loads(line)["reason"] for line in column.to_pylist() if line is not None}
        if reasons - (ANSWER_REMEDIES.keys() - {"backend_failed"}) or (retry_quarantined and reasons):
            (shards.folder / name).unlink()


# --- `captionrl boost`: blend references, describe images, combine both; on shards, and resumable --------------------

SHARDS_FOLDER = "shards"
"""Folder of the shards, in the output."""

_CHECKED_ROWS = 1024
_CAPTION_COLUMNS = {"blend_caption": "BlendCap", "visual_caption": "VisualCap", "holistic_caption": "HolisticCap"}


def _load(arguments: BoostOptions) -> datasets.Dataset:
    """The images; up to a thousand of them are checked, so that a wrong folder is found before any question."""

    loaded = load_split(arguments, quarantine_path=None)
    number, total = len(loaded.all_ids), sum(loaded.sizes.values())
    if number < total and arguments.dataset != "scenes":
        print(
            f"captionrl boost: {number} of {total} images are boosted: split {arguments.split!r}. Use --split train for "
            "captions to train on, or --split all for every image.",
            file=sys.stderr,
        )
    rows = loaded.dataset
    step = max(1, len(rows) // _CHECKED_ROWS)
    checked_rows(
        rows.select(range(0, len(rows), step)), check_images="header", max_bad_fraction=arguments.max_bad_fraction
    )
    return rows


def _settings(arguments: BoostOptions, dataset: datasets.Dataset) -> dict[str, Any]:
    """Settings of the captions; the answers of other models stay in the journals."""
    data = {"images": ids_digest(dataset), "references": ids_digest(dataset, "captions")}
    names = ("text", "vision", "text_revision", "vision_revision", "max_new_tokens", "seed", "max_words")
    scenes = ("error_rate", "mention_rate")
    return source_settings(arguments) | data | {name: getattr(arguments, name) for name in names + scenes}


def write_statistics(path: Path, tokenizer: str | None) -> dict[str, Any]:
    """Write Table 9 (statistics.json) and Figure 4 (lengths.png) beside the captions."""
    from hf_captionrl.apps.boosting.conflicts import source_statistics, write_source_histogram
    from hf_captionrl.utils.io import write_json

    columns = {"references": "references"} | {shown: name for name, shown in _CAPTION_COLUMNS.items()}
    sources = {shown: CaptionsOf(path, name) for shown, name in columns.items()}
    count = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        from hf_captionrl.utils.model_files import model_path

        loaded = AutoTokenizer.from_pretrained(model_path(tokenizer), trust_remote_code=False)
        count = lambda texts: [len(ids) for ids in loaded(texts)["input_ids"]]  # noqa: E731
    found = source_statistics(sources, count_tokens=count)
    write_json(path.parent / "statistics.json", found)
    write_source_histogram(path.parent / "lengths.png", sources)
    return found


def boost(arguments: BoostOptions) -> None:
    """Boost the captions, shard by shard, and write them into one file."""
    arguments.check_engine()  # before anything slow
    if arguments.embed_images and arguments.no_images:
        raise ValueError("--embed_images stores the images and --no_images leaves them out. Use one of them.")
    output = arguments.output
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {str(output)!r} is a file. Name a folder.")
    tokenizer = arguments.tokenizer or ("scenes:siglip-held-out" if arguments.dataset == "scenes" else None)

    from tqdm import tqdm

    from hf_captionrl.apps.boosting.backends import check_backend
    from hf_captionrl.hub.cards import write_boosted
    from hf_captionrl.utils.parts import ShardFolder, read_shards, run_stage

    dataset = _load(arguments)
    for role in ("text", "vision"):
        check_backend(arguments, role, dataset)
    number, ids = len(dataset), ids_digest(dataset)
    shards = ShardFolder(
        output / SHARDS_FOLDER,
        _settings(arguments, dataset),
        num_rows=number,
        rows_per_shard=arguments.rows_per_shard or 64 * arguments.rows_at_once,
        overwrite=arguments.overwrite,
    )
    reopen_shards(shards, arguments.retry_quarantined)
    resumed = number - sum(len(shards.rows(shard)) for shard in shards.unfinished())
    # A progress bar only on a terminal.
    with tqdm(total=number, initial=resumed, unit=" rows", disable=None) as progress:
        done = run_stage(BoostStage(arguments, ids), shards, arguments, progress=progress.update)
    summary: dict[str, Any] = {"output": str(output), "rows": number, "resumed": resumed, "shards": done["shards"]}
    if done["manifest"] is None:
        summary["captions"] = None  # another launched process is the last
    else:
        written = write_boosted_captions(
            dataset,
            output,
            read_shards(shards.folder),
            embed_images=arguments.embed_images,
            with_images=not arguments.no_images,
        )
        summary["captions"] = asdict(written) | {"path": str(written.path)}
        summary["statistics"] = write_statistics(written.path, tokenizer)
        summary["card"] = str(write_boosted(arguments, written, done["manifest"]["made_by"]))
    if arguments.json:
        print(json.dumps(summary))
    elif summary["captions"]:
        print(
            f"{written.path}: {written.rows} captions, {written.conflicts} of which contradict their BlendCap; "
            f"{written.quarantined} rows in quarantine."
        )
