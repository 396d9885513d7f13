"""Model cards: rendered from what a run measured, or refused.

The template is `hub_cards/model.md`. A card says how to use the model, on what data and by which formula it was
trained, how it decodes, what was measured with which scorer, and, beside every retrieval number, how much of what it
says is wrong.
"""

import json
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hf_captionrl.io import atomic_write_text
from hf_captionrl.reports.table import COLUMNS, check_rows, escape_markdown, format_cell, results_markdown

__all__ = ["ModelCardFacts", "push_folder", "render_model_card", "write_model_card"]

_PLACEHOLDER = re.compile(
    # TODO only in capitals: "todo" is a Spanish word.
    r"\b(TODO|TBD|FIXME|XXX)\b|(?i:more information needed|lorem ipsum|<your|\byour[-_ ](name|org|model|username)\b)"
    r"|\{\{|\{%|^\W*$"
)
_MACHINE_PATH = re.compile(r"^(/|~|[A-Za-z]:[\\/]|\\\\|file:)|(^|/)\.\.(/|$)")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")


Objective = Literal["smile", "mle", "self_retrieval", "sle"]


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
        prompt: Text that every caption continues; empty for none.
        truncated_fraction: Share of captions that the scorer cut, in [0, 1]; None if not counted.
        test_split: Split that was measured.
        language: Language code of the captions.
        revision: Branch, tag or commit that the printed examples load.
        tags: Further tags of the Hub.
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

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str) and not (entry.name in ("prompt", "reward") and not value):
                _check_text(entry.name, value)
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


def _check_text(name: str, value: str) -> None:
    """Refuse what is unfinished, leads out of the project, or must never be published."""
    if _TOKEN.search(value):
        # The value is not repeated: the message may end in a public log.
        raise ValueError(f"{name} holds an access token. Remove it, and revoke the token if it was shown to anybody.")
    if _PLACEHOLDER.search(value):
        raise ValueError(
            f"{name} is {value!r}, a placeholder. A card is published: state the fact, or choose another field."
        )
    if _MACHINE_PATH.search(value):
        raise ValueError(f"{name} is {value!r}, a path on this machine, which nobody else has. Give a name instead.")


def render_model_card(results: Mapping[str, Any], facts: ModelCardFacts) -> str:
    """Render a model card from a run's results.

    Args:
        results: What `write_results` wrote: rows, seed, config, versions.
        facts: Everything that is not a number.

    Returns:
        `str`: Markdown with metadata (a `model-index` with intervals) in front.

    Raises:
        ValueError: If the results are malformed, lack a row or a metric without a reason, hold no retrieval number
            for this model, or a text is a placeholder.
        FileNotFoundError: If the template cannot be found.
    """
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
                _check_text(f"{column.key}_reason of {name!r}", str(entry[f"{column.key}_reason"]))
    baseline = by_name[facts.baseline_row] if facts.baseline_row not in (None, facts.row) else None
    environment = Environment(
        loader=FileSystemLoader(_template_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Markdown, not HTML: `md` escapes for text and `code` for Python, and the template uses one of them
        # everywhere.
        autoescape=False,
    )
    environment.filters["md"] = lambda value: escape_markdown(str(value))
    environment.filters["code"] = _python_literal
    columns = {column.key: column for column in COLUMNS}
    return environment.get_template("model.md").render(
        metadata=_metadata(row, facts),
        facts=facts,
        generation=dict(facts.generation),
        row=row,
        baseline=baseline,
        cell=lambda entry, key: format_cell(entry, columns[key]),
        retrieval_key="rd100_recall_at_1" if row["rd100_recall_at_1"] is not None else "pool_recall_at_1",
        table=results_markdown(rows, title=""),
        seed=results["seed"],
        versions=results.get("versions", {}),
    )


def write_model_card(folder: str | os.PathLike[str], results: Mapping[str, Any], facts: ModelCardFacts) -> Path:
    """Render a model card and write it as the folder's `README.md`, atomically.

    Args:
        folder: Folder of the checkpoint; made if missing.
        results: What `write_results` wrote: rows, seed, config, versions.
        facts: Everything that is not a number.

    Returns:
        `pathlib.Path`: The card.

    Raises:
        ValueError: If the card must not be published (see `render_model_card`); nothing is written.
        FileNotFoundError: If the template cannot be found.
    """
    return atomic_write_text(Path(folder) / "README.md", render_model_card(results, facts))


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    commit_message: str = "Add captioner",
) -> str:
    """Upload a checkpoint folder with its card; the folder itself is never touched.

    Args:
        folder: Folder with weights, processor and `README.md`.
        repo_id: `owner/name`, or `name` for the token's owner; created if missing.
        private: Whether a new repository is private.
        token: Of the Hub; by default the one stored by `hf auth login`.
        commit_message: Message of the commit.

    Returns:
        `str`: Address of the commit.

    Raises:
        FileNotFoundError: If the folder lacks weights or card.
        RuntimeError: If the Hub cannot be reached or refuses; the checkpoint stays where it is.
    """
    folder = Path(folder)
    for pattern in ("README.md", "*.safetensors"):
        if not list(folder.glob(pattern)):
            raise FileNotFoundError(
                f"{folder} has no {pattern}, so it is not complete. Save the captioner and its card first."
            )
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        # Trainer state and optimizers of checkpoints in between are nobody's business.
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=commit_message,
            ignore_patterns=["checkpoint-*/**", "*.bin", "*.pt", "*.pth"],
        )
    except Exception as error:  # the client raises a dozen unrelated types for a failed connection
        raise RuntimeError(
            f"Pushing {folder} to {repo_id!r} failed: {error}. The checkpoint is still in {folder}. Once the Hub answers, repeat with "
            f"hf_captionrl.hub.push_folder({str(folder)!r}, {repo_id!r})."
        ) from error
    return str(commit)


def _template_folder() -> Path:
    """`hub_cards/` of the checkout, or where a wheel puts it."""
    folders = (
        Path(__file__).parents[1] / "hub_cards",
        Path(sysconfig.get_path("data"), "share/hf_captionrl/hub_cards"),
    )
    for folder in folders:
        if (folder / "model.md").is_file():
            return folder
    raise FileNotFoundError(
        f"hub_cards/model.md is neither in {folders[0]} nor in {folders[1]}. Install from a checkout: pip install -e ."
    )


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
                dataset_type=facts.dataset,
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
    data = ModelCardData(
        language=facts.language,
        license=facts.license,
        library_name="transformers",
        pipeline_tag="image-to-text",
        base_model=facts.base_model if re.fullmatch(r"[\w.-]+/[\w.-]+", facts.base_model) else None,
        tags=["image-captioning", "hf_captionrl", facts.objective, *facts.tags],
        model_name=facts.model_id.rpartition("/")[2],
        eval_results=evaluations,
    )
    return data.to_yaml()


def _python_literal(value: Any) -> str:
    """A value as Python source on one line; escapes keep quotes, line breaks and backticks from ending it."""
    if isinstance(value, bool | int | float) or value is None:
        return repr(value)
    return json.dumps(str(value), ensure_ascii=True).replace("`", "\\u0060")
