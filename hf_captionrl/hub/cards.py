"""Cards of models, from the templates of `hub_cards/`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CardData, EvalResult, ModelCardData, RepoCard

from hf_captionrl.hub.push import (
    HUB_NAME,
    MANIFEST_FILE,
    PROCESSORS,
    check_card,
    local_base_model,
    public_versions,
    write_manifest,
)
from hf_captionrl.metrics.columns import COLUMNS
from hf_captionrl.metrics.table import check_rows, format_cell, results_markdown
from hf_captionrl.utils.io import atomic_write_text, escape_markdown, shipped_path, write_json
from hf_captionrl.utils.model_files import read_object
from hf_captionrl.utils.options import Fraction, check_values


def render_card(template: str, data: CardData, /, **values: Any) -> str:
    """Fill in a template of `hub_cards/` and check the card.

    The output is Markdown: the templates escape every value with `md` (text) or `code` (Python).
    """
    text = shipped_path("hub_cards", *template.split("/")).read_text(encoding="utf-8")
    text = re.sub(r"^(\{%.*%\})\n", r"\1", text, flags=re.MULTILINE)  # a tag alone on its line leaves no line
    values = {"versions": public_versions(), "md": lambda value: escape_markdown(str(value)), "code": _code, **values}
    card = f"{RepoCard.from_template(data, template_str=text, **values)}\n"
    check_card(card)
    return card


def _code(value: Any) -> str:
    """A value as Python source on one line; quotes, line breaks and backticks are escaped."""
    if isinstance(value, bool | int | float) or value is None:
        return repr(value)
    return json.dumps(str(value)).replace("`", "\\u0060")


TASK = "image-text-to-text"  # transformers 5 has no pipeline for "image-to-text"
PAPERS = {"smile": "2306.13460", "self_retrieval": "2304.01662", "sle": "2003.03749"}  # arXiv, by objective


# --- Cards of measured models ----------------------------------------------------------------------------------------

FACTS_FILE = "card.json"
"""The contents of a card, saved in its folder so that it can be rendered again; never uploaded."""


@dataclass(frozen=True)
class ModelCardFacts:
    """Contents of a model card other than the numbers."""

    model_id: str  # `owner/name` on the Hub, or a name; the code examples then load the folder of the card
    base_model: str  # the captioner that was finetuned
    family: str  # that `load_captioner` supports: `blip`, `git`, `encoder_decoder`, ...
    dataset: str  # name of the training and test data
    dataset_description: str  # size, origin and splits of the data, in one or more sentences
    objective: Literal["smile", "mle", "self_retrieval", "sle"]
    scorer: str | None  # signature of the scorer that ranks: model, revision, dtype; None: nothing was ranked
    scorer_max_text_tokens: int | None  # after which the scorer truncates a caption
    generation: Mapping[str, Any]  # arguments of `generate` for all captions of the table
    row: str  # of this model in the results
    license: str  # identifier of the Hub, or terms in words; a finetuned model must respect that of its base model
    baseline_row: str | None = "MLE"  # the model that it is compared with in the limitations; None for none
    mle_weight: Fraction = 0.0  # lambda, the weight of plain maximum likelihood
    first_token: Literal["mle", "smile"] = "mle"  # distribution there: the whole vocabulary, or the subset
    reward: str = ""  # description of the reward in one sentence, if there was one
    prompt: str = ""  # text before every caption; for a chat model, the question
    truncated_fraction: float | None = None  # of the captions, by the scorer, in [0, 1]; None if not counted
    language: str = "en"  # code of the language of the captions
    is_adapter: bool = False  # only a LoRA is published, without the base model
    base_revision: str = "main"  # of the base model in the code examples of an adapter
    dataset_id: str | None = None  # `owner/name` of the data set on the Hub
    selection: str = ""  # sentences on the selected checkpoint and on what the guard of the training refused

    def __post_init__(self) -> None:
        check_values(self)


def render_model_card(results: Mapping[str, Any], facts: ModelCardFacts) -> str:
    """Render a model card as Markdown with a `model-index`, from the output of `write_results`."""
    rows = results["rows"]
    check_rows(rows, COLUMNS)
    row = next((row for row in rows if row["name"] == facts.row), None)
    if row is None:
        raise ValueError(f"The results have no row {facts.row!r}. Use one of {[row['name'] for row in rows]}.")
    if missing := [c.key for c in COLUMNS if row[c.key] is None and not row.get(f"{c.key}_reason")]:
        raise ValueError(f"{', '.join(missing)} of {facts.row!r} is missing. Measure it, or set <key>_reason.")
    columns = {column.key: column for column in COLUMNS}
    evaluations = [
        EvalResult(
            task_type=TASK,
            task_name="Image captioning",
            dataset_type=facts.dataset_id or facts.dataset,
            dataset_name=facts.dataset,
            dataset_split="test",
            metric_type=column.key,
            metric_name=column.title.removesuffix(column.arrow).strip(),
            metric_value=round(float(row[column.key]), 6),
            metric_args={"interval_95": [round(float(bound), 6) for bound in interval]} if interval else None,
        )
        for column, interval in ((column, row.get(f"{column.key}_ci")) for column in COLUMNS)
        if row[column.key] is not None
    ]
    data = _model_data(
        facts.base_model,
        facts.dataset_id,
        is_adapter=facts.is_adapter,
        language=facts.language,
        license=facts.license,
        pipeline_tag=TASK,
        paper=PAPERS.get(facts.objective),
        tags=["image-captioning", "hf_captionrl", facts.objective],
        model_name=facts.model_id.rpartition("/")[2],
        eval_results=evaluations,
    )
    return render_card(
        "model.md",
        data,
        facts=facts,
        source=facts.model_id if "/" in facts.model_id else ".",  # the folder of the card, until a push names it
        generation=dict(facts.generation),
        row=row,
        baseline=next((r for r in rows if r["name"] == facts.baseline_row and r is not row), None),
        cell=lambda entry, key: format_cell(entry, columns[key]),
        retrieval_key="rd100_recall_at_1" if row["rd100_recall_at_1"] is not None else "pool_recall_at_1",
        table=results_markdown(rows, columns=COLUMNS, title=""),
        seed=results["seed"],
        paper=PAPERS.get(facts.objective),
        versions=public_versions(results.get("versions", {})),
    )


def _model_data(
    base_model: str | None, dataset_id: str | None, *, is_adapter: bool, license: str, paper: str | None, **more: Any
) -> ModelCardData:
    more["tags"] += [f"arxiv:{paper}"] if paper else []
    if not re.fullmatch(r"[A-Za-z0-9.+-]+", license):  # terms in words, for which the Hub has no identifier
        more["license_name"] = "-".join(re.findall(r"[a-z0-9.+]+", license.lower())) or "other"
        license = "other"
    if is_adapter:
        more["base_model_relation"] = "adapter"
    return ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        license=license,
        base_model=base_model if base_model and HUB_NAME.fullmatch(base_model) else None,
        datasets=[dataset_id] if dataset_id else None,
        **more,
    )


def write_model_card(folder: str | os.PathLike[str], results: Mapping[str, Any], facts: ModelCardFacts) -> Path:
    """Render a model card and write it to `README.md`, with the facts in `card.json`, to render it again.

    Args:
        folder: Folder of the checkpoint; created if missing.
        results: Output of `write_results`: rows, seed, config, versions.
        facts: Contents other than the numbers.

    Returns:
        `pathlib.Path`: The card.

    Raises:
        ValueError: If the results lack a row, a retrieval number or a metric without a reason, or the card must not be
            published (see `check_card`); nothing is written.
    """
    card = render_model_card(results, facts)
    write_json(Path(folder) / FACTS_FILE, asdict(facts))
    return atomic_write_text(Path(folder) / "README.md", card)


def rewrite_model_card(folder: Path, changes: dict[str, str]) -> str:
    """Write the card of a finished model from its files, with some facts changed; the message for the user."""
    if not (folder / FACTS_FILE).is_file():
        write_unmeasured_card(folder, **changes)
        licence = "" if "license" in changes else " The licence is 'other'. Use --license to name it."
        return f"written{'' if _table_of_run(folder) else ', without results: nothing was measured'}.{licence}"
    facts = ModelCardFacts(**{**read_object(folder / FACTS_FILE), **changes})
    results = folder / "results.json"
    write_model_card(folder, read_object(results if results.is_file() else folder.parent / "results.json"), facts)
    return "written."


# --- Cards of what a trainer's `save_model` writes, for which nothing ranked the captions of a test split -------------

_GENERATED = ("[More Information Needed]", "generated automatically according to the information the Trainer")
"""Text in the cards that peft and transformers generate, which have no content and are replaced."""


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
    tables = [place / "results.md" for place in places if (place / "results.md").is_file()]
    return re.sub(r"\A# .*\n+", "", tables[0].read_text(encoding="utf-8")) if tables else ""


def write_unmeasured_card(
    folder: str | os.PathLike[str],
    *,
    model_id: str | None = None,  # None: the name of the folder
    base_model: str | None = None,  # None: that of the adapter or the training
    license: str | None = None,  # None: `other`
    dataset: str | None = None,
    dataset_id: str | None = None,
    language: str | None = None,
) -> Path:
    """Write the card of a model from the facts that its trainer saved and the table of its run, and a missing manifest."""
    from hf_captionrl.captioners.captioner import SETTINGS_FILE  # imports torch
    from hf_captionrl.trainers.publishing import RUN_FILE, read_run  # imports transformers

    folder = Path(folder)
    training = read_run(folder).get("training", {})
    settings = read_object(folder / SETTINGS_FILE) if (folder / SETTINGS_FILE).is_file() else {}
    if not settings and not training:
        raise FileNotFoundError(
            f"{folder} has no {SETTINGS_FILE} or {RUN_FILE}, so no trainer of hf_captionrl saved it. Use the folder of "
            "trainer.save_model() or captioner.save_pretrained()."
        )
    if model_id is None:
        model_id = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "captioner"
    adapter, local_base = folder / "adapter_config.json", local_base_model(folder)
    is_adapter = adapter.is_file() and local_base is None  # a push merges an adapter into its local base model
    if base_model is None and adapter.is_file():
        base_model = Path(local_base).name if local_base else read_object(adapter).get("base_model_name_or_path")
    base_model = base_model or training.get("base_model")
    license, family = license or "other", settings.get("family", "")
    sees = family or any((folder / name).is_file() for name in PROCESSORS)
    task, paper = TASK if sees else "text-generation", PAPERS.get(training.get("objective"))
    data = _model_data(
        base_model,
        dataset_id,
        is_adapter=is_adapter,
        language=language,
        license=license,
        pipeline_tag=task,
        paper=paper,
        tags=["image-captioning", "hf_captionrl"] if family else ["hf_captionrl"],
    )
    parts = (value.items() if isinstance(value, dict) else [(name, value)] for name, value in training.items())
    card = render_card(
        "model_unmeasured.md",
        data,
        model_id=model_id,
        base_model=base_model,
        license=license,
        dataset=dataset,
        source=model_id if "/" in model_id else ".",
        is_adapter=is_adapter,
        task=task,
        family=family,
        prompt=settings.get("prompt") or "",
        training={name: value for part in parts for name, value in part if value not in (None, "", [])},
        table=_table_of_run(folder),
        paper=paper,
    )
    _write_missing_manifest(folder)
    return atomic_write_text(folder / "README.md", card)


def _write_missing_manifest(folder: Path) -> None:
    if not (folder / MANIFEST_FILE).is_file():
        write_manifest(folder, command=[], seeds={}, data={})
