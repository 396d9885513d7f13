"""Trains several captioners from one start and compares them in one table."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_captionrl.apps.experiments.arguments import DataArguments, ModelArguments, describe
from hf_captionrl.apps.experiments.data import describe_data
from hf_captionrl.apps.experiments.logs import (
    COLLAPSED_FOLDER,
    checkpoint_lines,
    find_collapse,
    print_checkpoints,
    print_heading,
    silence_libraries,
    use_log_lines,
    withhold,
)
from hf_captionrl.captioners import Captioner
from hf_captionrl.data import open_still
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.evaluation.options import EMBEDDED, EvaluationArguments
from hf_captionrl.evaluation.pages import GalleryCaption, GalleryItem, write_gallery
from hf_captionrl.evaluation.plots import CURVES, write_curves
from hf_captionrl.hub import (
    ModelCardFacts,
    local_base_model,
    public_values,
    push_folder,
    write_manifest,
    write_model_card,
)
from hf_captionrl.metrics.columns import COLUMNS, DEGENERATE, Column
from hf_captionrl.metrics.table import print_table, write_results
from hf_captionrl.scenes import check
from hf_captionrl.trainers import CaptionConfig, CaptionTrainer
from hf_captionrl.trainers.checkpoints import begin_run, has_checkpoint
from hf_captionrl.trainers.guard import GuardThresholds
from hf_captionrl.utils.io import FolderLock, write_json

# --- Learning curves of a run: captions of the test split, measured at every evaluation ------------------------------

_PREFIX = "test_"


def measured(name: str, captions: list[str], evaluator: Evaluator, trainer: CaptionTrainer) -> dict[str, Any]:
    """The row of a captioner, which also captions the images of bags that are not in the test split.

    Args:
        name (`str`): Its row.
        captions (`list[str]`): Of the test split.
        evaluator ([`Evaluator`]): Computes the row.
        trainer ([`CaptionTrainer`]): Has the captioner.

    Returns:
        `dict`: The row.
    """
    more = [] if evaluator.bag_images is None else trainer.generate_captions(evaluator.bag_images)
    return evaluator.row(name, captions, more_captions=more)


class LearningCurve(TrainerCallback):
    """Measures captions of the test split at every evaluation; selects nothing.

    The points are in `trainer.state.log_history`, so a resumed run has those before the interruption.
    """

    def __init__(self, trainer: CaptionTrainer, evaluator: Evaluator, test: datasets.Dataset) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.test = test

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        captions = self.trainer.generate_captions(self.test)
        row = measured("learning curve", captions, self.evaluator, self.trainer)
        point = {f"{_PREFIX}{key}": value for key, value in curve_point(row).items()}
        state.log_history.append({**point, "step": state.global_step, "epoch": state.epoch})


def curve_point(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a results row that a learning curve shows, and CIDEr-D against the references of `test_references`."""
    keys = [*(key for key, _ in CURVES), "more_cider_d"]
    return {key: row[key] for key in keys if row.get(key) is not None}


def curve_points(first: Mapping[str, Any], state: TrainerState) -> list[dict[str, float]]:
    """A run's points: the row of the captioner that it starts from, and one per evaluation."""
    points = [{**curve_point(first), "step": 0, "epoch": 0.0}]
    for entry in state.log_history:
        if f"{_PREFIX}length" in entry:
            found = {key.removeprefix(_PREFIX): value for key, value in entry.items() if key.startswith(_PREFIX)}
            points.append({**found, "step": entry["step"], "epoch": entry["epoch"] or 0.0})
    return points


# --- Writes the report of a recipe: table, gallery, curves -----------------------------------------------------------


def write_report(
    output_dir: str | os.PathLike[str],
    evaluator: Evaluator,
    rows: list[dict[str, Any]],
    captions: dict[str, list[str]],
    histories: dict[str, list[dict[str, float]]],
    *,
    title: str,
    seed: int,
    config: dict[str, Any],
    gallery_size: int,
    columns: Sequence[Column] = COLUMNS,
    selected: dict[str, Any] | None = None,
    learning_curves: dict[str, list[dict[str, float]]] | None = None,
    note: str = "",
) -> Path:
    """Write results.json, results.md, gallery.html and curves.png, and print the table.

    Args:
        output_dir: Folder to write to.
        evaluator: Has the test split.
        rows: Rows of the table.
        captions: Row name to captions of the test split.
        histories: Row name to evaluations during training.
        title: Title of the table.
        seed: Seed of the run.
        config: Arguments of the run by name.
        gallery_size: Images in the gallery.
        columns: Columns of the table.
        selected: Row name to the selected checkpoint.
        learning_curves: Row name to points of its learning curve; drawn as learning_curves.png.
        note: Sentences above the gallery.

    Returns:
        `pathlib.Path`: The JSON file.
    """
    folder = Path(output_dir)
    more = {"selected": selected, "learning_curves": learning_curves}
    path = write_results(folder, rows, seed=seed, config=config, title=title, columns=columns, more=more)
    chosen = random.Random(seed).sample(range(len(evaluator.dataset)), min(gallery_size, len(evaluator.dataset)))
    if chosen:
        items = [gallery_item(evaluator, index, captions) for index in sorted(chosen)]
        write_gallery(folder / "gallery.html", items, title=title, note=note)
    if any(histories.values()):
        write_curves(folder / "curves.png", histories)
    if learning_curves:
        measured = {key for points in learning_curves.values() for point in points for key in point}
        panels = [panel for panel in CURVES if panel[0] in measured]
        write_curves(folder / "learning_curves.png", learning_curves, x="step", panels=panels)
    print_table(rows, title=title, columns=columns_to_print(rows, columns))
    return path


def columns_to_print(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns, with the share of degenerate captions first if it exceeds the guard's limit: a terminal may hide the last."""
    limit = GuardThresholds().max_degenerate or 0.0
    if not any((row.get(DEGENERATE.key) or 0.0) > limit for row in rows):
        return tuple(columns)
    return (DEGENERATE, *(column for column in columns if column.key != DEGENERATE.key))


def gallery_item(evaluator: Evaluator, index: int, captions: dict[str, list[str]]) -> GalleryItem:
    """One image of the gallery with its captions; claims are checked if the facts are known."""
    row = evaluator.dataset[index]
    shown = []
    for name, mine in captions.items():
        right: list[str] = []
        wrong: list[str] = []
        if evaluator.facts is not None:
            result = check(mine[index], evaluator.facts[index])
            right, wrong = [c.text for c in result.right], [c.text for c in result.wrong]
        ranks = evaluator.ranks.get(name)
        rank = None if ranks is None else int(ranks[index])
        shown.append(GalleryCaption(name, mine[index], right, wrong, rank, len(mine)))
    return GalleryItem(open_still(row), row["image_id"], shown, list(row["captions"]))


# --- Writes card, manifest and results of a finished model, and pushes it --------------------------------------------


def check_hub_strategy(config: Any) -> None:
    """Refuse settings of the push that would upload checkpoints, before anything is written."""
    strategy = getattr(config.hub_strategy, "value", config.hub_strategy)
    if config.push_to_hub and strategy in ("checkpoint", "all_checkpoints"):
        raise ValueError(
            f"hub_strategy is {strategy!r}, but checkpoints contain the optimizer as a pickle, which is never "
            "uploaded. Use 'end' or 'every_save': the finished model is pushed once, with its card."
        )


def defer_push(config: CaptionConfig, held_out_name: str | None) -> bool:
    """Disable the Trainer's own push: the card needs the table, so a recipe pushes at its end.

    Args:
        config ([`CaptionConfig`]): Its `push_to_hub` is set to False.
        held_out_name (`str`, *optional*): Name of the held-out scorer.

    Returns:
        `bool`: Whether to push at the end.

    Raises:
        ValueError: If a push is requested without a held-out scorer, or with a `hub_strategy` that uploads checkpoints.
    """
    check_hub_strategy(config)
    push, config.push_to_hub = config.push_to_hub, False
    if push and held_out_name in (None, "none"):
        raise ValueError(
            "push_to_hub needs a held-out scorer, because the card must contain retrieval numbers. Use "
            "--held_out_scorer_name_or_path."
        )
    return push


def write_publication(
    results_path: Path,
    captioner: Captioner,
    captions: list[str],
    row: str,
    evaluator: Evaluator,
    arguments: tuple[Any, ...],
    splits: datasets.DatasetDict,
    objective: dict[str, Any],
) -> None:
    """Write card, manifest and results into the folder of the finished model."""
    if evaluator.held_out_scorer is None:
        raise ValueError(
            "There is no held-out scorer, but the card must contain retrieval numbers. Set "
            "held_out_scorer_name_or_path."
        )
    model_args: ModelArguments = next(a for a in arguments if isinstance(a, ModelArguments))
    data_args: DataArguments = next(a for a in arguments if isinstance(a, DataArguments))
    config: CaptionConfig = next(a for a in arguments if isinstance(a, CaptionConfig))
    output_dir, name = results_path.parent, data_args.dataset_name
    folder = output_dir / "model"
    results = json.loads(results_path.read_text(encoding="utf-8"))
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not os.path.exists(name)
    card = ModelCardFacts(
        model_id=config.hub_model_id or output_dir.name,
        base_model=model_args.public_name,
        family=captioner.family,
        dataset=f"hf_captionrl {name}" if name in EMBEDDED else Path(name).name,
        dataset_description=describe_data(data_args, splits),
        dataset_id=name if on_hub else None,
        dataset_revision=data_args.dataset_revision if on_hub else None,
        scorer=evaluator.held_out_scorer.signature,
        scorer_max_text_tokens=evaluator.held_out_scorer.max_text_tokens,
        truncated_fraction=evaluator.held_out_scorer.count_truncated(captions) / len(captions),
        generation={"num_beams": config.generation_num_beams, "max_new_tokens": config.generation_max_new_tokens},
        prompt=captioner.prompt,
        row=row,
        license=model_args.license,
        # An adapter of a local base model is merged into it for the push.
        is_adapter=(folder / "adapter_config.json").is_file() and local_base_model(folder) is None,
        base_revision=model_args.model_revision or "main",
        **objective,
    )
    write_model_card(folder, results, card)
    eval_args = next((a for a in arguments if isinstance(a, EvaluationArguments)), None)
    # Local photographs are uploaded only on request.
    shows_images = name in EMBEDDED or on_hub or (eval_args is not None and eval_args.push_gallery)
    write_manifest(
        folder,
        command=sys.argv,
        seeds={"seed": config.seed, "data_seed": config.data_seed},
        data={
            "name": name,
            "config": data_args.dataset_config,
            "revision": data_args.dataset_revision,
            "public_images": shows_images,
            "rows": {split: len(rows) for split, rows in splits.items()},
            "fingerprints": {split: rows._fingerprint for split, rows in splits.items()},
        },
        config=describe(arguments),
    )
    write_json(folder / "results.json", public_values(results))
    for file in ("results.md", *(["gallery.html"] if shows_images else []), "curves.png"):
        if (output_dir / file).exists():
            shutil.copy(output_dir / file, folder / file)


def push_model(folder: Path, config: CaptionConfig) -> str:
    """Push the finished model to the configured repository."""
    return push_folder(
        folder,
        config.hub_model_id or folder.parent.name,
        private=True if config.hub_private_repo is None else config.hub_private_repo,
        token=config.hub_token,
        revision=config.hub_revision,
    )


# --- Trains several captioners from one start and compares them in one table -----------------------------------------

START = "MLE"
"""Row name of the captioner that every run starts from."""


@dataclass
class Run:
    """One training.

    Args:
        name (`str`): Its row in the table.
        folder (`str`): Folder of its checkpoints, relative to the recipe's folder; `model` for the recipe's own run.
        make (`Callable`): Builds the trainer.
        is_trained (`bool`): False for a captioner that is only evaluated.
        starts_from (`str`): Name of the run whose captioner this run continues; by default the initial captioner.
        settings (`dict`): The arguments in which the runs of the comparison differ, with this run's values.
    """

    name: str
    folder: str
    make: Callable[[], CaptionTrainer]
    is_trained: bool = True
    starts_from: str = START
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Comparison:
    """Results of the runs.

    Args:
        rows (`list[dict]`): Rows of the table.
        captions (`dict[str, list[str]]`): Row name to captions of the test split.
        histories (`dict[str, list[dict]]`): Row name to evaluations during training.
        selected (`dict[str, dict]`): Row name to the selected checkpoint, if one was selected.
        captioner ([`Captioner`], *optional*): The captioner of the recipe's own run, after training.
        main (`str`): Row name of the recipe's own run.
        is_main_process (`bool`): Whether this process writes the report.
        settings (`dict[str, dict]`): Run name to the arguments in which the runs differ.
        collapsed (`dict[str, str]`): Row name to the reason why the model must not be delivered.
        curves (`dict[str, list[dict]]`): Row name to the points of its learning curve, if these were asked for.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    captions: dict[str, list[str]] = field(default_factory=dict)
    histories: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    selected: dict[str, dict[str, Any]] = field(default_factory=dict)
    captioner: Captioner | None = None
    main: str = START
    is_main_process: bool = True
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    collapsed: dict[str, str] = field(default_factory=dict)
    curves: dict[str, list[dict[str, float]]] = field(default_factory=dict)


def plan_runs(config: Any, listed: Mapping[str, Mapping[str, Any]], *, own: str) -> dict[str, Any]:
    """One configuration per run: a copy of the recipe's with exactly the listed changes; no other field changes.

    Args:
        config (`TrainingArguments`): The recipe's configuration; `output_dir` is the recipe's folder.
        listed (`Mapping`): Row name to {argument: value}, in the order of the table.
        own (`str`): Row name of the recipe's own run, whose folder is `model`.

    Returns:
        `dict`: Row name to a copy of the configuration.

    Raises:
        ValueError: If a run names an argument that the configuration does not have.
    """
    runs = {}
    for name, changes in listed.items():
        run = copy.deepcopy(config)  # TrainingArguments' __post_init__ must not run a second time
        for argument, value in changes.items():
            if not hasattr(run, argument):
                raise ValueError(
                    f"The run {name!r} sets {argument!r}, which the trainer's configuration does not have. Use one of its arguments."
                )
            setattr(run, argument, value)
        slug = "".join(c if c.isalnum() or c == "." else "-" for c in name.lower()).strip("-")
        run.output_dir = str(Path(str(config.output_dir)) / ("model" if name == own else f"model-{slug}"))
        runs[name] = run
    return runs


def settings_of(configs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments in which runs differ.

    Args:
        configs: The runs' configurations by name.

    Returns:
        `dict[str, dict[str, Any]]`: For each run, the values of these arguments without `output_dir`.
    """
    found = {name: {f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for name, c in configs.items()}
    first = next(iter(found.values()))
    differing = [key for key in first if any(values[key] != first[key] for values in found.values())]
    return {name: {key: values[key] for key in differing if key != "output_dir"} for name, values in found.items()}


@contextlib.contextmanager
def alone_in(config: Any) -> Iterator[None]:
    """Lock the recipe's folder while it is written.

    Args:
        config (`TrainingArguments`): `output_dir` and the rank of the process are used.

    Yields:
        `None`: Nothing.

    Raises:
        ValueError: If another run uses the folder, or `hub_strategy` is not supported.
        OSError: If the folder is not writable.
    """
    check_hub_strategy(config)
    silence_libraries(progress_bars=not config.disable_tqdm)
    with FolderLock(config.output_dir) if config.process_index == 0 else contextlib.nullcontext():
        yield


def should_resume(config: CaptionConfig) -> bool:
    """Whether to resume an interrupted recipe.

    Args:
        config ([`CaptionConfig`]): `resume_from_checkpoint` must be a yes or no.

    Returns:
        `bool`: True for yes.

    Raises:
        ValueError: If it names a checkpoint, because there are several trainings.
    """
    value = str(config.resume_from_checkpoint or "false").lower()
    if value not in ("true", "false"):
        raise ValueError(
            f"resume_from_checkpoint is {config.resume_from_checkpoint!r}. This recipe trains several captioners, "
            "each with its own checkpoints. Use 'true' to resume each from its last checkpoint, in the same output_dir."
        )
    return value == "true"


def train_runs(
    runs: Sequence[Run], evaluator: Evaluator, test: datasets.Dataset, *, resume: bool, output_dir: Path
) -> Comparison:
    """Train the runs in order, and caption the test split with the initial captioner and with each trained one.

    The recipe's own model is not saved if its captions have collapsed.

    Args:
        runs (`Sequence[Run]`): In the order of the table.
        evaluator ([`Evaluator`]): Computes the rows.
        test (`datasets.Dataset`): The test split.
        resume (`bool`): Resume each run from its last checkpoint, if there is one.
        output_dir (`pathlib.Path`): The recipe's folder.

    Returns:
        [`Comparison`]: With the row of the references at the end.
    """
    result = Comparison(settings={run.name: dict(run.settings) for run in runs if run.settings})
    before: dict[str, dict[str, float]] = {}  # the first point of a curve: the captioner before training
    for number, run in enumerate(runs):
        trainer = run.make()
        use_log_lines(trainer)
        if run.is_trained and trainer.is_world_process_zero():
            settings = ", ".join(f"{key}={value}" for key, value in run.settings.items())
            print_heading(f"{number + 1} of {len(runs)}: {run.name}" + (f" ({settings})" if settings else ""))
        if number == 0 and not resume and trainer.is_world_process_zero():
            # Remove old checkpoints of all runs before the first training: after a kill, the other runs must not resume
            # from those of an earlier start.
            for each in runs:
                begin_run(output_dir / each.folder)
        if not result.captions:
            result.captions[START] = trainer.generate_captions(test)
            result.rows.append(measured(START, result.captions[START], evaluator, trainer))
        if run.is_trained:
            if run.starts_from not in before:
                before[run.starts_from] = trainer.evaluate()
            if evaluator.learning_curves:
                trainer.add_callback(LearningCurve(trainer, evaluator, test))
            trainer.train(resume_from_checkpoint=resume and has_checkpoint(output_dir / run.folder))
            if evaluator.learning_curves:
                first = next(row for row in result.rows if row["name"] == run.starts_from)
                points = curve_points(first, trainer.state)
                if len(points) > 1:  # a run without evaluations has no curve
                    result.curves[run.name] = points
            history = [entry for entry in trainer.state.log_history if "eval_length" in entry]
            result.histories[run.name] = [
                {"epoch": e.get("epoch") or 0.0, "length": e["eval_length"], "recall_at_1": e.get("eval_recall_at_1")}
                for e in ([{**before[run.starts_from], "epoch": 0.0}, *history])
            ]
            result.captions[run.name] = trainer.generate_captions(test)
            result.rows.append(measured(run.name, result.captions[run.name], evaluator, trainer))
            _note_checkpoint(result, run.name, trainer)
        is_withheld = run.folder == "model" and run.name in result.collapsed
        if not is_withheld:
            trainer.save_model()
        elif trainer.is_world_process_zero():
            withhold(output_dir / run.folder)
        if run.folder == "model":
            result.captioner = None if is_withheld else trainer.captioner
            result.main = run.name if run.is_trained else START
        result.is_main_process = trainer.is_world_process_zero()
    row, _ = evaluator.reference_row()
    result.rows.append(row)
    return result


def _note_checkpoint(result: Comparison, name: str, trainer: CaptionTrainer) -> None:
    """Record the selected checkpoint, and in the last row whether the captions have collapsed."""
    reason = find_collapse(trainer, result.captions[name])
    if reason is not None:
        result.collapsed[name] = reason
        result.rows[-1]["note"] = f"the captions have collapsed. {reason}"
    if trainer.selection is not None:
        result.selected[name] = trainer.selection


def finish(
    result: Comparison,
    evaluator: Evaluator,
    arguments: tuple[Any, ...],
    splits: datasets.DatasetDict,
    *,
    title: str,
    push: bool,
    objective: dict[str, Any],
    columns: Sequence[Column] = COLUMNS,
    more_files: Sequence[str] = (),
) -> Path:
    """Write table, gallery, curves and card, push the model if asked to, and print which checkpoints were selected.

    Args:
        result ([`Comparison`]): Results of the runs.
        evaluator ([`Evaluator`]): Has the test split and the held-out scorer.
        arguments (`tuple`): The recipe's dataclasses: those of model, data and evaluation first, the trainer's last.
        splits (`datasets.DatasetDict`): The data, for the card.
        title (`str`): Title of the table.
        push (`bool`): Push the model with its card to the Hub.
        objective (`dict`): Fields of the card that describe the objective.
        columns (`Sequence[Column]`): Columns of the table.
        more_files (`Sequence[str]`): Names of further files in the folder.

    Returns:
        `pathlib.Path`: results.json.

    Raises:
        SystemExit: If the captions of the recipe's own run have collapsed, so that there is no model.
    """
    found: dict[type, Any] = {}
    for kind in (EvaluationArguments, CaptionConfig):
        found[kind] = next(a for a in arguments if isinstance(a, kind))
    eval_args, config = found.values()
    output_dir = Path(config.output_dir)
    delivery = checkpoint_lines(result.selected, result.main) if result.main in result.histories else []
    path = write_report(
        output_dir,
        evaluator,
        result.rows,
        result.captions,
        result.histories,
        title=title,
        seed=config.seed,
        config=describe(arguments) | ({"runs": result.settings} if result.settings else {}),
        gallery_size=eval_args.gallery_size,
        columns=(*columns, *evaluator.columns),
        selected=result.selected,
        learning_curves=result.curves,
        note=" ".join(delivery),
    )
    if evaluator.held_out_scorer is not None and result.captioner is not None:
        captions = result.captions[result.main]
        facts = {**objective, "selection": " ".join(delivery)}
        write_publication(path, result.captioner, captions, result.main, evaluator, arguments, splits, facts)
    is_collapsed = result.main in result.collapsed
    drawn = ["curves.png", *(["learning_curves.png"] if result.curves else [])]
    files = ", ".join(["results.json", "results.md", "gallery.html", *drawn, *more_files])
    print(
        f"Written to {output_dir}: {files}; " + ("there is no model" if is_collapsed else "the checkpoint is model/")
    )
    if push and not is_collapsed:
        print(f"Pushed: {push_model(output_dir / 'model', config)}")
    if result.histories:
        print_checkpoints(result.selected, list(result.histories), result.main)
    if is_collapsed:
        raise SystemExit(
            f"The captions of {result.main!r} have collapsed, so model/ was not written. Its checkpoints are in "
            f"{COLLAPSED_FOLDER}/, and results.json has the reason. Use a lower learning_rate, smaller bags, cider_weight, or "
            "beta, as docs/self_retrieval.md says."
        )
    return path
