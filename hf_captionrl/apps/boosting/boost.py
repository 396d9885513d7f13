"""`captionrl boost`: blend references, describe images, combine both; resumable.

Source: Gaur et al. 2024, "No Detail Left Behind", section 2. BlendCap and VisualCap are independent; the HolisticCap needs both.
Every answer is appended to a journal when it arrives, and the files of captions are renamed into place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from huggingface_hub import DatasetCardData

from hf_captionrl.apps.boosting.backends import check_backend, load_backend
from hf_captionrl.apps.boosting.conflicts import scene_conflicts, source_statistics
from hf_captionrl.apps.boosting.prompts import (
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
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.plots import write_length_histogram
from hf_captionrl.metrics.words import length_statistics
from hf_captionrl.utils.io import atomic_file, atomic_write_text, write_json, write_jsonl
from hf_captionrl.utils.model_files import model_path, read_object
from hf_captionrl.utils.prompts import Backend, Failure, KeptAnswers, Prompt, Truncated

if TYPE_CHECKING:
    from hf_captionrl.apps.boosting.options import BoostOptions

CAPTIONS_FILE = "captions.parquet"
SKIPPED_FILE = "skipped.jsonl"
BOOSTED_FILE = "boosting.json"
"""Manifest: settings and the facts of the card; published with the captions."""

_ROWS_AT_ONCE = 64  # rows whose prompts form a batch and whose images are in memory
_STRING = datasets.Value("string")
_SOURCE = {"model": _STRING, "revision": _STRING, "prompt_hash": _STRING, "attempt": datasets.Value("int32")}
_TEXTS: dict[str, Any] = dict.fromkeys(("references", "captions", "conflicts"), CAPTIONS)
for _stage in STAGES:
    _TEXTS |= {f"{_stage}_caption": _STRING, f"{_stage}_source": _SOURCE}

# --- Visual Caption Boosting: ask, check, ask again ------------------------------------------------------------------


@dataclasses.dataclass
class _Row:
    """One image with its answers so far."""

    number: int  # its row in the data set
    image_id: str
    references: Sequence[str]
    image: Any = None
    texts: dict[str, str] = dataclasses.field(default_factory=dict)  # by stage
    sources: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    fault: dict[str, str] | None = None  # stage, reason and detail, if it cannot be finished

    def prompt(self, stage: str, attempt: int) -> Prompt:
        if stage == "blend":
            prompt = blend_prompt(self.image_id, self.references)
        elif stage == "visual":
            prompt = visual_prompt(self.image_id, self.image)
        else:
            prompt = holistic_prompt(self.image_id, self.texts["blend"], self.texts["visual"])
        return dataclasses.replace(prompt, attempt=attempt)

    def finished(self, facts: Any) -> dict[str, Any]:
        """The row of the file, with conflicts if the facts of its scene are given; or why it is skipped."""
        columns: dict[str, Any] = {"row": self.number, "image_id": self.image_id, "skipped": self.fault}
        if self.fault is None:
            blend, holistic = self.texts["blend"], self.texts["holistic"]
            columns |= {"references": list(self.references), "captions": [holistic], "conflicts": None}
            if facts is not None:
                columns["conflicts"] = [*map(str, scene_conflicts(blend, holistic, facts))]
            for stage in STAGES:
                columns |= {f"{stage}_caption": self.texts[stage], f"{stage}_source": self.sources[stage]}
        return columns


def _ask(rows: Sequence[_Row], stage: str, backend: Backend, attempts: int) -> None:
    """Ask for one stage of some rows; each row gets an answer or a fault. Later attempts ask again for bad answers."""
    # Without the folders of this machine, because the file may be published.
    model = os.path.basename(backend.model.rstrip("/")) if os.path.isabs(backend.model) else backend.model
    pending = [row for row in rows if row.fault is None]
    for attempt in range(attempts):
        prompts = [row.prompt(stage, attempt) for row in pending]
        again: dict[int, _Row] = {}
        for position, answer in backend.complete(prompts):
            row, prompt = pending[position], prompts[position]
            if isinstance(answer, Failure):
                row.fault = {"stage": stage, "reason": answer.reason, "detail": answer.detail}
                continue
            written = answer.text if isinstance(answer, Truncated) else answer
            text = clean_answer(written)
            fault = answer_fault(text, prompt)
            if fault is None and isinstance(answer, Truncated) and is_truncated(written):
                fault = "answer_truncated", f"the answer stops at the length limit: {'...' + text[-60:]!r}"
            if fault is None:
                row.texts[stage] = text
                source = {"model": model, "revision": backend.revision, "prompt_hash": prompt.hash}
                row.sources[stage] = source | {"attempt": attempt}
            elif attempt + 1 < attempts:
                again[position] = row
            else:
                row.fault = {"stage": stage, "reason": fault[0], "detail": fault[1]}
        pending = [again[position] for position in sorted(again)]


def boost_rows(
    dataset: datasets.Dataset,
    folder: str | Path,
    *,
    text: Backend,
    vision: Backend,
    attempts: int = 3,
    exact_facts: bool = False,
) -> Iterator[dict[str, Any]]:
    """The finished rows in their order, with the columns of `captions.parquet`, or with the reason in `skipped`.

    Each answer is appended to the journals in `folder`, so that none is asked twice. Images are opened before any question, so
    that a broken one costs no request. Later attempts are sampled. `exact_facts`: find conflicts with the column `facts` of
    embedded scenes.
    """
    if not vision.is_multimodal:
        raise ValueError(f"The vision backend {vision.model!r} does not see images. Use one that does.")
    folder, images = Path(folder), undecoded(dataset)
    with (
        KeptAnswers(text, folder / "journal-text.jsonl") as writer,
        KeptAnswers(vision, folder / "journal-vision.jsonl") as describer,
    ):
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            part = images.select(range(start, min(start + _ROWS_AT_ONCE, len(dataset))))
            rows = [
                _Row(start + at, str(image_id), references)
                for at, (image_id, references) in enumerate(zip(part["image_id"][:], part["captions"][:], strict=True))
            ]
            for at, row in enumerate(rows):
                try:
                    row.image = open_image(part[at]["image"])
                except ImageError as error:
                    row.fault = {"stage": "visual", "reason": error.reason, "detail": error.detail}
            for stage, backend in zip(STAGES, (writer, describer, writer), strict=True):
                _ask(rows, stage, backend, attempts)
            for at, row in enumerate(rows):
                yield row.finished(part[at]["facts"] if exact_facts else None)


# --- The files: captions, skipped rows, statistics, card -------------------------------------------------------------


def write_captions(
    dataset: datasets.Dataset, folder: Path, rows: Sequence[Mapping[str, Any]], *, images: bool, embed: bool
) -> None:
    """Write the columns of the data set and those of the finished rows to `captions.parquet`.

    Without `images`, only captions and ids are published; `embed` stores images in the file, not their paths.
    """

    def stored(row: dict[str, Any]) -> dict[str, Any]:
        value = row["image"]
        is_bytes = embed or value["bytes"] is not None
        return {"image": image_bytes(value) if is_bytes else {"bytes": None, "path": os.path.abspath(value["path"])}}

    source = undecoded(dataset).select([row["row"] for row in rows])
    source = source.remove_columns([name for name in source.column_names if name in _TEXTS])
    if images:
        source = source.map(stored).cast_column("image", datasets.Image())
    elif "image" in source.column_names:
        source = source.remove_columns("image")
    columns = {name: [row[name] for row in rows] for name in _TEXTS}
    texts = datasets.Dataset.from_dict(columns, features=datasets.Features(_TEXTS))
    with atomic_file(folder / CAPTIONS_FILE) as file:
        datasets.concatenate_datasets([source, texts], axis=1).to_parquet(file)


def write_statistics(folder: Path, rows: Sequence[Mapping[str, Any]], tokenizer: str | None) -> dict[str, Any]:
    """Write Table 9 (statistics.json) and Figure 4 (lengths.png) beside the captions."""
    sources = {"references": [text for row in rows for text in row["references"]]}
    sources |= {f"{stage.capitalize()}Cap": [row[f"{stage}_caption"] for row in rows] for stage in STAGES}
    count = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(model_path(tokenizer), trust_remote_code=False)
        count = lambda texts: [len(ids) for ids in loaded(texts)["input_ids"]]  # noqa: E731
    statistics = source_statistics(sources, count_tokens=count)
    write_json(folder / "statistics.json", statistics)
    words = {name: length_statistics(texts)["words"] for name, texts in sources.items()}
    write_length_histogram(folder / "lengths.png", words)
    return statistics


_COLUMNS = {
    "image": "the image",
    "image_id": "its id in the source",
    "captions": "only the HolisticCap, for training",
    "references": "the human captions",
    "blend_caption": "BlendCap: the references, blended by the language model",
    "visual_caption": "VisualCap: description by the vision model",
    "holistic_caption": "HolisticCap: the BlendCap with the additional details of the VisualCap",
    "conflicts": "on embedded scenes, contradictions between HolisticCap and BlendCap",
    "blend_source": "model, revision, prompt hash and attempt of the BlendCap",
    "visual_source": "the same for the VisualCap",
    "holistic_source": "the same for the HolisticCap",
}


def write_boosted(
    arguments: BoostOptions, columns: Sequence[str], counts: Mapping[str, int], backends: Mapping[str, Backend]
) -> Path:
    """Write `boosting.json` and the card beside the captions, which have these columns."""
    from hf_captionrl.hub import public_values
    from hf_captionrl.hub.push import public_versions

    folder, embedded = arguments.output, arguments.dataset == "scenes"
    source = "hf_captionrl scenes" if embedded else str(public_values(arguments.dataset))
    split = "all splits" if arguments.split == "all" else f"the {arguments.split} split"
    models = {
        title: f"{public_values(backends[role].model)}, revision {backends[role].revision or 'not named'}"
        for title, role in (("language model", "text"), ("vision model", "vision"))
    }
    # The name of the folder, as the Hub accepts it.
    name = re.sub(r"[^A-Za-z0-9_]+", "-", folder.resolve().name).strip("-_")[:96] or "boosted"
    rows = counts["rows"]
    checked = f"{counts['skipped']} rows were left out as unusable. No one has read the captions."
    if embedded:
        checked = f"{counts['conflicts']} of {rows} HolisticCaps contradict their BlendCap; {checked}"
    method = "Visual Caption Boosting (No Detail Left Behind, section 2), prompts of its Appendix A.1"
    card = {
        "dataset_id": arguments.repo_id or name,
        "file": CAPTIONS_FILE,
        "source": source,
        "source_license": arguments.source_license_of(arguments.dataset),
        "description": f"Richer captions of {rows} images, {split} of {source}.",
        "made_with": {**models, "method": method, "seed": arguments.seed},
        "columns": {name: _COLUMNS.get(name, "as in the source") for name in columns},
        "sizes": {str(arguments.split): rows},
        "license": arguments.license,
        "checked": checked,
        "language": arguments.language,
        # Paths of image files cannot be published: a push requires --embed_images or --no_images.
        "has_images": "image" in columns,
    }
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
    return _write_card(folder, {**manifest, "card": {**manifest["card"], **changes}})


def boost(arguments: BoostOptions) -> None:
    """Run `captionrl boost`."""
    if arguments.embed_images and arguments.no_images:
        raise ValueError("--embed_images stores the images and --no_images leaves them out. Use one of them.")
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_split(arguments, quarantine_path=folder / "quarantine.jsonl")
    dataset = loaded.dataset
    for role in ("text", "vision"):
        check_backend(arguments, role, dataset)  # before a model is loaded
    backends: dict[str, Any] = {role: load_backend(arguments, role, dataset) for role in ("text", "vision")}
    exact = arguments.dataset == "scenes"
    rows = list(boost_rows(dataset, folder, **backends, attempts=arguments.attempts, exact_facts=exact))
    done = [row for row in rows if row["skipped"] is None]
    skipped = [{"row": row["row"], "image_id": row["image_id"], **row["skipped"]} for row in rows if row["skipped"]]
    write_jsonl(folder / SKIPPED_FILE, skipped)
    if not done:  # an old file of captions stays
        raise ValueError(f"All {len(rows)} rows were skipped. Read the reasons in {folder / SKIPPED_FILE}.")
    write_captions(dataset, folder, done, images=not arguments.no_images, embed=arguments.embed_images)
    left_out = {*_TEXTS, *(["image"] if arguments.no_images else [])}
    columns = [name for name in dataset.column_names if name not in left_out]
    counts = {"rows": len(done), "skipped": len(skipped), "conflicts": sum(bool(row["conflicts"]) for row in done)}
    tokenizer = arguments.tokenizer or ("scenes:siglip-held-out" if exact else None)
    summary: dict[str, Any] = {"output": str(folder), "path": str(folder / CAPTIONS_FILE), **counts}
    summary["statistics"] = write_statistics(folder, done, tokenizer)
    summary["card"] = str(write_boosted(arguments, [*columns, *_TEXTS], counts, backends))
    if arguments.json:
        print(json.dumps(summary))
    else:
        print(f"{folder / CAPTIONS_FILE}: {counts['rows']} captions, {counts['skipped']} rows skipped.")
