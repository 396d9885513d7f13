"""Cards of models and data sets, from the templates of `hub_cards/`, and the pushes that write one first."""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import DatasetCardData, EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from hf_captionrl.hub.push import (
    HUB_NAME,
    MANIFEST_FILE,
    PROCESSORS,
    check_card,
    check_name,
    check_text,
    local_base_model,
    public_values,
    public_versions,
    push_folder,
    write_manifest,
)
from hf_captionrl.metrics.columns import COLUMNS, Column
from hf_captionrl.metrics.table import check_rows, format_cell, results_markdown
from hf_captionrl.utils.io import atomic_write_text, escape_markdown, shipped_path, write_json
from hf_captionrl.utils.model_files import read_object
from hf_captionrl.utils.options import Fraction, check_values

# --- Renders the templates of `hub_cards/` ---------------------------------------------------------------------------


def render_template(name: str, /, **values: Any) -> str:
    """Fill in a template."""
    return str(_environment().get_template(name).render(**values))


@functools.cache
def _environment() -> Any:
    """Jinja's environment, which keeps the templates that it has compiled."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # nosec B701 # escaped by filters, see below
        loader=FileSystemLoader(shipped_path("hub_cards", "model.md").parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # The output is Markdown, not HTML: the templates escape every value with `md` (text) or `code` (Python).
        autoescape=False,
    )
    environment.filters["md"] = lambda value: escape_markdown(str(value))
    environment.filters["code"] = _python_literal
    return environment


def _python_literal(value: Any) -> str:
    """A value as Python source on one line; quotes, line breaks and backticks are escaped."""
    if isinstance(value, bool | int | float) or value is None:
        return repr(value)
    return json.dumps(str(value), ensure_ascii=True).replace("`", "\\u0060")


# --- Renders model cards from the results of a run -------------------------------------------------------------------
# The template is `hub_cards/model.md`. A card describes how to use the model, its training data and objective, its decoding,
# the results and the scorer that measured them, and with every retrieval number how many statements are hallucinated.

FACTS_FILE = "card.json"
"""The contents of a card, saved in its folder so that it can be rendered again; never uploaded."""

EVAL_RESULTS_FILE = ".eval_results/hf_captionrl.yaml"
"""The results in the format of the Hub's leaderboards."""

Objective = Literal["smile", "mle", "self_retrieval", "sle"]


@dataclass(frozen=True)
class ModelCardFacts:
    """Contents of a model card other than the numbers."""

    model_id: (
        str  # `organisation/name` on the Hub, or a name, with which the code examples load the folder of the card
    )
    base_model: str  # the captioner that was finetuned
    family: str  # that `load_captioner` supports: `blip`, `git`, `encoder_decoder`, ...
    dataset: str  # name of the training and test data
    dataset_description: str  # size, origin and splits of the data, in one or more sentences
    objective: Objective  # `mle`: plain maximum likelihood
    scorer: str | None  # signature of the scorer that ranks: model, revision, dtype; None: nothing was ranked
    scorer_max_text_tokens: int | None  # after which the scorer truncates a caption
    generation: Mapping[str, Any]  # arguments of `generate` for all captions of the table
    row: str  # of this model in the results
    license: str  # identifier of the Hub, or its terms in words; a finetuned model must respect the licence of its base model
    baseline_row: str | None = "MLE"  # the model that it is compared with in the limitations; None for none
    mle_weight: Fraction = 0.0  # lambda, the weight of plain maximum likelihood
    first_token: Literal["mle", "smile"] = "mle"  # distribution there: the whole vocabulary, or the subset
    reward: str = ""  # description of the reward in one sentence, if there was one
    prompt: str = ""  # text before every caption; for a chat model, the question
    truncated_fraction: float | None = None  # of the captions, by the scorer, in [0, 1]; None if not counted
    test_split: str = "test"  # of the results
    language: str = "en"  # code of the language of the captions
    revision: str = "main"  # in the code examples; a push replaces `main` by the commit of the weights
    tags: Sequence[str] = ()  # more tags on the Hub
    is_adapter: bool = False  # only a LoRA is published, without the base model
    base_revision: str = "main"  # of the base model in the code examples of an adapter
    dataset_id: str | None = None  # `owner/name` of the data set on the Hub, whose leaderboard gets the results
    dataset_revision: str | None = None  # commit of the data set that was used
    selection: str = ""  # sentences on the selected checkpoint and on what the guard of the training refused

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str) and not (entry.name in ("prompt", "reward", "selection") and not value):
                check_text(entry.name, value)
        check_name(self.model_id, "model_id")
        check_values(self)
        if self.objective in ("self_retrieval", "sle") and not self.reward:
            raise ValueError(f"objective is {self.objective!r}, so the card must describe the reward. Set reward.")
        if self.dataset_id is not None and not HUB_NAME.fullmatch(self.dataset_id):
            raise ValueError(f"dataset_id is {self.dataset_id!r}. Use owner/name, the name on the Hub.")
        if self.family == "chat" and not self.prompt:
            raise ValueError("The card of a chat model must contain the question. Set prompt.")


def read_facts(folder: str | os.PathLike[str]) -> ModelCardFacts:
    """Read the contents of a card from a folder of [`write_model_card`]."""
    path = Path(folder) / FACTS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {FACTS_FILE}, the contents of a card. Write it with write_model_card."
        )
    found = json.loads(path.read_text(encoding="utf-8"))
    unknown = sorted(set(found) - {entry.name for entry in fields(ModelCardFacts)})
    if unknown:
        raise ValueError(f"{path} contains {unknown[0]!r}, which is not a field of a card. Remove it.")
    return ModelCardFacts(**{**found, "tags": tuple(found.get("tags", ()))})


def _measured(results: Mapping[str, Any], facts: ModelCardFacts) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """All rows and the row of the model, after checks."""
    rows = results.get("rows") or []
    check_rows(rows, COLUMNS)
    by_name = {row["name"]: row for row in rows}
    for name in (facts.row, facts.baseline_row):
        if name is not None and name not in by_name:
            raise ValueError(f"The results have no row {name!r}. Use one of {sorted(by_name)}.")
    row = by_name[facts.row]
    missing = [c.key for c in COLUMNS if row[c.key] is None and not row.get(f"{c.key}_reason")]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} of {facts.row!r} is missing. "
            "Measure it, or set <key>_reason to the reason why it cannot be measured."
        )
    if facts.scorer is not None and row["rd100_recall_at_1"] is None and row["pool_recall_at_1"] is None:
        raise ValueError(f"{facts.row!r} has no retrieval number. Measure rd100_recall_at_1 or pool_recall_at_1.")
    for name, entry in by_name.items():
        for column in COLUMNS:
            if entry.get(f"{column.key}_reason"):
                check_text(f"{column.key}_reason of {name!r}", str(entry[f"{column.key}_reason"]))
    return rows, row


def render_model_card(results: Mapping[str, Any], facts: ModelCardFacts) -> str:
    """Render a model card as Markdown with a `model-index`, from the output of `write_results`."""
    rows, row = _measured(results, facts)
    columns = {column.key: column for column in COLUMNS}
    card = render_template(
        "model.md",
        metadata=_metadata(row, facts),
        facts=facts,
        source=facts.model_id if "/" in facts.model_id else ".",  # the folder of the card, until a push names it
        generation=dict(facts.generation),
        row=row,
        baseline=next((r for r in rows if r["name"] == facts.baseline_row and r is not row), None),
        cell=lambda entry, key: format_cell(entry, columns[key]),
        retrieval_key="rd100_recall_at_1" if row["rd100_recall_at_1"] is not None else "pool_recall_at_1",
        table=results_markdown(rows, columns=COLUMNS, title=""),
        seed=results["seed"],
        versions=public_versions(results.get("versions", {})),
    )
    check_card(card)
    return card


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[Column, float, Sequence[float] | None]]:
    """Columns, rounded values and 95 % intervals of what was measured."""
    for column in COLUMNS:
        if row[column.key] is not None:
            yield column, round(float(row[column.key]), 6), row.get(f"{column.key}_ci")


def eval_results_yaml(results: Mapping[str, Any], facts: ModelCardFacts) -> str | None:
    """The results for the leaderboard of a data set, as `.eval_results/*.yaml`; None if the data set is not on the Hub."""
    _, row = _measured(results, facts)
    if facts.dataset_id is None:
        return None
    decoding = ", ".join(f"{name}={value}" for name, value in facts.generation.items())
    entries = []
    for column, value, interval in _numbers(row):
        notes = [] if interval is None else [f"95 % interval [{float(interval[0]):.6g}, {float(interval[1]):.6g}]"]
        notes += [f"split {facts.test_split}", f"seed {results['seed']}"]
        notes += [f"scorer {facts.scorer}"] * (facts.scorer is not None) + [decoding]
        entries.append(
            EvalResultEntry(
                dataset_id=facts.dataset_id,
                task_id=column.key,
                value=value,
                dataset_revision=facts.dataset_revision,
                notes="; ".join(note for note in notes if note),
            )
        )
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)


def write_model_card(folder: str | os.PathLike[str], results: Mapping[str, Any], facts: ModelCardFacts) -> Path:
    """Render a model card and write it to `README.md`, atomically, with the files to render it again.

    Args:
        folder: Folder of the checkpoint; created if missing.
        results: Output of `write_results`: rows, seed, config, versions.
        facts: Contents other than the numbers; written to `card.json`.

    Returns:
        `pathlib.Path`: The card. If the data set is on the Hub, `.eval_results/` contains the results for its leaderboard.

    Raises:
        ValueError: If the results lack a row, a retrieval number or a metric without a reason, or a text must not be
            published (see `check_card`); nothing is written.
    """
    folder = Path(folder)
    card, entries = render_model_card(results, facts), eval_results_yaml(results, facts)
    write_json(folder / FACTS_FILE, asdict(facts))
    if entries is None:
        (folder / EVAL_RESULTS_FILE).unlink(missing_ok=True)
    else:
        atomic_write_text(folder / EVAL_RESULTS_FILE, entries)
    return atomic_write_text(folder / "README.md", card)


def _metadata(row: Mapping[str, Any], facts: ModelCardFacts) -> str:
    """The YAML block, in the format of huggingface_hub."""
    evaluations = [
        EvalResult(
            task_type="image-to-text",
            task_name="Image captioning",
            dataset_type=facts.dataset_id or facts.dataset,
            dataset_name=facts.dataset,
            dataset_split=facts.test_split,
            metric_type=column.key,
            metric_name=column.title.removesuffix(column.arrow).strip(),
            metric_value=value,
            metric_args=None if interval is None else {"interval_95": [round(float(b), 6) for b in interval]},
        )
        for column, value, interval in _numbers(row)
    ]
    return _model_data(
        facts.base_model,
        facts.dataset_id,
        is_adapter=facts.is_adapter,
        language=facts.language,
        license=facts.license,
        pipeline_tag="image-text-to-text" if facts.family == "chat" else "image-to-text",
        tags=["image-captioning", "hf_captionrl", facts.objective, *facts.tags],
        model_name=facts.model_id.rpartition("/")[2],
        eval_results=evaluations,
    )


def _model_data(base_model: str | None, dataset_id: str | None, *, is_adapter: bool, license: str, **more: Any) -> str:
    """The YAML block of a model."""
    if not re.fullmatch(r"[A-Za-z0-9.+-]+", license):  # terms in words, for which the Hub has no identifier
        more["license_name"] = "-".join(re.findall(r"[a-z0-9.+]+", license.lower())) or "other"
        license = "other"
    if is_adapter:
        more["base_model_relation"] = "adapter"
    if dataset_id:
        more["datasets"] = [dataset_id]
    return ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        license=license,
        base_model=base_model if base_model and HUB_NAME.fullmatch(base_model) else None,
        **more,
    ).to_yaml()


# --- Cards of data sets: bags of similar images (TrueMatch) and boosted captions -------------------------------------

Kind = Literal["truematch", "boosted captions"]


@dataclass(frozen=True)
class DatasetCardFacts:
    """Contents of the card of a data set."""

    dataset_id: str  # `owner/name` on the Hub
    kind: Kind  # `truematch`: bags of similar images; `boosted captions`: detailed references
    file: str  # data file, relative to the repository
    source: str  # name of the data set of the images
    source_license: str  # of the images, which are not part of this data set
    description: str  # what the data set contains, and for which images, in one or more sentences
    made_with: Mapping[str, Any]  # by name: scorer or language model, settings, seed, versions
    columns: Mapping[str, str]  # from names to descriptions
    sizes: Mapping[str, int]  # number of rows per split, or number of bags per size
    license: str  # of this data set
    checked: str  # how it was checked, and its known errors
    language: str = "en"  # code of the language of the captions
    has_images: bool = False
    revision: str = "main"  # branch, tag or commit in the code example

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str):
                check_text(entry.name, value)
        for name, table in (("made_with", self.made_with), ("columns", self.columns), ("sizes", self.sizes)):
            if not table:
                raise ValueError(f"{name} is empty. Describe what the data set contains and how it was created.")
            for key, value in table.items():
                check_text(f"{name}[{key!r}]", str(value) if isinstance(value, str) else f"{key} {value}")
        check_values(self)
        if any(size < 1 for size in self.sizes.values()):
            raise ValueError(f"sizes is {dict(self.sizes)}, but must be at least 1. Remove empty parts.")
        check_name(self.dataset_id, "dataset_id")


def render_dataset_card(facts: DatasetCardFacts) -> str:
    """Render the card of a data set as Markdown that begins with metadata."""
    data = DatasetCardData(
        language=facts.language,
        license=facts.license,
        task_categories=["image-to-text"],
        pretty_name=facts.dataset_id.rpartition("/")[2],
        tags=["image-captioning", "hf_captionrl", facts.kind.replace(" ", "-")],
        configs=[{"config_name": "default", "data_files": facts.file}],
    )
    card = render_template("dataset.md", metadata=data.to_yaml(), facts=facts)
    check_card(card)
    return card


def write_dataset_card(folder: str | os.PathLike[str], facts: DatasetCardFacts) -> Path:
    """Render the card of a data set and write it to `README.md` in its folder, atomically.

    Args:
        folder: Folder with the data file of the card.
        facts: Contents of the card.

    Returns:
        `pathlib.Path`: The card.
    """
    folder = Path(folder)
    if not (folder / facts.file).is_file():
        raise FileNotFoundError(f"{folder} has no {facts.file}, the data file in its card. Write the data first.")
    return atomic_write_text(folder / "README.md", render_dataset_card(facts))


# --- Cards of what a trainer's `save_model` writes, for which nothing ranked the captions of a test split -------------

_GENERATED = ("[More Information Needed]", "generated automatically according to the information the Trainer")
"""Text in the cards that peft and transformers generate, which have no content and are replaced."""


def rewrite_model_card(folder: Path, changes: dict[str, str]) -> str:
    """Write the card of a finished model from its files, with some facts changed; the message for the user."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}. Use the folder of the finished model.")
    if not (folder / FACTS_FILE).is_file():
        write_unmeasured_card(folder, **changes)
        licence = "" if "license" in changes else " The licence is 'other'. Use --license to name it."
        return f"written{'' if _table_of_run(folder) else ', without results: nothing was measured'}.{licence}"
    facts = replace(read_facts(folder), **changes)  # type: ignore[arg-type]
    found = [path for path in (folder / "results.json", folder.parent / "results.json") if path.is_file()]
    if not found:
        raise FileNotFoundError(f"Neither {folder} nor its parent folder has results.json. Evaluate the model first.")
    write_model_card(folder, json.loads(found[0].read_text(encoding="utf-8")), facts)
    return "written."


def write_trained_card(folder: str | os.PathLike[str], *, model_id: str, **facts: str | None) -> Path:
    """Write the card of a trainer's output, a captioner or a chat model trained with TRL, unless a user has written one."""
    card = Path(folder, "README.md")
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else _GENERATED[0]
    if any(generated in text for generated in _GENERATED):
        return write_unmeasured_card(folder, model_id=model_id, **facts)
    _write_missing_manifest(card.parent)
    return card


def _table_of_run(folder: Path) -> str:
    """The table of the run that wrote a model: beside it, or beside the folder `model` of a recipe; or empty."""
    places = (folder, folder.parent) if folder.resolve().name == "model" else (folder,)
    found = [place / "results.md" for place in places if (place / "results.md").is_file()]
    return re.sub(r"\A# .*\n+", "", found[0].read_text(encoding="utf-8")) if found else ""


def write_unmeasured_card(
    folder: str | os.PathLike[str],
    *,
    model_id: str | None = None,  # None: the name of the folder
    base_model: str | None = None,  # None: that of the adapter or the training
    license: str | None = None,  # None: `other`
    dataset: str | None = None,
    dataset_id: str | None = None,
    dataset_description: str | None = None,
    language: str | None = None,
) -> Path:
    """Write the card of a model from the facts that its trainer saved and the table of its run, and a missing manifest."""
    from hf_captionrl.trainers.publishing import TRAINING_FILE  # imports transformers

    folder = Path(folder)
    training = read_object(folder / TRAINING_FILE) if (folder / TRAINING_FILE).is_file() else {}
    settings = _captioner_settings(folder) or {}
    if not settings and not training:
        raise FileNotFoundError(
            f"{folder} has no captioner.json or {TRAINING_FILE}, so no trainer of hf_captionrl saved it. Use the folder of "
            "trainer.save_model() or captioner.save_pretrained()."
        )
    if model_id is None:
        model_id = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "captioner"
    adapter, local_base = folder / "adapter_config.json", local_base_model(folder) is not None
    if adapter.is_file() and base_model is None:
        named = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or None
        base_model = Path(named).name if named and local_base else named
    base_model = base_model or training.get("base_model")
    if family := settings.get("family", ""):
        task = "image-text-to-text" if family == "chat" else "image-to-text"
    else:
        has_images = any((folder / name).is_file() for name in PROCESSORS)
        task = "image-text-to-text" if has_images else "text-generation"
    license = license or "other"
    texts = {"model_id": model_id, "base_model": base_model, "license": license, "dataset": dataset}
    texts |= {"language": language, "dataset_description": dataset_description, "dataset_id": dataset_id}
    for name, value in texts.items():
        if value is not None:
            check_text(name, value)
    is_adapter = adapter.is_file() and not local_base  # a push merges an adapter into its local base model
    metadata = _model_data(
        base_model,
        dataset_id,
        is_adapter=is_adapter,
        language=language,
        license=license,
        pipeline_tag=task,
        tags=["image-captioning", "hf_captionrl"] if family else ["hf_captionrl"],
    )
    parts = (value.items() if isinstance(value, dict) else [(name, value)] for name, value in training.items())
    card = render_template(
        "model_unmeasured.md",
        **texts,
        description=dataset_description,
        metadata=metadata,
        source=model_id if "/" in model_id else ".",
        is_adapter=is_adapter,
        task=task,
        family=family,
        prompt=settings.get("prompt") or "",
        training={name: value for part in parts for name, value in part if value not in (None, "", [])},
        table=_table_of_run(folder),
        versions=public_versions(),
    )
    check_card(card)
    _write_missing_manifest(folder)
    return atomic_write_text(folder / "README.md", card)


def _write_missing_manifest(folder: Path) -> None:
    if not (folder / MANIFEST_FILE).is_file():
        write_manifest(folder, command=[], seeds={}, data={})


def _captioner_settings(folder: Path) -> dict[str, Any] | None:
    """Settings of a saved captioner; None if the folder has none."""
    from hf_captionrl.captioners.captioner import SETTINGS_FILE  # imports torch

    path = folder / SETTINGS_FILE
    if not path.is_file():
        return None
    found = read_object(path)
    if not isinstance(found.get("family"), str):
        raise ValueError(f"{path} does not contain a family. Save the captioner again.")
    return found


def push_captioner(captioner: Any, repo_id: str, **settings: Any) -> str:
    """Save a captioner with a card and push it, with the checks and errors of [`push_folder`].

    Args:
        captioner ([`Captioner`]): The captioner.
        repo_id: `owner/name`; created if missing.
        settings: `private`, `token` and `overwrite`, see [`push_folder`].

    Returns:
        `str`: URL of the commit.
    """
    with tempfile.TemporaryDirectory() as folder:
        captioner.save_pretrained(folder)
        write_unmeasured_card(folder, model_id=repo_id)
        return push_folder(folder, repo_id, again="Call push_to_hub again.", **settings)


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


def write_boosted(arguments: Any, written: Any, made_by: Mapping[str, Any]) -> Path:
    """Write `boosting.json` and the card beside the captions; `made_by`: model and revision of both backends."""
    import pyarrow.parquet

    embedded = arguments.dataset == "scenes"
    source = "hf_captionrl scenes" if embedded else str(public_values(arguments.dataset))
    columns = pyarrow.parquet.read_schema(written.path).names
    by = "the facts of the scenes" if embedded else "word lists, which find only a few conflicts"
    split = "all splits" if arguments.split == "all" else f"the {arguments.split} split"
    named = {
        role: f"{public_values(made_by[name][0])}, revision {made_by[name][1] or 'not named'}"
        for role, name in (("language model", "text"), ("vision model", "vision"))
    }
    # The name of the folder, as the Hub accepts it.
    name = re.sub(r"[^A-Za-z0-9_]+", "-", written.path.parent.resolve().name).strip("-_")[:96] or "boosted"
    facts = DatasetCardFacts(
        dataset_id=arguments.repo_id or name,
        kind="boosted captions",
        file=written.path.name,
        source=source,
        source_license=arguments.source_license_of(arguments.dataset),
        description=f"Richer captions of {written.rows} images, {split} of {source}.",
        made_with={
            **named,
            "method": "Visual Caption Boosting (No Detail Left Behind, section 2), prompts of its Appendix A.1",
            "seed": arguments.seed,
        },
        columns={name: _COLUMNS.get(name, "as in the source") for name in columns},
        sizes={str(arguments.split): written.rows},
        license=arguments.license,
        checked=f"{written.conflicts} of {written.rows} HolisticCaps contradict their BlendCap, by {by}; {written.quarantined} rows were "
        "left out as unusable. No one has read the captions.",
        language=arguments.language,
        # Paths of image files cannot be published: a push requires --embed_images or --no_images.
        has_images="image" in columns,
    )
    return _write(written.path.parent, facts, {"rows": written.rows, "quarantined": written.quarantined})


def _write(folder: Path, facts: Any, counts: Mapping[str, Any]) -> Path:
    card = write_dataset_card(folder, facts)
    write_json(folder / BOOSTED_FILE, {"format": 1, **counts, "card": asdict(facts), "versions": public_versions()})
    return card


def rewrite_boosted_card(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Render the card of boosted captions again from their manifest."""
    path = folder / BOOSTED_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        facts = DatasetCardFacts(**manifest["card"])
    except (json.JSONDecodeError, RecursionError, KeyError, TypeError) as error:
        remedy = "Write it again with the same `captionrl boost` command."
        raise ValueError(f"{path} is not a manifest of boosted captions ({error}). {remedy}") from None
    return _write(folder, replace(facts, **changes), {name: manifest.get(name) for name in ("rows", "quarantined")})
