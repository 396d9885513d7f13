"""`captionrl truematch build`: find bags with Algorithms 1 and 2, and write the benchmark."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import datasets

from hf_captionrl.data.columns import replace_column, undecoded
from hf_captionrl.data.images import image_bytes
from hf_captionrl.data.options import load_split
from hf_captionrl.retrieval.bags import BagFile, load_bags, save_bags
from hf_captionrl.utils.io import LineFile, atomic_write_bytes, write_json

if TYPE_CHECKING:
    import torch

    from hf_captionrl.apps.truematch.options import BuildOptions


# --- Decisions of the review: keep or drop a bag, one line per decision, flushed to disk immediately -----------------
# The last line about a bag counts; a null decision undoes the previous ones. Readers skip an incomplete last line after a crash,
# and the next writer removes it.

REASONS: dict[str, str] = {
    "duplicates": "The same image, or no difference that can be named",
    "too_easy": "Any caption distinguishes them",
    "text_or_names": "Only written text or a name differs",
    "bad_image": "A broken or unfit image",
    "other": "Another reason",
}
"""Reasons to drop a bag, in the order of the keys 1 to 5."""

_SHAPE = 'A line is {"bag": "...", "decision": "keep", "drop" or null, "reason": null or one of the reasons}.'


@dataclass(frozen=True)
class Decision:
    """One line."""

    bag: str  # id of the bag, see [`bag_id`]
    decision: Literal["keep", "drop"] | None  # `"keep"`, `"drop"`, or None to undo earlier decisions
    reason: str | None = None  # why the bag is dropped, a key of `REASONS`; None if no reason was given
    time: str | None = None  # UTC, as ISO 8601


def bag_id(image_ids: Sequence[str]) -> str:
    """Id of a bag: a hash of its images, so that a rebuilt benchmark keeps its decisions."""
    names = json.dumps([str(image_id) for image_id in image_ids])
    return f"{len(image_ids)}-{hashlib.sha256(names.encode('ascii')).hexdigest()[:12]}"


def check_decision(value: Any, where: str) -> Decision:
    """A decision from parsed JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("bag"), str) or not value["bag"]:
        raise ValueError(f"{where} does not name a bag: {value!r:.80}. {_SHAPE}")
    decision, reason, time = value.get("decision"), value.get("reason"), value.get("time")
    if decision not in ("keep", "drop", None) or "decision" not in value:
        raise ValueError(f"{where}: the decision is {decision!r:.40}. {_SHAPE}")
    if reason is not None and (decision != "drop" or reason not in REASONS):
        raise ValueError(
            f"{where}: the reason is {reason!r:.40} with the decision {decision!r}. Only dropped bags have a reason. Use one of "
            f"{', '.join(REASONS)}."
        )
    if time is not None and not isinstance(time, str):
        raise ValueError(f"{where}: the time is {time!r:.40}, not text. {_SHAPE}")
    return Decision(value["bag"], decision, reason, time)


def _parse(line: bytes, where: str) -> Decision:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): {line[:60]!r}. {_SHAPE}") from None
    return check_decision(value, where)


def read_decisions(path: str | os.PathLike[str]) -> list[Decision]:
    """All decisions of a file, oldest first."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. `captionrl truematch review` writes one.")
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == len(lines):  # no line break at its end
            try:
                json.loads(line)
            except ValueError:
                continue
        found.append(_parse(line, f"{path}, line {number},"))
    return found


def drop_bags(file: BagFile, decisions: Iterable[Decision]) -> BagFile:
    """The bags without those whose last decision is "drop"; undecided bags stay."""
    last = {decision.bag: decision.decision for decision in decisions}
    kept = [number for number, bag in enumerate(file.bags) if last.get(bag_id(bag)) != "drop"]
    if not kept:
        raise ValueError(f"All {len(file.bags)} bags are dropped, so the benchmark is empty. Keep at least one.")
    return BagFile(
        [file.bags[number] for number in kept],
        [file.similarities[number] for number in kept],
        file.signature,
        file.features,
        file.kind,
    )


class DecisionWriter(LineFile):
    """Appends decisions to a file, which it locks; a context manager. `decisions` holds all of the file, oldest first."""

    busy = "Stop the other review first."

    def _begin(self, data: bytes) -> None:
        self.decisions = read_decisions(self.path)
        whole = data.rfind(b"\n") + 1
        torn = data[whole:]
        self.truncate(whole)
        if torn.strip() and self.decisions and self._is_whole(torn):
            self.append_bytes(torn.strip() + b"\n")  # only its line break was missing

    @staticmethod
    def _is_whole(line: bytes) -> bool:
        try:
            json.loads(line)
        except ValueError:
            return False
        return True

    def append(self, decision: Decision) -> Decision:
        """Add a decision; it is on disk when this returns."""
        written = Decision(
            decision.bag,
            decision.decision,
            decision.reason,
            decision.time or datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.append_bytes((json.dumps(vars(written)) + "\n").encode("ascii"))
        self.decisions.append(written)
        return written


# --- The folder of a benchmark: bags, their images and captions, and the decisions of the review ---------------------
# bags.json          all bags, most similar first (`retrieval.bag_files`)
# kept.json          the same without the bags that were dropped
# decisions.jsonl    keep or drop, one line per decision (`decisions.py`)
# data/*.parquet     image_id, captions, and optionally image and facts; rows that are in no bag are distractors
# truematch.json     settings of the build; written last, so a folder without it is unfinished

BAGS_FILE, KEPT_FILE, DECISIONS_FILE = "bags.json", "kept.json", "decisions.jsonl"
DATA_FOLDER, MANIFEST_FILE, _PLAN_FILE = "data", "truematch.json", "building.json"

_ROWS_PER_FILE = 1000
"""Images per Parquet file: about 150 MB of COCO, held in memory while it is written."""
_COLUMNS = ("image", "image_id", "captions", "facts")


@dataclass(frozen=True)
class TrueMatch:
    """A finished benchmark."""

    folder: Path
    manifest: Mapping[str, Any]  # settings of the build, from `truematch.json`
    bags: BagFile  # all bags, also those that were dropped
    decisions: Sequence[Decision]  # decisions on these bags, oldest first
    foreign: int = 0  # number of decisions on bags of other benchmarks

    @property
    def images(self) -> str:
        """Folder of the images, for `load_captions`."""
        if not self.manifest.get("embed_images"):
            raise ValueError(
                f"{self.folder} was built without images. Use --dataset {self.manifest['source']} with the options of the build."
            )
        return str((self.folder / DATA_FOLDER).resolve())

    @property
    def last(self) -> dict[str, Decision]:
        """The last decision on each bag, by its id; undecided bags are left out."""
        found = {decision.bag: decision for decision in self.decisions}
        return {bag: decision for bag, decision in found.items() if decision.decision is not None}

    @property
    def kept(self) -> BagFile:
        """The bags without the dropped ones."""
        return drop_bags(self.bags, self.decisions)

    def status(self) -> dict[str, dict[str, int]]:
        """Numbers of kept, dropped and undecided bags, by bag size."""
        found: dict[str, dict[str, int]] = {}
        last = self.last
        for bag in self.bags.bags:
            counts = found.setdefault(str(len(bag)), {"bags": 0, "kept": 0, "dropped": 0, "undecided": 0})
            decision = last.get(bag_id(bag))
            counts["bags"] += 1
            counts[
                "undecided" if decision is None else {"keep": "kept", "drop": "dropped"}[str(decision.decision)]
            ] += 1
        return found


def bags_fingerprint(bags: BagFile) -> str:
    """Hash of the bags in any order; only results with equal fingerprints can be compared."""
    names = "\n".join(sorted(bag_id(bag) for bag in bags.bags))
    return hashlib.sha256(names.encode("ascii")).hexdigest()[:16]


def _content(dataset: datasets.Dataset) -> str:
    """Hash of ids and captions, in their order."""
    digest = hashlib.sha256()
    for image_id, captions in zip(dataset["image_id"][:], dataset["captions"][:], strict=True):
        digest.update(json.dumps([str(image_id), captions]).encode("ascii"))
    return digest.hexdigest()[:16]


def write_data(folder: str | Path, dataset: datasets.Dataset, *, embed_images: bool = True) -> list[Path]:
    """Write the images and captions, 1,000 per file; keep files that an interrupted run finished.

    Files are recognised by ids and captions. If only images changed, use other ids or another folder.
    """
    folder = Path(folder)
    columns = [c for c in _COLUMNS if c in dataset.column_names and (embed_images or c != "image")]
    table = undecoded(dataset.select_columns(columns))
    plan = {"content": _content(dataset), "embed_images": embed_images, "images": len(dataset)}
    plan_file = folder / _PLAN_FILE
    data = folder / DATA_FOLDER
    try:
        begun = json.loads(plan_file.read_text(encoding="utf-8")) == plan
    except (OSError, ValueError):
        begun = False
    if not begun:
        for path in data.glob("*.parquet"):
            path.unlink()
        write_json(plan_file, plan)
    number = -(-len(table) // _ROWS_PER_FILE)
    paths = [data / f"test-{i:05d}-of-{number:05d}.parquet" for i in range(number)]
    for i, path in enumerate(paths):
        if path.is_file():
            continue
        part = table.select(range(i * _ROWS_PER_FILE, min((i + 1) * _ROWS_PER_FILE, len(table))))
        if "image" in columns:
            part = replace_column(part, "image", [image_bytes(v) for v in part["image"]], datasets.Image())
        buffer = io.BytesIO()
        part.to_parquet(buffer)
        atomic_write_bytes(path, buffer.getvalue())
    return paths


def write_truematch(folder: str | Path, bags: BagFile, manifest: Mapping[str, Any]) -> TrueMatch:
    """Finish a benchmark whose data are written. Existing decisions stay."""
    folder = Path(folder)
    save_bags(folder / BAGS_FILE, bags)
    if not (folder / DECISIONS_FILE).exists():
        atomic_write_bytes(folder / DECISIONS_FILE, b"")
    write_json(folder / MANIFEST_FILE, manifest)
    found = load_truematch(folder)
    save_bags(folder / KEPT_FILE, found.kept)
    (folder / _PLAN_FILE).unlink(missing_ok=True)
    return found


def load_truematch(folder: str | Path) -> TrueMatch:
    """Read a benchmark."""
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    if not path.is_file():
        begun = (folder / _PLAN_FILE).is_file()
        remedy = (
            "Its build was interrupted. Use the same `captionrl truematch build` command again to resume."
            if begun
            else "Build a benchmark with `captionrl truematch build`."
        )
        raise FileNotFoundError(f"There is no {MANIFEST_FILE} in {str(folder)!r}. {remedy}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Build the benchmark again.") from None
    if not isinstance(manifest, dict) or not {"source", "seed", "scorer"} <= set(manifest):
        raise ValueError(f"{path} does not describe a benchmark. Build it again.")
    bags = load_bags(folder / BAGS_FILE)
    known = {bag_id(bag) for bag in bags.bags}
    lines = read_decisions(folder / DECISIONS_FILE) if (folder / DECISIONS_FILE).is_file() else []
    own = [line for line in lines if line.bag in known]
    return TrueMatch(folder, manifest, bags, own, len(lines) - len(own))


def apply_decisions(folder: str | Path, decisions: str | Path | None = None) -> tuple[TrueMatch, int]:
    """Add decisions from a file, such as the download of the review page, and write `kept.json` again.

    Existing decisions are not added again, so a file can be applied twice.
    """
    folder = Path(folder)
    found = load_truematch(folder)
    added = 0
    if decisions is not None:
        new = read_decisions(decisions)
        known = {bag_id(bag) for bag in found.bags.bags}
        for number, line in enumerate(new, start=1):
            if line.bag not in known:
                raise ValueError(
                    f"{decisions}: decision {number} is about bag {line.bag!r}, which is not in {folder}. Use a file of "
                    "decisions on this benchmark."
                )
        drop_bags(found.bags, [*found.decisions, *new])  # fails before anything is written if all bags are dropped
        with DecisionWriter(folder / DECISIONS_FILE) as writer:
            existing = set(writer.decisions)
            last = {line.bag: (line.decision, line.reason) for line in writer.decisions}
            for line in new:
                # A line without a time cannot be recognised; it is a repetition if it does not change the decision.
                if line in existing or (line.time is None and last.get(line.bag) == (line.decision, line.reason)):
                    continue
                last[line.bag] = (line.decision, line.reason)
                writer.append(line)
                added += 1
        found = load_truematch(folder)
    save_bags(folder / KEPT_FILE, found.kept)
    return found, added


# --- The card of a benchmark, rendered from its folder ---------------------------------------------------------------


def _checked(found: TrueMatch) -> str:
    """One sentence on the state of the review."""
    counts = found.status().values()
    total, undecided = sum(c["bags"] for c in counts), sum(c["undecided"] for c in counts)
    dropped = sum(c["dropped"] for c in counts)
    if undecided == total:
        return "No one has reviewed the bags yet: some may contain one image twice, or images that any caption distinguishes."
    reviewed = "All bags were reviewed" if not undecided else f"{total - undecided} of {total} bags were reviewed"
    return f"{reviewed}; {dropped} were dropped. The reasons are in decisions.jsonl."


def render_truematch_card(found: TrueMatch) -> str:
    """Render the card of a benchmark."""
    from huggingface_hub import DatasetCardData

    from hf_captionrl.hub.cards import render_template
    from hf_captionrl.hub.push import check_card, check_text

    manifest = found.manifest
    card = manifest["card"]
    for name, value in card.items():
        check_text(name, value)
    data = DatasetCardData(
        language=card["language"],
        license=card["license"],
        task_categories=["image-to-text"],
        pretty_name=card["dataset_id"].rpartition("/")[2],
        tags=["image-captioning", "hf_captionrl", "truematch"],
        configs=[
            {"config_name": "default", "data_files": [{"split": "test", "path": f"{DATA_FOLDER}/*.parquet"}]},
        ],
    )
    text = render_template(
        "truematch.md",
        metadata=data.to_yaml(),
        card=card,
        manifest=manifest,
        status=found.status(),
        checked=_checked(found),
        files={"bags": BAGS_FILE, "kept": KEPT_FILE},
    )
    check_card(text)
    return text


def write_truematch_card(found: TrueMatch) -> Path:
    """Render the card and write it as the folder's `README.md`, atomically."""
    from hf_captionrl.utils.io import atomic_write_text

    return atomic_write_text(found.folder / "README.md", render_truematch_card(found))


def rewrite_truematch_card(folder: Path, changes: Mapping[str, str]) -> Path:
    """Render the card of a benchmark again with changed facts, which its manifest keeps."""
    from hf_captionrl.utils.io import write_json

    found = load_truematch(folder)
    found.manifest["card"].update(changes)
    written = write_truematch_card(found)  # refuses what must not be published before the manifest keeps it
    write_json(folder / MANIFEST_FILE, found.manifest)
    return written


# --- `captionrl truematch build`: find bags with Algorithms 1 and 2, and write the benchmark -------------------------

_CURATED = (
    "candidates by nearest neighbours, then the most similar disjoint ones (No Detail Left Behind, Algorithms 1 and 2)"
)
_PUBLISHED = "the paper's release, by COCO id; similarity measured here"


def _check(arguments: BuildOptions) -> list[int]:
    """Check the options before anything slow; returns the sizes."""
    if arguments.output.exists() and not arguments.output.is_dir():
        raise ValueError(f"--output {str(arguments.output)!r} is a file. Name a folder.")
    if arguments.seed < 0:
        raise ValueError(f"--seed is {arguments.seed}, but must be at least 0.")
    sizes = sorted(set(arguments.bag_sizes))
    if sizes[0] < 2:
        raise ValueError(f"--bag_sizes {sizes[0]}: a bag needs at least 2 images.")
    return sizes


def _mine(
    arguments: BuildOptions, sizes: list[int], ids: list[str], features: torch.Tensor, signature: str
) -> BagFile:
    """Bags of all sizes, most similar first within a size."""
    from hf_captionrl.data.benchmarks import load_published_bags, match_coco_ids
    from hf_captionrl.retrieval import BagFile
    from hf_captionrl.retrieval.bags import bag_similarities, candidate_bags, curate_bags

    published = None
    if arguments.published_bags is not None:
        published = match_coco_ids(load_published_bags(arguments.published_bags, sizes), ids)
    row = {image_id: number for number, image_id in enumerate(ids)}
    bags: list[list[str]] = []
    scores: list[float] = []
    for size in sizes:
        if published is None:
            rows, score = curate_bags(*candidate_bags(features, size, device=arguments.device))
            found = [[ids[i] for i in bag] for bag in rows.tolist()]
        else:
            found = published[size]
            score = bag_similarities(features, [[row[i] for i in bag] for bag in found])
        bags += found
        scores += score.tolist()
    return BagFile(bags, scores, signature, arguments.features, "truematch")


def _refuse_other(output: Path, settings: dict[str, Any]) -> None:
    """Refuse to change a benchmark that was built with other settings."""
    if not (output / MANIFEST_FILE).is_file():
        return
    before = load_truematch(output)
    for name, value in settings.items():
        if before.manifest.get(name) != value:
            raise ValueError(
                f"{output} holds a benchmark that was built with {name} {before.manifest.get(name)!r}, not {value!r}. Use "
                "--overwrite, which keeps decisions on unchanged bags, or another --output."
            )


def print_status(found: TrueMatch) -> None:
    """Print how many bags of each size are kept, dropped and undecided."""
    for size, counts in found.status().items():
        print(
            f"  {counts['bags']} bags of {size}: {counts['kept']} kept, {counts['dropped']} dropped, "
            f"{counts['undecided']} undecided"
        )
    if found.foreign:
        print(f"  {found.foreign} lines of decisions.jsonl are about bags of other benchmarks and are ignored")


def build(arguments: BuildOptions) -> None:
    """Build the benchmark, or resume an interrupted build."""
    sizes = _check(arguments)

    from hf_captionrl.evaluation.similarity import features_of, similarity_scorer
    from hf_captionrl.hub import public_values
    from hf_captionrl.metrics.table import installed_versions

    output: Path = arguments.output
    dataset = load_split(
        arguments,
        quarantine_path=output / "quarantine.jsonl",
        require_captions=arguments.features == "multimodal",
    ).dataset
    ids = [str(i) for i in dataset["image_id"][:]]
    if len(ids) < sizes[-1]:
        raise ValueError(f"the split has {len(ids)} images, but a bag needs {sizes[-1]}. Lower --bag_sizes.")
    scorer = similarity_scorer(arguments)
    settings = {
        "source": public_values(arguments.dataset),
        "split": arguments.split,
        "images": len(ids),
        "embed_images": not arguments.no_images,
        "sizes": sizes,
        "method": _CURATED if arguments.published_bags is None else _PUBLISHED,
        "features": arguments.features,
        "scorer": scorer.signature,
        "seed": arguments.seed,
    }
    card = {
        "dataset_id": arguments.repo_id or output.resolve().name,
        "license": arguments.license,
        "source_license": arguments.source_license_of(arguments.dataset),
        "language": arguments.language,
    }
    if not arguments.overwrite:
        _refuse_other(output, settings)
    # The folder counts as unfinished until the manifest is written again.
    (output / MANIFEST_FILE).unlink(missing_ok=True)
    write_data(output, dataset, embed_images=not arguments.no_images)
    features = features_of(arguments, dataset, scorer, arguments.features)
    bags = _mine(arguments, sizes, ids, features, scorer.signature)
    manifest = {
        "format": 1,
        **settings,
        "has_facts": "facts" in dataset.column_names,
        "card": card,
        "versions": installed_versions(),
    }
    found = write_truematch(output, bags, manifest)
    write_truematch_card(found)
    if arguments.json:
        print(
            json.dumps(
                {
                    "output": str(output),
                    **settings,
                    "bags": found.status(),
                    "fingerprint": bags_fingerprint(found.kept),
                }
            )
        )
        return
    print(f"{output}: {len(ids)} images in {DATA_FOLDER}/, {arguments.features} features of {scorer.signature}")
    print_status(found)
