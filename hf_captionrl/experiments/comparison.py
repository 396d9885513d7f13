"""Trains several captioners from one start and compares them in one table."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.captioners import Captioner
from hf_captionrl.evaluate_modules.results_columns import COLUMNS
from hf_captionrl.evaluation.arguments import EvaluationArguments
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.experiments.arguments import describe
from hf_captionrl.experiments.collapsed_runs import (
    COLLAPSED_FOLDER,
    checkpoint_lines,
    find_collapse,
    print_checkpoints,
    withhold,
)
from hf_captionrl.experiments.learning_curves import LearningCurve, curve_points, measured
from hf_captionrl.experiments.log_lines import print_heading, silence_libraries, use_log_lines
from hf_captionrl.experiments.publication import check_hub_strategy, defer_push, push_model, write_publication
from hf_captionrl.experiments.report import write_report
from hf_captionrl.io import FolderLock
from hf_captionrl.reports.table import Column
from hf_captionrl.trainers import CaptionConfig, CaptionTrainer
from hf_captionrl.trainers.checkpoints import begin_run, has_checkpoint

__all__ = [
    "START",
    "Comparison",
    "Run",
    "alone_in",
    "defer_push",
    "finish",
    "measured",
    "plan_runs",
    "settings_of",
    "should_resume",
    "train_runs",
]

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
