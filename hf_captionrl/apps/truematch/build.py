"""`captionrl truematch build`: find bags with Algorithms 1 and 2, and write the benchmark."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets

from hf_captionrl.data.columns import concept_column, parse_json, replace_column, undecoded
from hf_captionrl.data.images import image_bytes
from hf_captionrl.data.options import load_split
from hf_captionrl.retrieval.bags import BagFile, bag_similarities, candidate_bags, curate_bags, load_bags, save_bags
from hf_captionrl.utils.io import atomic_file, atomic_write_text, counted, read_jsonl, write_json, write_jsonl
from hf_captionrl.utils.parts import refuse_other_settings

if TYPE_CHECKING:
    from hf_captionrl.apps.truematch.options import BuildOptions


# --- Decisions of the review: keep or drop a bag, one line per decision ----------------------------------------------
# The last line about a bag counts; a null decision undoes the previous ones.

REASONS: dict[str, str] = {
    "duplicates": "The same image, or no difference that can be named",
    "too_easy": "Any caption distinguishes them",
    "text_or_names": "Only written text or a name differs",
    "bad_image": "A broken or unfit image",
    "other": "Another reason",
}
"""Reasons to drop a bag, in the order of the keys 1 to 5."""


def bag_id(image_ids: Sequence[str]) -> str:
    """Id of a bag: a hash of its images, so that a rebuilt benchmark keeps its decisions."""
    names = json.dumps([str(image_id) for image_id in image_ids])
    return f"{len(image_ids)}-{hashlib.sha256(names.encode('ascii')).hexdigest()[:12]}"


def read_decisions(path: str | os.PathLike[str]) -> dict[str, dict[str, str | None]]:
    """`decision`, `reason` and `time` of the last line about each bag, by its id; an undone decision is None."""
    decisions: dict[str, dict[str, str | None]] = {}
    for number, row in read_jsonl(path):
        line = {"decision": None, "reason": None, "time": None} | row
        bag = line.pop("bag", None)
        allowed = (None, *REASONS) if line["decision"] == "drop" else (None,)
        is_line = isinstance(bag, str) and bag and len(line) == 3 and line["decision"] in ("keep", "drop", None)
        if not is_line or line["reason"] not in allowed:
            raise ValueError(
                f'{path}, line {number}, is not a decision. Use {{"bag": "...", "decision": "keep", "drop" or null, "reason": null '
                f"or, of dropped bags, one of {', '.join(REASONS)}}}."
            )
        decisions[bag] = line
    return decisions


# --- The folder of a benchmark: bags, their images and captions, and the decisions of the review ---------------------
# bags.json          all bags, most similar first (`retrieval.bag_files`)
# kept.json          the same without the bags that were dropped
# decisions.jsonl    keep or drop, one line per decision
# data/*.parquet     image_id, captions, and optionally image and facts; rows that are in no bag are distractors
# truematch.json     settings of the build; written last, so a folder without it is unfinished

BAGS_FILE, KEPT_FILE, DECISIONS_FILE = "bags.json", "kept.json", "decisions.jsonl"
DATA_FOLDER, MANIFEST_FILE = "data", "truematch.json"

_ROWS_PER_FILE = 1000  # images per Parquet file: about 150 MB of COCO
_COLUMNS = ("image", "image_id", "captions", "facts")


@dataclass(frozen=True)
class TrueMatch:
    """A finished benchmark."""

    folder: Path
    manifest: Mapping[str, Any]  # settings of the build, from `truematch.json`
    bags: BagFile  # all bags, also those that were dropped
    decisions: Mapping[str, Mapping[str, str | None]]  # by bag, perhaps also on bags of an earlier build

    @property
    def images(self) -> str:
        """Folder of the images, for `load_captions`."""
        if not self.manifest.get("embed_images"):
            raise ValueError(f"{self.folder} has no images. Use --dataset {self.manifest['source']}, as in the build.")
        return str((self.folder / DATA_FOLDER).resolve())

    def decision(self, bag: Sequence[str]) -> str:
        """ "kept", "dropped" or "undecided"."""
        line = self.decisions.get(bag_id(bag), {"decision": None})
        return {"keep": "kept", "drop": "dropped"}.get(str(line["decision"]), "undecided")

    @property
    def kept(self) -> BagFile:
        """The bags without those that are dropped; undecided bags stay."""
        rows = [row for row, bag in enumerate(self.bags.bags) if self.decision(bag) != "dropped"]
        if not rows:
            raise ValueError(f"All {len(self.bags.bags)} bags are dropped, so the benchmark is empty. Keep one.")
        similarities = [self.bags.similarities[row] for row in rows]
        return replace(self.bags, bags=[self.bags.bags[row] for row in rows], similarities=similarities)

    def status(self) -> dict[str, dict[str, int]]:
        """Numbers of kept, dropped and undecided bags, by bag size."""
        status: dict[str, dict[str, int]] = {}
        for bag in self.bags.bags:
            counts = status.setdefault(str(len(bag)), {"bags": 0, "kept": 0, "dropped": 0, "undecided": 0})
            counts["bags"] += 1
            counts[self.decision(bag)] += 1
        return status


def bags_fingerprint(bags: BagFile) -> str:
    """Hash of the bags in any order; only results with equal fingerprints can be compared."""
    names = "\n".join(sorted(bag_id(bag) for bag in bags.bags))
    return hashlib.sha256(names.encode("ascii")).hexdigest()[:16]


def write_data(folder: str | Path, dataset: datasets.Dataset, *, embed_images: bool = True) -> list[Path]:
    """Write the images and captions, 1,000 per file."""
    columns = [c for c in _COLUMNS if c in dataset.column_names and (embed_images or c != "image")]
    table = undecoded(dataset.select_columns(columns))
    data = Path(folder) / DATA_FOLDER
    number = -(-len(table) // _ROWS_PER_FILE)
    paths = [data / f"test-{i:05d}-of-{number:05d}.parquet" for i in range(number)]
    for path in set(data.glob("*.parquet")) - set(paths):
        path.unlink()
    for i, path in enumerate(paths):
        part = table.select(range(i * _ROWS_PER_FILE, min((i + 1) * _ROWS_PER_FILE, len(table))))
        if "image" in columns:
            part = replace_column(part, "image", [image_bytes(v) for v in part["image"]], datasets.Image())
        with atomic_file(path) as file:
            part.to_parquet(file)
    return paths


def write_truematch(folder: Path, bags: BagFile, manifest: Mapping[str, Any]) -> TrueMatch:
    """Finish a benchmark whose data are written. Existing decisions stay."""
    save_bags(folder / BAGS_FILE, bags)
    (folder / DECISIONS_FILE).touch()
    write_json(folder / MANIFEST_FILE, manifest)
    benchmark = load_truematch(folder)
    save_bags(folder / KEPT_FILE, benchmark.kept)
    return benchmark


def load_truematch(folder: str | Path) -> TrueMatch:
    """Read a benchmark."""
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no {MANIFEST_FILE}. A build is finished by the same command.")
    manifest = parse_json(path.read_text(encoding="utf-8"), str(path))
    return TrueMatch(folder, manifest, load_bags(folder / BAGS_FILE), read_decisions(folder / DECISIONS_FILE))


def apply_decisions(folder: Path, decisions: Path | None = None) -> tuple[TrueMatch, int]:
    """Add decisions from a file, such as the download of the review page, and write `kept.json` again.

    Existing decisions are not added again, so a file can be applied twice.
    """
    benchmark = load_truematch(folder)
    lines = {} if decisions is None else read_decisions(decisions)
    new = {bag: line for bag, line in lines.items() if benchmark.decisions.get(bag) != line}
    if foreign := new.keys() - set(map(bag_id, benchmark.bags.bags)):
        raise ValueError(f"{decisions} decides about {min(foreign)!r}, which is not in {folder}. Use another file.")
    benchmark = replace(benchmark, decisions={**benchmark.decisions, **new})
    remaining = benchmark.kept  # fails before anything is written if all bags are dropped
    write_jsonl(folder / DECISIONS_FILE, ({"bag": bag, **line} for bag, line in benchmark.decisions.items()))
    save_bags(folder / KEPT_FILE, remaining)
    return benchmark, len(new)


def write_truematch_card(benchmark: TrueMatch) -> Path:
    """Render the card of a benchmark as the folder's `README.md`."""
    from huggingface_hub import DatasetCardData

    from hf_captionrl.hub.cards import render_card

    manifest = benchmark.manifest
    card = manifest["card"]
    counts = benchmark.status().values()
    total, undecided = sum(c["bags"] for c in counts), sum(c["undecided"] for c in counts)
    if undecided == total:
        checked = "No one has reviewed the bags yet: some may contain one image twice, or images that any caption distinguishes."
    else:
        checked = "All bags were reviewed" if not undecided else f"{total - undecided} of {total} bags were reviewed"
        checked += f"; dropped: {sum(c['dropped'] for c in counts)}. The reasons are in decisions.jsonl."
    data = DatasetCardData(
        language=card["language"],
        license=card["license"],
        task_categories=["image-to-text"],
        pretty_name=card["dataset_id"].rpartition("/")[2],
        tags=["image-captioning", "hf_captionrl", "truematch"],
        configs=[{"config_name": "default", "data_files": [{"split": "test", "path": f"{DATA_FOLDER}/*.parquet"}]}],
    )
    values = {"card": card, "manifest": manifest, "status": benchmark.status(), "checked": checked}
    files = {"bags": BAGS_FILE, "kept": KEPT_FILE}
    text = render_card("truematch.md", data, files=files, **values)
    return atomic_write_text(benchmark.folder / "README.md", text)


def rewrite_truematch_card(folder: Path, changes: Mapping[str, str]) -> Path:
    """Render the card of a benchmark again with changed facts, which its manifest keeps."""
    benchmark = load_truematch(folder)
    benchmark.manifest["card"].update(changes)
    written = write_truematch_card(benchmark)  # refuses what must not be published before the manifest keeps it
    write_json(folder / MANIFEST_FILE, benchmark.manifest)
    return written


def print_status(benchmark: TrueMatch) -> None:
    """Print how many bags of each size are kept, dropped and undecided."""
    for size, counts in benchmark.status().items():
        print(
            f"  {counted(counts['bags'], 'bag')} of {size}: {counts['kept']} kept, {counts['dropped']} dropped, "
            f"{counts['undecided']} undecided"
        )


def build(arguments: BuildOptions) -> None:
    """Build the benchmark, or resume an interrupted build."""
    from hf_captionrl.data.benchmarks import load_published_bags, match_coco_ids
    from hf_captionrl.evaluation.similarity import features_of, similarity_scorer
    from hf_captionrl.hub import public_values
    from hf_captionrl.utils.io import installed_versions

    sizes, output = sorted(set(arguments.bag_sizes)), arguments.output
    dataset = load_split(
        arguments, quarantine_path=output / "quarantine.jsonl", require_captions=arguments.features != "image"
    ).dataset
    ids = [str(i) for i in dataset["image_id"][:]]
    if len(ids) < sizes[-1]:
        raise ValueError(f"the split has {len(ids)} images, but a bag needs {sizes[-1]}. Lower --bag_sizes.")
    scorer = similarity_scorer(arguments)
    method = "candidates by nearest neighbours, then the most similar disjoint ones "
    method += "(No Detail Left Behind, Algorithms 1 and 2)"
    if arguments.published_bags is not None:
        method = "the paper's release, by COCO id; similarity measured here"
    settings = {
        "source": public_values(arguments.dataset),
        "split": arguments.split,
        "images": len(ids),
        "embed_images": not arguments.no_images,
        "sizes": sizes,
        "method": method,
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
    if not arguments.overwrite and (output / MANIFEST_FILE).is_file():
        before = load_truematch(output).manifest
        remedy = "Use --overwrite, which keeps decisions on unchanged bags, or another --output."
        refuse_other_settings({name: before.get(name) for name in settings}, settings, remedy)
    # The folder counts as unfinished until the manifest is written again.
    (output / MANIFEST_FILE).unlink(missing_ok=True)
    write_data(output, dataset, embed_images=not arguments.no_images)
    features = features_of(arguments, dataset, scorer)
    published = None
    if arguments.published_bags is not None:
        published = match_coco_ids(load_published_bags(arguments.published_bags, sizes), ids)
    row = {image_id: number for number, image_id in enumerate(ids)}
    bags, scores = [], []
    for size in sizes:  # most similar first within a size
        if published is None:
            candidates = candidate_bags(features, size, device=arguments.device, concepts=concept_column(dataset))
            rows, score = curate_bags(*candidates)
            bags += [[ids[i] for i in bag] for bag in rows.tolist()]
        else:
            score = bag_similarities(features, [[row[i] for i in bag] for bag in published[size]])
            bags += published[size]
        scores += score.tolist()
    manifest = {"format": 1, **settings, "has_facts": "facts" in dataset.column_names, "card": card}
    manifest["versions"] = installed_versions()
    mined = BagFile(bags, scores, scorer.signature, arguments.features, "truematch")
    benchmark = write_truematch(output, mined, manifest)
    write_truematch_card(benchmark)
    if arguments.json:
        facts = {"bags": benchmark.status(), "fingerprint": bags_fingerprint(benchmark.kept)}
        print(json.dumps({"output": str(output), **settings, **facts}))
        return
    print(f"{output}: {len(ids)} images, {arguments.features} features of {scorer.signature.partition('|')[0]}")
    print_status(benchmark)
