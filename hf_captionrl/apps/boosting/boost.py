"""`captionrl boost`: blend references, describe images, combine both; in parts, and resumable.

Answers are appended to a journal when they arrive, and each shard of captions is a file that is renamed into place.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import datasets
import pyarrow as pa
import pyarrow.parquet
from huggingface_hub import DatasetCardData

from hf_captionrl.apps.boosting.backends import check_backend, is_local, load_backend
from hf_captionrl.apps.boosting.conflicts import scene_conflicts, source_statistics, text_conflicts
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
from hf_captionrl.data.columns import CAPTIONS, undecoded
from hf_captionrl.data.images import ImageError, image_bytes, open_image
from hf_captionrl.data.options import ids_digest, load_split, source_settings
from hf_captionrl.data.quarantine import QuarantineEntry, QuarantineError, check_captions
from hf_captionrl.evaluation.plots import write_length_histogram
from hf_captionrl.metrics.words import length_statistics
from hf_captionrl.utils.io import LineFile, atomic_file, atomic_write_text, refuse_file, write_json
from hf_captionrl.utils.model_files import read_object
from hf_captionrl.utils.parts import MakePart, read_parts, run_parts, split_rows
from hf_captionrl.utils.prompts import Backend, BackendError, Failure, Prompt, Truncated

if TYPE_CHECKING:
    from hf_captionrl.apps.boosting.options import BoostOptions


# --- The journal: one line per answer, appended when the answer arrives, so that no answer is lost -------------------
# Each line reaches the operating system immediately, so it survives `kill -9`; flushes to the disk, against a loss of power, come
# in batches. Readers skip an incomplete last line of a killed run, and the next writer removes it. A journal is
# named after the rows that its shard covers. A shard reads every journal of its rows, so the size of shards can change between runs.


def journals(folder: str | os.PathLike[str], rows: range | None = None) -> list[Path]:
    """Journals of a folder that cover some of the rows, sorted by name; None: all."""

    def covers(path: Path) -> bool:
        match = re.fullmatch(r"journal-(\d{9,})-(\d{9,})\.jsonl", path.name)
        # A journal with another name may be about any row.
        return rows is None or match is None or (int(match[1]) < rows.stop and rows.start < int(match[2]))

    return [path for path in sorted(Path(folder).glob("journal-*.jsonl")) if covers(path)]


def read_journals(folder: str | os.PathLike[str], rows: range | None = None) -> list[dict[str, Any]]:
    """All entries of the journals that cover some of the rows, also while they are written; None: of all journals."""
    entries = []
    for path in journals(folder, rows):
        # Text after the last line break is being written, or is left from a kill.
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict) or not {"image_id", "stage"} <= set(entry):
                raise ValueError(
                    f"{path}, line {number}, is not an entry of a journal: {line[:60]!r}. A kill can damage only the last line, "
                    "so another program changed the file. Remove that line; its question is asked again."
                )
            entries.append(entry)
    return entries


_Question = tuple[str, ...]


class Journal(LineFile):
    """Answers to the questions about some rows, so that none is asked twice; locks the journal that it appends to.

    With another vision model, the BlendCaps are kept. With other references of one image, only this image is asked about
    again.
    """

    busy = "Wait until it has finished, or use another --output."

    def __init__(self, folder: Path, rows: range) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = rows
        self._good: dict[_Question, dict[str, Any]] = {}
        self._bad: dict[_Question, list[dict[str, Any]]] = {}
        super().__init__(folder / f"journal-{rows.start:09d}-{rows.stop:09d}.jsonl")

    def _begin(self, data: bytes) -> None:
        for entry in read_journals(self.path.parent, self._rows):  # fails before anything is asked or written
            self._add(entry)
        self.truncate(data.rfind(b"\n") + 1)

    def _add(self, entry: dict[str, Any]) -> None:
        key = tuple(entry.get(name, "") for name in ("stage", "image_id", "model", "revision", "prompt_hash"))
        if "reason" in entry:
            self._bad.setdefault(key, []).append(entry)
        else:
            self._good.setdefault(key, entry)  # of two answers to one question, the first counts

    def append(
        self, prompt: Prompt, backend: Backend, text: str, fault: tuple[str, str] | None = None
    ) -> dict[str, Any]:
        """Add an answer, or a fault (reason and detail); it survives a kill of the process when this returns."""
        entry: dict[str, Any] = {"image_id": prompt.image_id, "stage": prompt.stage, "text": text}
        entry |= {"model": backend.model, "revision": backend.revision, "prompt_hash": prompt.hash}
        entry |= {"time": datetime.now(UTC).isoformat(timespec="seconds"), "attempt": prompt.attempt}
        if fault is not None:
            entry |= {"reason": fault[0], "detail": fault[1]}
        # ASCII escapes: a lone surrogate in an answer cannot be encoded as UTF-8.
        self.append_bytes((json.dumps(entry) + "\n").encode("ascii"), flush=False)
        self._add(entry)
        return entry

    def known(self, prompt: Prompt, backend: Backend) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """The good answer to a prompt, and the bad answers and failures."""
        key = (prompt.stage, prompt.image_id, backend.model, backend.revision, prompt.hash)
        return self._good.get(key), self._bad.get(key, [])


# --- Visual Caption Boosting of some rows: ask, check, write to the journal, ask again; resumable --------------------
# Source: Gaur et al. 2024, "No Detail Left Behind", section 2. BlendCap and VisualCap are independent; the HolisticCap needs
# both. Each answer is in the journal before the next question is asked.

_ANSWERED = ANSWER_REMEDIES.keys() - {"backend_failed"}  # an unreachable backend gives no answer

_STRING = datasets.Value("string")
_PROVENANCE = dict.fromkeys(("model", "revision", "prompt_hash", "time"), _STRING) | {
    "attempt": datasets.Value("int32")
}


@dataclass
class _Row:
    """One image with its answers so far."""

    number: int  # its row in the data set
    image_id: str
    references: Sequence[str]
    image: Any = None
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)  # entry of each finished stage
    fault: tuple[str, str, str, str] | None = None  # stage, reason, detail and remedy, if it cannot be finished

    def prompt(self, stage: str) -> Prompt:
        if stage == "blend":
            return blend_prompt(self.image_id, self.references)
        if stage == "visual":
            return visual_prompt(self.image_id, self.image)
        return holistic_prompt(self.image_id, *(self.answers[s]["text"] for s in ("blend", "visual")))

    def set_fault(self, entry: dict[str, Any]) -> None:
        reason = entry["reason"]
        self.fault = (entry["stage"], reason, entry["detail"], ANSWER_REMEDIES[reason])

    def boosted(self, facts: Any) -> dict[str, Any]:
        """The finished row, with conflicts that are exact if the facts of its scene are given."""
        texts = {stage: self.answers[stage]["text"] for stage in STAGES}
        blend, holistic = texts["blend"], texts["holistic"]
        conflicts = text_conflicts(blend, holistic) if facts is None else scene_conflicts(blend, holistic, facts)
        found = {"row": self.number, "image_id": self.image_id, "references": list(self.references)}
        found |= {"captions": [holistic], "conflicts": [str(conflict) for conflict in conflicts], "quarantine": None}
        for stage in STAGES:
            source = {name: self.answers[stage][name] for name in _PROVENANCE}
            # Without the folders of this machine, because the file may be published.
            if os.path.isabs(source["model"]):
                source["model"] = os.path.basename(source["model"].rstrip("/"))
            found |= {f"{stage}_caption": texts[stage], f"{stage}_source": source}
        return found


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
    max_failures: int = 20,
    retry_quarantined: bool = False,
    exact_facts: bool = False,
) -> list[dict[str, Any]]:
    """Ask for all captions of some rows (None: all), and write each answer to their journal in `folder`.

    Images are opened before any question, so a missing image costs no request. The options are those of `captionrl boost`;
    `exact_facts` finds conflicts with the column `facts` of embedded scenes.

    Returns the rows in their order: those of `_Row.boosted`, or those with a reason in `quarantine`.
    """
    if not vision.is_multimodal:
        raise ValueError(f"The vision backend {vision.model!r} does not see images. Use one that does.")
    backends = {"blend": text, "visual": vision, "holistic": text}
    mine = range(len(dataset)) if rows is None else rows
    chosen, split = dataset.select(mine), str(dataset.split or "train")
    found: list[dict[str, Any]] = []
    failures = 0  # in a row

    def quarantine(entry: QuarantineEntry) -> None:
        # ASCII escapes: a lone surrogate or U+2028 in an answer would break the encoding or the lines.
        reason = json.dumps(dataclasses.asdict(entry))
        found.append({"row": entry.row, "image_id": entry.image_id, "quarantine": reason})

    def answered(row: _Row, prompt: Prompt, backend: Backend, answer: Any) -> bool:
        """Write an answer to the journal; False if another attempt may correct its fault."""
        nonlocal failures
        if isinstance(answer, Failure):
            row.set_fault(journal.append(prompt, backend, "", (answer.reason, answer.detail)))
            # Rejections count too: if every prompt is rejected, the prompts are not the problem.
            failures += 1
            if failures >= max_failures:
                raise BackendError(
                    f"No answer {failures} times in a row ({answer.detail}). The journal stays; give the same command again "
                    "when the backend answers, with --retry_quarantined if it rejected prompts."
                )
            return True
        failures = 0
        said = answer.text if isinstance(answer, Truncated) else answer
        cleaned = clean_answer(said)
        fault = answer_fault(cleaned, prompt, max_words=max_words)
        if fault is None and isinstance(answer, Truncated) and is_truncated(said):
            fault = ("answer_truncated", f"the answer stops at the length limit: {('...' + cleaned[-60:])!r}")
        entry = journal.append(prompt, backend, cleaned, fault)
        if fault is None:
            row.answers[prompt.stage] = entry
        else:
            row.set_fault(entry)
        return fault is None

    def ask(batch: Sequence[_Row], stage: str) -> None:
        """Ask for one stage of some rows; each row gets an answer or a fault."""
        backend = backends[stage]
        pending: list[tuple[_Row, int, int]] = []  # with bad answers in all runs, and those that count for `attempts`
        for row in batch:
            if row.fault is not None:
                continue
            # Two vision models may give the same VisualCap; then the HolisticCap is shared.
            known, faults = journal.known(row.prompt(stage), backend)
            if known is not None:
                row.answers[stage] = known
                continue
            answers = [entry for entry in faults if entry["reason"] in _ANSWERED]
            given_up = len(answers) >= attempts or any(entry["reason"] == "backend_rejected" for entry in answers)
            if given_up and not retry_quarantined:
                row.set_fault(answers[-1])
            else:
                pending.append((row, len(answers), 0 if given_up else len(answers)))
        while pending:
            prompts = [dataclasses.replace(row.prompt(stage), attempt=ever) for row, ever, _ in pending]
            again, seen = [], set()
            for position, answer in backend.complete(prompts):
                seen.add(position)
                row, ever, now = pending[position]
                if not answered(row, prompts[position], backend, answer) and now + 1 < attempts:
                    row.fault = None
                    again.append((row, ever + 1, now + 1))
            if len(seen) != len(prompts):
                raise BackendError(
                    f"{backend.model} answered {len(seen)} of {len(prompts)} prompts. Fix the backend: it must answer each."
                )
            pending = again

    try:  # images are opened below; all rows may be bad
        good, report = check_captions(chosen, check_images=False, max_bad_fraction=1.0)
    except QuarantineError as error:
        good, report = chosen.select([]), error.report
    for entry in report.entries:
        if entry.dropped == "row":
            quarantine(dataclasses.replace(entry, row=mine[entry.row]))
    number_of = {str(image_id): number for image_id, number in zip(chosen["image_id"][:], mine, strict=True)}
    images = undecoded(good)
    with Journal(Path(folder), mine) as journal:
        for start in range(0, len(good), rows_at_once):
            part = images.select(range(start, min(start + rows_at_once, len(good))))
            batch = [
                _Row(number_of[str(image_id)], str(image_id), references)
                for image_id, references in zip(part["image_id"][:], part["captions"][:], strict=True)
            ]
            for at, row in enumerate(batch):
                if journal.known(row.prompt("visual"), vision)[0] is None:
                    try:
                        row.image = open_image(part[at]["image"])
                    except ImageError as error:
                        row.fault = ("visual", error.reason, error.detail, error.remedy)
            for stage in STAGES:
                ask(batch, stage)
            journal.flush()
            for at, row in enumerate(batch):
                if row.fault is None:
                    found.append(row.boosted(part[at]["facts"] if exact_facts else None))
                else:
                    quarantine(QuarantineEntry(row.number, row.image_id, split, *row.fault, dropped="row"))
    return sorted(found, key=lambda row: row["row"])


# --- The Parquet file with all boosted captions ----------------------------------------------------------------------

CAPTIONS_FILE = "captions.parquet"
QUARANTINE_FILE = "quarantine.jsonl"

_ROWS_AT_ONCE = 100
_ROWS_OF_TEXT = 4096
_GROUP_BYTES = 2**25  # of a row group, before compression: groups of many rows keep the list of groups short

_TEXTS: dict[str, Any] = dict.fromkeys(("references", "captions", "conflicts"), CAPTIONS)
for _stage in STAGES:
    _TEXTS |= {f"{_stage}_caption": _STRING, f"{_stage}_source": _PROVENANCE}


@dataclass(frozen=True)
class BoostedFile:
    """The Parquet file and its counts."""

    path: Path
    rows: int
    quarantined: int  # rows that are not in it
    conflicts: int  # rows whose HolisticCap contradicts the BlendCap


def write_boosted_captions(
    dataset: datasets.Dataset,
    folder: str | Path,
    found: Iterable[Mapping[str, Any]],
    *,
    embed_images: bool = False,
    with_images: bool = True,
) -> BoostedFile:
    """Write the rows of [`boost_shard`] to `captions.parquet` and `quarantine.jsonl`, each atomically.

    The Parquet file has the rows and columns of the data set and those of `boost_shard`. `embed_images` stores images in the
    file, not their paths. Without `with_images`, the column `image` is left out, to publish only the captions and the ids.
    """
    folder, counts = Path(folder), Counter[str]()

    def done(quarantine: BinaryIO) -> Iterator[Mapping[str, Any]]:
        """The finished rows; reasons of the others are written, and all are counted."""
        for row in found:
            if row["quarantine"] is not None:
                counts["quarantined"] += 1
                quarantine.write(row["quarantine"].encode() + b"\n")
                continue
            counts["rows"] += 1
            counts["conflicts"] += bool(row["conflicts"])
            yield row

    path = folder / CAPTIONS_FILE
    with atomic_file(path) as file:
        with atomic_file(folder / QUARANTINE_FILE) as quarantine:
            _write_rows(dataset, done(quarantine), file, embed_images=embed_images, with_images=with_images)
        if not counts["rows"]:  # the list of reasons is written, and an old file of captions stays
            raise ValueError(
                f"All {len(dataset)} rows are in quarantine. Read the reasons in {folder / QUARANTINE_FILE}."
            )
    return BoostedFile(path, counts["rows"], counts["quarantined"], counts["conflicts"])


def _write_rows(
    dataset: datasets.Dataset,
    done: Iterator[Mapping[str, Any]],
    file: BinaryIO,
    *,
    embed_images: bool,
    with_images: bool,
) -> None:
    """Write the finished rows as Parquet, of which one row group is in memory."""
    kept = {name: kind for name, kind in dataset.features.items() if name not in _TEXTS and name != "image"}
    image = {"image": datasets.Image()} if with_images else {}
    schema = datasets.Features({**kept, **image, **_TEXTS}).arrow_schema
    source = undecoded(dataset).with_format("arrow")

    def stored(value: Any) -> Any:
        """An image as it is stored: its bytes, or an absolute path."""
        if isinstance(value, dict) and (embed_images or value.get("bytes") is not None):
            return image_bytes(value)
        return {"bytes": None, "path": os.path.abspath(value["path"])} if isinstance(value, dict) else value

    # As `Dataset.to_parquet`: the pieces of a file that changes little are found again when it is uploaded again.
    chunking = datasets.config.DEFAULT_CDC_OPTIONS
    options = {"use_content_defined_chunking": chunking, "write_page_index": True}
    with pyarrow.parquet.ParquetWriter(file, schema, **options) as writer:
        group: list[pa.Table] = []
        rows = list(islice(done, _ROWS_AT_ONCE))
        while rows:
            table = source[[row["row"] for row in rows]]
            columns = {name: table.column(name) for name in kept}
            columns |= {name: pa.array([row[name] for row in rows], schema.field(name).type) for name in _TEXTS}
            if with_images:
                images = [stored(value) for value in table.column("image").to_pylist()]
                columns["image"] = pa.array(images, schema.field("image").type)
            group.append(pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema))
            rows = list(islice(done, _ROWS_AT_ONCE))
            if not rows or sum(part.nbytes for part in group) >= _GROUP_BYTES:
                whole = pa.concat_tables(group)
                writer.write_table(whole, row_group_size=len(whole))
                group.clear()
        writer.add_key_value_metadata({"content_defined_chunking": json.dumps(chunking)})


class CaptionsOf:
    """The captions of a column of the Parquet file, which is read again by each iterator, a few thousand rows at a time."""

    def __init__(self, path: Path, column: str) -> None:
        self._path, self._column = path, column

    def __iter__(self) -> Iterator[str]:
        with pyarrow.parquet.ParquetFile(self._path) as file:
            for batch in file.iter_batches(_ROWS_OF_TEXT, columns=[self._column]):
                values = batch.column(0)
                yield from (values.flatten() if pa.types.is_list(values.type) else values).to_pylist()


def write_statistics(path: Path, tokenizer: str | None) -> dict[str, Any]:
    """Write Table 9 (statistics.json) and Figure 4 (lengths.png) beside the captions."""
    sources = {"references": CaptionsOf(path, "references")}
    sources |= {f"{stage.capitalize()}Cap": CaptionsOf(path, f"{stage}_caption") for stage in STAGES}
    count = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        from hf_captionrl.utils.model_files import model_path

        loaded = AutoTokenizer.from_pretrained(model_path(tokenizer), trust_remote_code=False)
        count = lambda texts: [len(ids) for ids in loaded(texts)["input_ids"]]  # noqa: E731
    found = source_statistics(sources, count_tokens=count)
    write_json(path.parent / "statistics.json", found)
    words = {shown: length_statistics(texts)["words"] for shown, texts in sources.items()}
    write_length_histogram(path.parent / "lengths.png", words)
    return found


# --- The manifest and the card of boosted captions -------------------------------------------------------------------

BOOSTED_FILE = "boosting.json"
"""Manifest: settings and the facts of the card; published with the captions."""

_COLUMNS = {
    "image": "the image",
    "image_id": "its id in the source",
    "captions": "only the HolisticCap, for training",
    "references": "the human captions",
    "blend_caption": "BlendCap: the references, blended by the language model",
    "visual_caption": "VisualCap: description by the vision model",
    "holistic_caption": "HolisticCap: the BlendCap with the additional details of the VisualCap",
    "conflicts": "contradictions between HolisticCap and BlendCap, in words",
    "blend_source": "model, revision, prompt hash, time and attempt of the BlendCap",
    "visual_source": "the same for the VisualCap",
    "holistic_source": "the same for the HolisticCap",
}


def write_boosted(arguments: BoostOptions, written: BoostedFile, made_by: Mapping[str, Any]) -> Path:
    """Write `boosting.json` and the card beside the captions; `made_by`: model and revision of both backends."""
    from hf_captionrl.hub import public_values
    from hf_captionrl.hub.push import public_versions

    folder, embedded = written.path.parent, arguments.dataset == "scenes"
    source = "hf_captionrl scenes" if embedded else str(public_values(arguments.dataset))
    columns = pyarrow.parquet.read_schema(written.path).names
    by = "the facts of the scenes" if embedded else "word lists, which find only a few conflicts"
    split = "all splits" if arguments.split == "all" else f"the {arguments.split} split"
    models = {
        role: f"{public_values(made_by[name][0])}, revision {made_by[name][1] or 'not named'}"
        for role, name in (("language model", "text"), ("vision model", "vision"))
    }
    # The name of the folder, as the Hub accepts it.
    name = re.sub(r"[^A-Za-z0-9_]+", "-", folder.resolve().name).strip("-_")[:96] or "boosted"
    card = {
        "dataset_id": arguments.repo_id or name,
        "file": written.path.name,
        "source": source,
        "source_license": arguments.source_license_of(arguments.dataset),
        "description": f"Richer captions of {written.rows} images, {split} of {source}.",
        "made_with": {
            **models,
            "method": "Visual Caption Boosting (No Detail Left Behind, section 2), prompts of its Appendix A.1",
            "seed": arguments.seed,
        },
        "columns": {name: _COLUMNS.get(name, "as in the source") for name in columns},
        "sizes": {str(arguments.split): written.rows},
        "license": arguments.license,
        "checked": f"{written.conflicts} of {written.rows} HolisticCaps contradict their BlendCap, by {by}; "
        f"{written.quarantined} rows were left out as unusable. No one has read the captions.",
        "language": arguments.language,
        # Paths of image files cannot be published: a push requires --embed_images or --no_images.
        "has_images": "image" in columns,
    }
    counts = {"rows": written.rows, "quarantined": written.quarantined}
    return _write_card(folder, {"format": 1, **counts, "card": card, "versions": public_versions()})


def _write_card(folder: Path, manifest: Mapping[str, Any]) -> Path:
    from hf_captionrl.hub.cards import render_card

    facts = manifest["card"]
    data = DatasetCardData(
        language=facts["language"],
        license=facts["license"],
        task_categories=["image-to-text"],
        pretty_name=facts["dataset_id"].rpartition("/")[2],
        tags=["image-captioning", "hf_captionrl", "boosted-captions"],
        configs=[{"config_name": "default", "data_files": facts["file"]}],
    )
    card = render_card("dataset.md", data, facts=facts)  # refuses what must not be published
    write_json(folder / BOOSTED_FILE, manifest)
    return atomic_write_text(folder / "README.md", card)


def rewrite_boosted_card(folder: Path, changes: Mapping[str, str]) -> Path:
    """Render the card of boosted captions again with changed facts, which their manifest keeps."""
    manifest = read_object(folder / BOOSTED_FILE)
    if "card" not in manifest:
        raise ValueError(
            f"{folder / BOOSTED_FILE} is not a manifest of boosted captions. Write it again with the same `captionrl boost` "
            "command."
        )
    return _write_card(folder, {**manifest, "card": {**manifest["card"], **changes}})


# --- `captionrl boost` -----------------------------------------------------------------------------------------------

_ROLES = ("text", "vision")
_CHECKED_ROWS = 1024  # so that a wrong folder is found before any question


class BoostParts(MakePart):
    """Boosted captions of rows; see `boost_shard`."""

    def __init__(self, options: BoostOptions, ids: str) -> None:
        self.options, self.ids = copy.copy(options), ids
        self.needs_gpu = any(is_local(options, role) for role in _ROLES)

    def load(self) -> dict[str, Any]:
        self._dataset = load_split(self.options, quarantine_path=None, expected_ids=self.ids).dataset
        self._backends = {role: load_backend(self.options, role, self._dataset) for role in _ROLES}
        return {role: [backend.model, backend.revision] for role, backend in self._backends.items()}

    def __call__(self, rows: range) -> pa.Table:
        names = ("attempts", "max_words", "rows_at_once", "max_failures", "retry_quarantined")
        options: dict[str, Any] = {name: getattr(self.options, name) for name in names} | self._backends
        exact = self.options.dataset == "scenes"
        values = boost_shard(self._dataset, self.options.output, rows=rows, exact_facts=exact, **options)
        numbers = {"row": datasets.Value("int64"), "image_id": _STRING}
        schema = datasets.Features({**numbers, **_TEXTS, "quarantine": _STRING}).arrow_schema
        return pa.Table.from_pylist(values, schema=schema)


def boost(arguments: BoostOptions) -> None:
    """Boost the captions, shard by shard, and write them into one file."""
    arguments.check_engine()  # before anything slow
    if arguments.embed_images and arguments.no_images:
        raise ValueError("--embed_images stores the images and --no_images leaves them out. Use one of them.")
    refuse_file(arguments.output)
    loaded = load_split(arguments, quarantine_path=None)
    dataset, number, total = loaded.dataset, len(loaded.all_ids), sum(loaded.sizes.values())
    if number < total and arguments.dataset != "scenes":
        print(
            f"captionrl boost: {number} of {total} images are boosted: split {arguments.split!r}. Use --split train for "
            "captions to train on, or --split all for every image.",
            file=sys.stderr,
        )
    checked = dataset.select(range(0, len(dataset), max(1, len(dataset) // _CHECKED_ROWS)))
    check_captions(checked, check_images="header", max_bad_fraction=arguments.max_bad_fraction)
    for role in _ROLES:
        check_backend(arguments, role, dataset)
    number, ids = len(dataset), ids_digest(dataset)
    # Settings of the captions; the answers of other models stay in the journals.
    names = "text vision text_revision vision_revision max_new_tokens seed max_words error_rate mention_rate".split()
    settings = source_settings(arguments) | {"images": ids, "references": ids_digest(dataset, "captions")}
    output = arguments.output
    settings |= {name: getattr(arguments, name) for name in names}
    parts = split_rows(number, arguments.rows_per_shard or 64 * arguments.rows_at_once)

    def is_final(part: pa.Table) -> bool:
        """False if another run may gain rows: a backend failed, an image was broken, or --retry_quarantined."""
        reasons = {json.loads(line)["reason"] for line in part["quarantine"].to_pylist() if line is not None}
        return not (reasons if arguments.retry_quarantined else reasons - _ANSWERED)

    done = run_parts(
        output / "shards",
        parts,
        BoostParts(arguments, ids),
        arguments,
        settings=settings,
        overwrite=arguments.overwrite,
        is_final=is_final,
    )
    summary: dict[str, Any] = {"output": str(output), "rows": number, "shards": len(parts)}
    images = {"embed_images": arguments.embed_images, "with_images": not arguments.no_images}
    written = write_boosted_captions(dataset, output, read_parts(output / "shards"), **images)
    summary |= {"resumed": done["resumed"], "captions": dataclasses.asdict(written) | {"path": str(written.path)}}
    tokenizer = arguments.tokenizer or ("scenes:siglip-held-out" if arguments.dataset == "scenes" else None)
    summary["statistics"] = write_statistics(written.path, tokenizer)
    summary["card"] = str(write_boosted(arguments, written, done["made_by"]))
    if arguments.json:
        print(json.dumps(summary))
    else:
        print(
            f"{written.path}: {written.rows} captions, {written.conflicts} of which contradict their BlendCap; "
            f"{written.quarantined} rows in quarantine."
        )
