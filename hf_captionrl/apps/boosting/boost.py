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

from hf_captionrl.apps.boosting.backends import choose_backend
from hf_captionrl.apps.boosting.conflicts import scene_conflicts, source_statistics
from hf_captionrl.apps.boosting.prompts import STAGES, blend_prompt, holistic_prompt, read_answer, visual_prompt
from hf_captionrl.data.columns import CAPTIONS, undecoded
from hf_captionrl.data.images import ImageError, image_bytes, open_image
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.plots import write_length_histogram
from hf_captionrl.metrics.words import length_statistics
from hf_captionrl.utils.io import atomic_file, atomic_write_text, write_json, write_jsonl
from hf_captionrl.utils.model_files import model_path, read_object
from hf_captionrl.utils.prompts import Backend, Failure, KeptAnswers, Prompt

if TYPE_CHECKING:
    from hf_captionrl.apps.boosting.options import BoostOptions

CAPTIONS_FILE = "captions.parquet"
SKIPPED_FILE = "skipped.jsonl"
BOOSTED_FILE = "boosting.json"
"""Manifest: settings and the facts of the card; published with the captions."""

_ROWS_AT_ONCE = 64  # rows whose prompts form a batch and whose images are in memory
_STRING = datasets.Value("string")
_TEXTS: dict[str, Any] = dict.fromkeys(("references", "captions", "conflicts"), CAPTIONS)
_TEXTS |= {f"{stage}_caption": _STRING for stage in STAGES}

# --- Visual Caption Boosting: ask, check, ask again ------------------------------------------------------------------


@dataclasses.dataclass
class _Row:
    """One image with its answers so far."""

    number: int  # its row in the data set
    image_id: str
    references: Sequence[str]
    image: Any = None
    texts: dict[str, str] = dataclasses.field(default_factory=dict)  # by stage
    fault: dict[str, str] | None = None  # stage, reason and detail, if it cannot be finished

    def prompt(self, stage: str, attempt: int) -> Prompt:
        if stage == "blend":
            prompt = blend_prompt(self.image_id, self.references)
        elif stage == "visual":
            prompt = visual_prompt(self.image_id, self.image)
        else:
            prompt = holistic_prompt(self.image_id, self.texts["blend"], self.texts["visual"])
        return dataclasses.replace(prompt, attempt=attempt)


def _ask(rows: Sequence[_Row], stage: str, backend: Backend, attempts: int) -> None:
    """Ask for one stage of some rows; each row gets an answer or a fault. Later attempts ask again for bad answers."""
    pending = [row for row in rows if row.fault is None]
    for attempt in range(attempts):
        prompts = [row.prompt(stage, attempt) for row in pending]
        answers = dict(backend.complete(prompts))
        bad = []
        for position, (row, prompt) in enumerate(zip(pending, prompts, strict=True)):
            answer = answers[position]
            if isinstance(answer, Failure):
                row.fault = {"stage": stage, "reason": answer.reason, "detail": answer.detail}
                continue
            row.texts[stage], fault = read_answer(answer, prompt)
            row.fault = fault and {"stage": stage, "reason": fault[0], "detail": fault[1]}
            if fault is not None:
                bad.append(row)
        pending = bad


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

    Each answer is appended to the journals in `folder`, so that none is asked twice. Images are opened before any question, so that a
    broken one costs no request. Later attempts are sampled. `exact_facts`: find conflicts with the column `facts` of embedded scenes.
    """
    if not vision.is_multimodal:
        raise ValueError(f"The vision backend {vision.model!r} does not see images. Use one that does.")
    folder, images = Path(folder), undecoded(dataset)
    with (
        KeptAnswers(text, folder / "journal-text.jsonl") as writer,
        KeptAnswers(vision, folder / "journal-vision.jsonl") as describer,
    ):
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            part = list(images.select(range(start, min(start + _ROWS_AT_ONCE, len(dataset)))))
            rows = [_Row(start + at, str(row["image_id"]), row["captions"]) for at, row in enumerate(part)]
            for row, source in zip(rows, part, strict=True):
                try:
                    row.image = open_image(source["image"])
                except ImageError as error:
                    row.fault = {"stage": "visual", "reason": error.reason, "detail": error.detail}
            for stage, backend in zip(STAGES, (writer, describer, writer), strict=True):
                _ask(rows, stage, backend, attempts)
            for row, source in zip(rows, part, strict=True):
                columns: dict[str, Any] = {"row": row.number, "image_id": row.image_id, "skipped": row.fault}
                if row.fault is None:
                    blend, holistic = row.texts["blend"], row.texts["holistic"]
                    conflicts = scene_conflicts(blend, holistic, source["facts"]) if exact_facts else None
                    columns |= {"references": row.references, "captions": [holistic]}
                    columns["conflicts"] = None if conflicts is None else [*map(str, conflicts)]
                    columns |= {f"{stage}_caption": row.texts[stage] for stage in STAGES}
                yield columns


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


def write_boosted(
    arguments: BoostOptions, columns: Sequence[str], counts: Mapping[str, int], backends: Mapping[str, Backend]
) -> Path:
    """Write `boosting.json` and the card beside the captions, which have these columns."""
    from hf_captionrl.hub import public_values
    from hf_captionrl.hub.push import public_versions

    embedded = arguments.dataset == "scenes"
    # The name of the folder, as the Hub accepts it.
    name = re.sub(r"[^A-Za-z0-9_]+", "-", arguments.output.resolve().name).strip("-_")[:96] or "boosted"
    models = {
        f"{title} model": f"{public_values(backends[role].model)}, revision {backends[role].revision or 'not named'}"
        for title, role in (("language", "text"), ("vision", "vision"))
    }
    card = {
        "dataset_id": arguments.repo_id or name,
        "file": CAPTIONS_FILE,
        "source": "hf_captionrl scenes" if embedded else public_values(arguments.dataset),
        "source_license": arguments.source_license_of(arguments.dataset),
        "split": arguments.split,
        "made_with": {**models, "seed": arguments.seed},
        "columns": columns,
        "license": arguments.license,
        "language": arguments.language,
    }
    return _write_card(arguments.output, {"format": 2, **counts, "card": card, "versions": public_versions()})


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
    card = render_card("dataset.md", data, facts=facts, counts=manifest)  # refuses what must not be published
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
    choices = {role: choose_backend(arguments, role, dataset) for role in ("text", "vision")}
    backends = {role: load() for role, load in choices.items()}
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
        print(f"{folder / CAPTIONS_FILE}: captions: {counts['rows']}, skipped rows: {counts['skipped']}.")
