"""Renders model cards from the results of a run.

The template is `hub_cards/model.md`. A card describes how to use the model, its training data and objective, its decoding,
the results and the scorer that measured them, and with every retrieval number how many statements are hallucinated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from hf_captionrl.hub.manifest import public_versions
from hf_captionrl.hub.publish_checks import HUB_NAME, check_card, check_name, check_text
from hf_captionrl.hub.templates import render_template
from hf_captionrl.io import atomic_write_text, write_json
from hf_captionrl.reports.table import Column, check_rows, format_cell, results_markdown

__all__ = [
    "EVAL_RESULTS_FILE",
    "FACTS_FILE",
    "ModelCardFacts",
    "eval_results_yaml",
    "read_facts",
    "render_model_card",
    "write_model_card",
]

FACTS_FILE = "card.json"
"""The contents of a card, saved in its folder so that it can be rendered again; never uploaded."""

EVAL_RESULTS_FILE = ".eval_results/hf_captionrl.yaml"
"""The results in the format of the Hub's leaderboards."""

Objective = Literal["smile", "mle", "self_retrieval", "sle"]


@dataclass(frozen=True)
class ModelCardFacts:
    """Contents of a model card other than the numbers.

    Args:
        model_id: Name of the model: `name` or `organisation/name` on the Hub, or the name of a relative folder.
        base_model: The captioner that was finetuned.
        family: Captioner family: `blip`, `git`, `encoder_decoder`, or another family that `load_captioner` supports.
        dataset: Name of the training and test data.
        dataset_description: Size, origin and splits of the data, in one or more sentences.
        objective: `smile`, `self_retrieval`, `sle`, or `mle` for plain maximum likelihood.
        scorer: Signature of the scorer that ranks: model, revision, dtype.
        scorer_max_text_tokens: Number of tokens after which the scorer truncates a caption.
        generation: Arguments of `generate` for all captions of the table.
        row: Name of this model's row in the results.
        license: Licence identifier of the Hub; a finetuned model must respect the licence of its base model.
        baseline_row: Row of the model that it is compared with in the limitations; None for none.
        mle_weight: lambda, the weight of plain maximum likelihood in [0, 1].
        reward: Description of the reward in one sentence, if there was a reward.
        first_token: Distribution at the first token, `mle` (whole vocabulary) or `smile` (subset).
        prompt: Text before every caption; empty for none. For a chat model, the question.
        truncated_fraction: Share of captions that the scorer truncated, in [0, 1]; None if not counted.
        test_split: Split of the results.
        language: Language code of the captions.
        revision: Branch, tag or commit in the code examples; a push replaces `main` by the commit of the weights.
        tags: More tags on the Hub.
        is_adapter: Whether only a LoRA is published, without the base model.
        base_revision: Revision of the base model in the code examples of an adapter.
        dataset_id: Name of the data set on the Hub, `owner/name`, if it has one; its leaderboard gets the results.
        dataset_revision: Commit of the data set that was used.
        selection: Sentences on the selected checkpoint and on what the guard of the training refused; empty for none.
    """

    model_id: str
    base_model: str
    family: str
    dataset: str
    dataset_description: str
    objective: Objective
    scorer: str
    scorer_max_text_tokens: int
    generation: Mapping[str, Any]
    row: str
    license: str
    baseline_row: str | None = "MLE"
    mle_weight: float = 0.0
    first_token: Literal["mle", "smile"] = "mle"
    reward: str = ""
    prompt: str = ""
    truncated_fraction: float | None = None
    test_split: str = "test"
    language: str = "en"
    revision: str = "main"
    tags: Sequence[str] = ()
    is_adapter: bool = False
    base_revision: str = "main"
    dataset_id: str | None = None
    dataset_revision: str | None = None
    selection: str = ""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str) and not (entry.name in ("prompt", "reward", "selection") and not value):
                check_text(entry.name, value)
        check_name(self.model_id, "model_id")
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective is {self.objective!r}. Use one of {get_args(Objective)}.")
        if self.objective in ("self_retrieval", "sle") and not self.reward:
            raise ValueError(f"objective is {self.objective!r}, so the card must describe the reward. Set reward.")
        if not 0.0 <= self.mle_weight <= 1.0:
            raise ValueError(f"mle_weight is {self.mle_weight}, but must be in [0, 1]. Use 0 for SMILE alone.")
        if self.dataset_id is not None and not HUB_NAME.fullmatch(self.dataset_id):
            raise ValueError(f"dataset_id is {self.dataset_id!r}. Use owner/name, the name on the Hub.")
        if self.family == "chat" and not self.prompt:
            raise ValueError("The card of a chat model must contain the question. Set prompt.")


def read_facts(folder: str | os.PathLike[str]) -> ModelCardFacts:
    """Read the contents of a card.

    Args:
        folder: Folder of `write_model_card`.

    Returns:
        [`ModelCardFacts`]: The contents.

    Raises:
        FileNotFoundError: If the folder has no `card.json`.
        ValueError: If the file was changed and is invalid.
    """
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


def _columns() -> tuple[Column, ...]:
    """Columns of the results table."""
    # Imported here, because the declarations of the metrics import torch, which other parts of the package do not need.
    from hf_captionrl.evaluate_modules.results_columns import COLUMNS

    return COLUMNS


def _measured(results: Mapping[str, Any], facts: ModelCardFacts) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """All rows and the row of the model, after checks."""
    rows = results.get("rows") or []
    columns = _columns()
    check_rows(rows, columns)
    by_name = {row["name"]: row for row in rows}
    for name in (facts.row, facts.baseline_row):
        if name is not None and name not in by_name:
            raise ValueError(f"The results have no row {name!r}. Use one of {sorted(by_name)}.")
    row = by_name[facts.row]
    missing = [c.key for c in columns if row[c.key] is None and not row.get(f"{c.key}_reason")]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} of {facts.row!r} is missing. "
            "Measure it, or set <key>_reason to the reason why it cannot be measured."
        )
    if row["rd100_recall_at_1"] is None and row["pool_recall_at_1"] is None:
        raise ValueError(f"{facts.row!r} has no retrieval number. Measure rd100_recall_at_1 or pool_recall_at_1.")
    for name, entry in by_name.items():
        for column in columns:
            if entry.get(f"{column.key}_reason"):
                check_text(f"{column.key}_reason of {name!r}", str(entry[f"{column.key}_reason"]))
    return rows, row


def render_model_card(results: Mapping[str, Any], facts: ModelCardFacts) -> str:
    """Render a model card from the results of a run.

    Args:
        results: Output of `write_results`: rows, seed, config, versions.
        facts: Contents other than the numbers.

    Returns:
        `str`: Markdown that begins with metadata (a `model-index` with intervals).

    Raises:
        ValueError: If the results are malformed, lack a row, a retrieval number or a metric without a reason, or a
            text must not be published (see `check_card`).
        FileNotFoundError: If the template cannot be found.
    """
    rows, row = _measured(results, facts)
    others = {entry["name"]: entry for entry in rows}
    columns = {column.key: column for column in _columns()}
    card = render_template(
        "model.md",
        metadata=_metadata(row, facts),
        facts=facts,
        generation=dict(facts.generation),
        row=row,
        baseline=others[facts.baseline_row] if facts.baseline_row not in (None, facts.row) else None,
        cell=lambda entry, key: format_cell(entry, columns[key]),
        retrieval_key="rd100_recall_at_1" if row["rd100_recall_at_1"] is not None else "pool_recall_at_1",
        table=results_markdown(rows, columns=_columns(), title=""),
        seed=results["seed"],
        versions=public_versions(results.get("versions", {})),
    )
    check_card(card)
    return card


def eval_results_yaml(results: Mapping[str, Any], facts: ModelCardFacts) -> str | None:
    """The results for the leaderboard of a data set, as `.eval_results/*.yaml`.

    Args:
        results: Output of `write_results`.
        facts: Contents other than the numbers.

    Returns:
        `str`: One entry per metric, with its interval in the notes. None if the data set is not on the Hub, which does
        not accept such a file.

    Raises:
        ValueError: As `render_model_card`.
    """
    _, row = _measured(results, facts)
    if facts.dataset_id is None:
        return None
    decoding = ", ".join(f"{name}={value}" for name, value in facts.generation.items())
    entries = []
    for column in _columns():
        if row[column.key] is None:
            continue
        interval = row.get(f"{column.key}_ci")
        notes = [] if interval is None else [f"95 % interval [{float(interval[0]):.6g}, {float(interval[1]):.6g}]"]
        notes += [f"split {facts.test_split}", f"seed {results['seed']}", f"scorer {facts.scorer}", decoding]
        entries.append(
            EvalResultEntry(
                dataset_id=facts.dataset_id,
                task_id=column.key,
                value=round(float(row[column.key]), 6),
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
        facts: Contents other than the numbers.

    Returns:
        `pathlib.Path`: The card. `card.json` contains `facts`, and `.eval_results/` the results if the data set is on
        the Hub.

    Raises:
        ValueError: If the card must not be published (see `render_model_card`); nothing is written.
        FileNotFoundError: If the template cannot be found.
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
    evaluations = []
    for column in _columns():
        if row[column.key] is None:
            continue
        interval = row.get(f"{column.key}_ci")
        evaluations.append(
            EvalResult(
                task_type="image-to-text",
                task_name="Image captioning",
                dataset_type=facts.dataset_id or facts.dataset,
                dataset_name=facts.dataset,
                dataset_split=facts.test_split,
                metric_type=column.key,
                metric_name=column.title.removesuffix(column.arrow).strip(),
                metric_value=round(float(row[column.key]), 6),
                metric_args=None
                if interval is None
                else {"interval_95": [round(float(bound), 6) for bound in interval]},
            )
        )
    more: dict[str, Any] = {}
    if facts.dataset_id is not None:
        more["datasets"] = [facts.dataset_id]
    if facts.is_adapter:
        more["base_model_relation"] = "adapter"
    data = ModelCardData(
        language=facts.language,
        license=facts.license,
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag="image-text-to-text" if facts.family == "chat" else "image-to-text",
        base_model=facts.base_model if HUB_NAME.fullmatch(facts.base_model) else None,
        tags=["image-captioning", "hf_captionrl", facts.objective, *facts.tags],
        model_name=facts.model_id.rpartition("/")[2],
        eval_results=evaluations,
        **more,
    )
    return data.to_yaml()
