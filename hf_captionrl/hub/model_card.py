"""Model cards: rendered from what a run measured, or refused.

The template is `hub_cards/model.md`. A card says how to use the model, on what data and by which formula it was
trained, how it decodes, what was measured with which scorer, and, beside every retrieval number, how much of what it
says is wrong.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_captionrl.hub.publish_checks import check_card, check_text
from hf_captionrl.hub.templates import render_template
from hf_captionrl.io import atomic_write_text, write_json
from hf_captionrl.reports.table import COLUMNS, check_rows, format_cell, results_markdown

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
"""The facts behind a card, kept beside it and never uploaded, so that the card can be written again."""

EVAL_RESULTS_FILE = ".eval_results/hf_captionrl.yaml"
"""The results as the Hub collects them for a data set's leaderboard."""

Objective = Literal["smile", "mle", "self_retrieval", "sle"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelCardFacts:
    """What a card states beside the numbers.

    Args:
        model_id: Where the model will be found: `name` or `organisation/name` on the Hub, or a relative folder's name.
        base_model: The captioner it was finetuned from.
        family: Captioner family: `blip`, `git`, `encoder_decoder`, or another name that `load_captioner` knows.
        dataset: Name of the training and test data.
        dataset_description: A sentence or more on the data: size, origin, splits.
        objective: `smile`, `self_retrieval`, `sle`, or `mle` for plain maximum likelihood.
        scorer: Signature of the scorer that ranks: model, revision, dtype.
        scorer_max_text_tokens: Tokens after which the scorer cuts a caption.
        generation: Arguments of `generate` behind every caption of the table.
        row: Name of this model's row in the results.
        license: The model's licence, as the Hub writes it; a finetuned model keeps to its base model's.
        baseline_row: Row that it is compared with in the limitations; None for none.
        mle_weight: lambda, the share of plain maximum likelihood in [0, 1].
        reward: What was rewarded, in a sentence, where a reward was.
        first_token: Distribution at the first token, `mle` (whole vocabulary) or `smile` (subset).
        prompt: Text that every caption continues; empty for none. Of a chat model, the question.
        truncated_fraction: Share of captions that the scorer cut, in [0, 1]; None if not counted.
        test_split: Split that was measured.
        language: Language code of the captions.
        revision: Branch, tag or commit that the printed examples load; `main` becomes the commit of the weights when
            they are pushed.
        tags: Further tags of the Hub.
        is_adapter: Whether only a LoRA is published, on top of the base model.
        base_revision: Revision of the base model that an adapter is printed with.
        dataset_id: The data set's name on the Hub, `owner/name`, where it has one: the results go to its leaderboard.
        dataset_revision: Commit of it that was measured.
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

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str) and not (entry.name in ("prompt", "reward") and not value):
                check_text(entry.name, value)
        try:
            validate_repo_id(self.model_id)
        except HFValidationError as error:
            raise ValueError(
                f"model_id is {self.model_id!r}, not a name that the Hub accepts ({error}). "
                "Use organisation/name, with letters, digits, '-', '_' and '.'."
            ) from error
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective is {self.objective!r}; a card knows the formulas of {get_args(Objective)}.")
        if self.objective in ("self_retrieval", "sle") and not self.reward:
            raise ValueError(f"objective is {self.objective!r}, so the card must say what was rewarded. Set reward.")
        if not 0.0 <= self.mle_weight <= 1.0:
            raise ValueError(f"mle_weight is {self.mle_weight}; it must lie in [0, 1].")
        if self.dataset_id is not None and not _HUB_NAME.fullmatch(self.dataset_id):
            raise ValueError(f"dataset_id is {self.dataset_id!r}; on the Hub a data set is called owner/name.")
        if self.family == "chat" and not self.prompt:
            raise ValueError("A chat model is asked something, and the card must say what. Set prompt.")


def read_facts(folder: str | os.PathLike[str]) -> ModelCardFacts:
    """The facts behind a card.

    Args:
        folder: Where `write_model_card` wrote it.

    Returns:
        [`ModelCardFacts`]: The facts.

    Raises:
        FileNotFoundError: If they are not there.
        ValueError: If they were changed to what no card may say.
    """
    path = Path(folder) / FACTS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {FACTS_FILE}, the facts behind a card. Write it with write_model_card."
        )
    found = json.loads(path.read_text(encoding="utf-8"))
    unknown = sorted(set(found) - {entry.name for entry in fields(ModelCardFacts)})
    if unknown:
        raise ValueError(f"{path} holds {unknown[0]!r}, which is no fact of a card. Remove it.")
    return ModelCardFacts(**{**found, "tags": tuple(found.get("tags", ()))})


def _measured(results: Mapping[str, Any], facts: ModelCardFacts) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """All rows, and the model's own, checked."""
    rows = results.get("rows") or []
    check_rows(rows)
    by_name = {row["name"]: row for row in rows}
    for name in (facts.row, facts.baseline_row):
        if name is not None and name not in by_name:
            raise ValueError(f"The results have no row {name!r}, only {sorted(by_name)}. Name one of these.")
    row = by_name[facts.row]
    missing = [c.key for c in COLUMNS if row[c.key] is None and not row.get(f"{c.key}_reason")]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} of {facts.row!r} is missing. "
            "Measure it, or say in <key>_reason why it cannot be measured."
        )
    if row["rd100_recall_at_1"] is None and row["pool_recall_at_1"] is None:
        raise ValueError(f"{facts.row!r} has no retrieval number. A card without one says nothing about this model.")
    for name, entry in by_name.items():
        for column in COLUMNS:
            if entry.get(f"{column.key}_reason"):
                check_text(f"{column.key}_reason of {name!r}", str(entry[f"{column.key}_reason"]))
    return rows, row


def render_model_card(results: Mapping[str, Any], facts: ModelCardFacts) -> str:
    """Render a model card from a run's results.

    Args:
        results: What `write_results` wrote: rows, seed, config, versions.
        facts: Everything that is not a number.

    Returns:
        `str`: Markdown with metadata (a `model-index` with intervals) in front.

    Raises:
        ValueError: If the results are malformed, lack a row or a metric without a reason, hold no retrieval number
            for this model, or a text must not be published (see `check_card`).
        FileNotFoundError: If the template cannot be found.
    """
    rows, row = _measured(results, facts)
    others = {entry["name"]: entry for entry in rows}
    columns = {column.key: column for column in COLUMNS}
    card = render_template(
        "model.md",
        metadata=_metadata(row, facts),
        facts=facts,
        generation=dict(facts.generation),
        row=row,
        baseline=others[facts.baseline_row] if facts.baseline_row not in (None, facts.row) else None,
        cell=lambda entry, key: format_cell(entry, columns[key]),
        retrieval_key="rd100_recall_at_1" if row["rd100_recall_at_1"] is not None else "pool_recall_at_1",
        table=results_markdown(rows, title=""),
        seed=results["seed"],
        versions={k: v for k, v in results.get("versions", {}).items() if k != "git_revision"},
    )
    check_card(card)
    return card


def eval_results_yaml(results: Mapping[str, Any], facts: ModelCardFacts) -> str | None:
    """The results for a data set's leaderboard, as `.eval_results/*.yaml`.

    Args:
        results: As for `render_model_card`.
        facts: Everything that is not a number.

    Returns:
        `str`: One entry per metric, its interval in the notes; None where the data set has no name on the Hub, since
        the Hub refuses such a file.

    Raises:
        ValueError: As `render_model_card`.
    """
    _, row = _measured(results, facts)
    if facts.dataset_id is None:
        return None
    decoding = ", ".join(f"{name}={value}" for name, value in facts.generation.items())
    entries = []
    for column in COLUMNS:
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
    """Render a model card and write it as the folder's `README.md`, atomically, with what it was made of beside it.

    Args:
        folder: Folder of the checkpoint; made if missing.
        results: What `write_results` wrote: rows, seed, config, versions.
        facts: Everything that is not a number.

    Returns:
        `pathlib.Path`: The card. `card.json` keeps the facts, and `.eval_results/` the results where the data set has
        a name on the Hub.

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
    """The YAML block, as huggingface_hub writes it."""
    evaluations = []
    for column in COLUMNS:
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
        base_model=facts.base_model if _HUB_NAME.fullmatch(facts.base_model) else None,
        tags=["image-captioning", "hf_captionrl", facts.objective, *facts.tags],
        model_name=facts.model_id.rpartition("/")[2],
        eval_results=evaluations,
        **more,
    )
    return data.to_yaml()
