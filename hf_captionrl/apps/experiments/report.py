"""Trains several captioners from one start and compares them in one table."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_captionrl.apps.experiments.arguments import (
    MODEL_OPTIONS,
    PARTS,
    SCORERS,
    DataArguments,
    ModelArguments,
    configuration_line,
    describe,
)
from hf_captionrl.apps.experiments.data import describe_data, load_data
from hf_captionrl.captioners import Captioner
from hf_captionrl.data import open_still
from hf_captionrl.evaluation.evaluator import Evaluator
from hf_captionrl.evaluation.options import EMBEDDED, EvaluationArguments, optional_scorer
from hf_captionrl.evaluation.pages import GalleryCaption, GalleryItem, Mark, write_gallery
from hf_captionrl.evaluation.plots import CURVES, DOSE_CURVES, write_curves
from hf_captionrl.hub import (
    ModelCardFacts,
    local_base_model,
    public_values,
    push_folder,
    write_manifest,
    write_model_card,
)
from hf_captionrl.metrics.columns import COLUMNS, DEGENERATE, Column, by_reward_scorer
from hf_captionrl.metrics.suites import SuiteRow
from hf_captionrl.metrics.table import print_table, write_results
from hf_captionrl.scenes.truth_checker import check, mark_caption
from hf_captionrl.trainers import CaptionConfig, CaptionTrainer
from hf_captionrl.trainers.checkpoints import ExactResumeTrainer, newest_checkpoint, note_collapse, selection_line
from hf_captionrl.trainers.dose import METRIC
from hf_captionrl.trainers.guard import GuardThresholds
from hf_captionrl.utils.io import FolderLock, folded, write_json, write_jsonl
from hf_captionrl.utils.model_files import find_file, hub_name, model_path, read_config
from hf_captionrl.utils.options import check_values

# --- Learning curves of a run: captions of the test split, measured at every evaluation ------------------------------

_PREFIX = "test_"


def measured(
    name: str, captions: list[str], evaluator: Evaluator, trainer: CaptionTrainer, **decoding: Any
) -> dict[str, Any]:
    """The row of a captioner, which also captions the images of bags that are not in the test split."""
    more = [] if evaluator.bag_images is None else trainer.generate_captions(evaluator.bag_images, **decoding)
    return evaluator.row(name, captions, more_captions=more)


class LearningCurve(TrainerCallback):
    """Measures captions of the test split at every evaluation, into the log that a resumed run keeps; selects nothing."""

    def __init__(self, trainer: CaptionTrainer, evaluator: Evaluator, test: datasets.Dataset) -> None:
        self.trainer, self.evaluator, self.test = trainer, evaluator, test

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        row = measured("learning curve", self.trainer.generate_captions(self.test), self.evaluator, self.trainer)
        point = {f"{_PREFIX}{key}": value for key, value in curve_point(row).items()}
        state.log_history.append({**point, "step": state.global_step, "epoch": state.epoch})


def curve_point(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a results row that a learning curve shows, and CIDEr-D against the references of `test_references`."""
    keys = [*(key for key, _ in CURVES), "more_cider_d"]
    return {key: row[key] for key in keys if row.get(key) is not None}


# --- Writes card, manifest and results of a finished model -----------------------------------------------------------


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
    scorer: Any = evaluator.held_out_scorer
    model_args: ModelArguments = _of(ModelArguments, arguments)
    data_args: DataArguments = _of(DataArguments, arguments)
    config: CaptionConfig = _of(CaptionConfig, arguments)
    output_dir, name = results_path.parent, data_args.dataset_name
    folder = output_dir / "model"
    results = json.loads(results_path.read_text(encoding="utf-8"))
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not os.path.exists(name)
    card = ModelCardFacts(
        model_id=config.hub_model_id or output_dir.name,
        base_model=model_args.public_name,
        dataset=f"hf_captionrl {name}" if name in EMBEDDED else Path(name).name,
        dataset_description=describe_data(data_args, splits),
        dataset_id=name if on_hub else None,
        license=model_args.license,
        family=captioner.family,
        scorer=None if scorer is None else scorer.signature,
        scorer_max_text_tokens=None if scorer is None else scorer.max_text_tokens,
        truncated_fraction=None if scorer is None else scorer.count_truncated(captions) / len(captions),
        generation={"num_beams": config.generation_num_beams, "max_new_tokens": config.generation_max_new_tokens},
        prompt=captioner.prompt,
        row=row,
        # An adapter of a local base model is merged into it for the push.
        is_adapter=(folder / "adapter_config.json").is_file() and local_base_model(folder) is None,
        base_revision=model_args.model_revision or "main",
        **objective,
    )
    write_model_card(folder, results, card)
    shows_images = name in EMBEDDED or on_hub  # local photographs are not uploaded
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


def _of(kind: type, arguments: tuple[Any, ...]) -> Any:
    return next(a for a in arguments if isinstance(a, kind))


# --- Trains several captioners from one start and compares them in one table -----------------------------------------

START = "MLE"  # row name of the captioner that every run starts from
GALLERY_SIZE = 48  # images of gallery.html


@dataclass
class Run:
    """One training."""

    name: str  # its row in the table
    config: Any  # of its trainer; its folder is `model` in the recipe's folder for the recipe's own run
    make: Callable[[Any], CaptionTrainer]  # builds the trainer from the configuration
    starts_from: str | None = START  # run whose captioner this run continues; None: it trains a new one


@dataclass
class Comparison:
    """Results of the runs; dictionaries are by row name."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # of the table
    captions: dict[str, list[str]] = field(default_factory=dict)  # of the test split
    histories: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # evaluations during training
    selected: dict[str, dict[str, Any]] = field(default_factory=dict)  # the selected checkpoint, if there is one
    captioner: Captioner | None = None  # of the recipe's own run, after training
    main: str = START  # row of the recipe's own run
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # the arguments in which the runs differ
    collapsed: dict[str, str] = field(default_factory=dict)  # why the model must not be delivered
    curves: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # learning curves, if there are any


def is_trained(config: Any) -> bool:
    """Whether a run trains; else it only evaluates its captioner."""
    return bool(config.num_train_epochs > 0 or config.max_steps > 0)


def plan_runs(
    config: Any, planned: Iterable[tuple[str | None, Mapping[str, Any]]], name_of: Callable[[Any], str]
) -> dict[str, Any]:
    """One configuration per row: a copy of the recipe's with exactly the planned changes; no other field changes.

    A row without a name is called as `name_of` says. Folders are in the recipe's `output_dir`; that of the recipe's own run is
    `model`. A row that is planned twice stands where it was planned last.
    """
    runs: dict[str, Any] = {}
    for row, changes in planned:
        run = copy.deepcopy(config)  # TrainingArguments' __post_init__ must not run a second time
        for argument, value in changes.items():
            if not hasattr(run, argument):
                raise ValueError(f"The run {row!r} sets the unknown argument {argument!r}. Use one of the trainer's.")
            setattr(run, argument, value)
        run.check() if hasattr(run, "check") else check_values(run)
        name = name_of(run) if row is None else row
        folder = "model" if name == name_of(config) else f"model-{_slug(name)}"
        run.output_dir = str(Path(str(config.output_dir)) / folder)
        runs.pop(name, None)
        runs[name] = run
    return runs


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in name.lower()).strip("-")


def settings_of(configs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments in which runs differ, without `output_dir`, with the values of each run."""
    settings = {name: {f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for name, c in configs.items()}
    first = next(iter(settings.values()))
    differing = [key for key in first if any(values[key] != first[key] for values in settings.values())]
    return {name: {key: values[key] for key in differing if key != "output_dir"} for name, values in settings.items()}


def alone_in_folder(train: Callable[..., Path]) -> Callable[..., Path]:
    """Lock the recipe's folder while a function of the recipe's arguments, the trainer's last, writes to it.

    The Trainer's own push is disabled, because the card needs the table: `finish` pushes if `config.pushes`.
    """

    @functools.wraps(train)
    def alone(arguments: tuple[Any, ...], **kwargs: Any) -> Path:
        config = arguments[-1]
        if str(config.resume_from_checkpoint).lower() not in ("none", "true"):
            raise ValueError("The same command resumes. Leave resume_from_checkpoint out.")
        config.pushes, config.push_to_hub = config.push_to_hub, False
        for part in arguments:
            if isinstance(part, EvaluationArguments):
                part.resolve(_of(DataArguments, arguments).dataset_name)
        if config.process_index == 0:
            print(folded(configuration_line(arguments)), flush=True)
        with FolderLock(config.output_dir) if config.process_index == 0 else contextlib.nullcontext():
            return train(arguments, **kwargs)

    return alone


class _Printer(TrainerCallback):
    """Logs in lines of the terminal's width, without the speed of each evaluation."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        bar = getattr(self, "training_bar", None)  # neither prints before training, when max_steps is 0
        if bar is not None or (args.disable_tqdm and state.is_local_process_zero and state.max_steps):
            numbers = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in logs.items()}
            texts = [f"{k}={v}" for k, v in numbers.items() if not k.endswith(("_runtime", "_per_second", "_flos"))]
            (print if bar is None else bar.write)(folded(f"step {state.global_step}: {', '.join(texts)}"))


class _Progress(_Printer, ProgressCallback):
    """The same beside a progress bar."""


def fold_logs(trainer: Any) -> None:
    """Replace the Trainer's printing of logs by lines of the terminal's width; not in a notebook."""
    for theirs, ours in ((ProgressCallback, _Progress), (PrinterCallback, _Printer)):
        if trainer.pop_callback(theirs):
            trainer.add_callback(ours())


def train_or_resume(trainer: ExactResumeTrainer) -> None:
    """Train from the last checkpoint in the trainer's folder, if it has one and is not to start anew; says what happens.

    A run whose last checkpoint is that of its last step restores it, with the selected weights, and trains no further.
    """
    args, folder = trainer.args, Path(str(trainer.args.output_dir))
    if args.save_total_limit == 1 and args.load_best_model_at_end:
        args.save_total_limit = 2  # with 1, the Trainer removes the last one in the end, which says that all is done
    last = newest_checkpoint(folder)
    resumes = last is not None and not args.overwrite_output_dir
    if last is not None and trainer.is_world_process_zero():
        state = TrainerState.load_from_json(str(Path(last) / TRAINER_STATE_NAME))
        has_epochs = (state.epoch or 0.0) >= args.num_train_epochs
        is_over = state.global_step >= args.max_steps if args.max_steps > 0 else has_epochs
        is_over |= trainer.dose is not None and trainer.dose.is_over(state)
        text = f"{last}: not trained again." if is_over else f"Resuming from step {state.global_step:,}, {last}."
        anew = f"Starting anew: the checkpoints in {folder} are moved aside when the first one is saved."
        print(folded(f"{text} --overwrite_output_dir starts anew." if resumes else anew), flush=True)
    fold_logs(trainer)
    trainer.train(resume_from_checkpoint=last if resumes else None)


# --- Which checkpoint of a run is delivered: reported at the end, and none if the captions have collapsed ------------

COLLAPSED_FOLDER = "model-collapsed"  # the checkpoints of a recipe's own run whose captions have collapsed


def withhold(folder: Path) -> None:
    """Leave no model in a folder, not even that of an earlier start; its checkpoints are moved to `COLLAPSED_FOLDER`."""
    moved = folder.with_name(COLLAPSED_FOLDER)
    shutil.rmtree(moved, ignore_errors=True)
    if folder.is_dir():
        for file in [path for path in folder.iterdir() if not path.is_dir()]:
            file.unlink()
        folder.rename(moved)


# --- The steps of a recipe: models and data, runs, report ------------------------------------------------------------

CONFIGURATIONS = ("config.json", "adapter_config.json", "open_clip_config.json")


def check_models(arguments: tuple[Any, ...]) -> None:
    """Refuse a model that is not there before the data are read."""
    for part, option in itertools.product(arguments, MODEL_OPTIONS):
        name = getattr(part, option, None) or "none"
        is_unused = option in PARTS and getattr(part, "model_name_or_path", None)
        if name == "none" or name.startswith("open_clip:") or is_unused or os.path.exists(model_path(name)):
            continue  # what is in a folder, its loader tells
        if hub_name(name) is None:
            raise FileNotFoundError(f"{option} is {name!r}, and there is no such folder. Train that model first.")
        revision = getattr(part, "model_revision", None) if option == "model_name_or_path" else None
        if not any(find_file(name, file, revision) for file in CONFIGURATIONS):
            try:
                read_config(name, revision)  # which says why
            except OSError as error:
                if option in SCORERS:
                    error.args = (f"{error} Use --scorer none to train without a scorer.",)
                raise


def prepare(
    arguments: tuple[Any, ...],
    *,
    is_training: bool = True,
    make_evaluator: Callable[..., Evaluator] = Evaluator.from_arguments,
) -> tuple[datasets.DatasetDict, Any, Evaluator]:
    """Data, scorer that selects or rewards, and evaluator of a recipe; the table shows retrieval by that scorer, too, if it is another."""
    eval_args: EvaluationArguments = _of(EvaluationArguments, arguments)
    config: CaptionConfig = _of(CaptionConfig, arguments)
    cache_dir = config.feature_cache_dir
    check_models(arguments)
    with config.main_process_first(local=False, desc="loading the data"):
        splits = load_data(_of(DataArguments, arguments), output_dir=str(config.output_dir), is_training=is_training)
    scorer = optional_scorer(eval_args.scorer_name_or_path)
    reward_scorer = scorer if eval_args.has_reward_scorer else None
    evaluator = make_evaluator(
        splits["test"], eval_args, seed=config.seed, cache_dir=cache_dir, reward_scorer=reward_scorer, splits=splits
    )
    return splits, scorer, evaluator


def better_decoding(trainer: CaptionTrainer) -> int:
    """Number of beams, the configured one, 1 or 3, with which the captioner has the best R@1 on the validation split."""
    beams, recalls = trainer.args.generation_num_beams, dict[int, float]()
    for number in dict.fromkeys((beams, 1, 3)):
        trainer.args.generation_num_beams = number
        recalls[number] = trainer.evaluate().get(f"eval_{METRIC}", 0.0)  # without it, the configured number
    trainer.args.generation_num_beams = beams
    return max(recalls, key=recalls.__getitem__)


def count_wrong(validation: datasets.Dataset, prediction: EvalPrediction) -> dict[str, float]:
    """For each evaluation, the share of wrong claims if the facts are known, else of objects that no reference mentions."""
    facts = list(validation["facts"]) if "facts" in validation.column_names else None
    key = "unmentioned_objects" if facts is None else "hallucination"
    row = SuiteRow(captions=prediction.predictions, references=prediction.label_ids, facts=facts, check=check)
    value = row.compute(key).numbers.get(key)
    return {} if value is None else {key: value}


def train_runs(runs: Sequence[Run], evaluator: Evaluator, splits: Mapping[str, datasets.Dataset]) -> Comparison:
    """Train the runs in order, and caption the test split with the initial captioner and with each trained one.

    The recipe's own model is not saved if its captions have collapsed. The row of the references is at the end.
    """
    starts = {run.starts_from for run in runs}
    settings_by_name = settings_of({run.name: run.config for run in runs if run.name not in starts})
    result = Comparison(settings={name: settings for name, settings in settings_by_name.items() if settings})
    before: dict[str | None, dict[str, float]] = {}  # the first point of a curve: the captioner before training
    test = splits["test"]
    has_doses = any(is_trained(run.config) and getattr(run.config, "early_evaluations", None) for run in runs)

    def add_row(name: str, trainer: CaptionTrainer, is_start: bool) -> None:
        """Caption the test split; the start of runs with early evaluations with the decoding that is better for it."""
        beams = configured = trainer.args.generation_num_beams
        if is_start and has_doses and trainer.scorer is not None:
            beams = better_decoding(trainer)
        result.captions[name] = trainer.generate_captions(test, num_beams=beams)
        result.rows.append(measured(name, result.captions[name], evaluator, trainer, num_beams=beams))
        if beams != configured:
            result.rows[-1]["note"] = f"with {beams} beams, which is better for the start than {configured}"

    for number, run in enumerate(runs):
        trainer = run.make(run.config)
        fold_logs(trainer)
        is_main, is_training = Path(run.config.output_dir).name == "model", is_trained(run.config)
        if is_training and trainer.is_world_process_zero():
            settings = ", ".join(f"{key}={value}" for key, value in result.settings.get(run.name, {}).items())
            print(f"\n-- {number + 1} of {len(runs)}: {run.name} ({settings})".removesuffix(" ()"), flush=True)
        has_dose = is_training and trainer.dose is not None
        if has_dose:
            trainer.compute_metrics = functools.partial(count_wrong, splits["validation"])
        if not result.captions and (run.starts_from is not None or not is_training):
            add_row(START, trainer, True)
        if is_training:
            if run.starts_from is not None and run.starts_from not in before and not has_dose:
                before[run.starts_from] = trainer.evaluate()
            if evaluator.arguments.learning_curves:
                trainer.add_callback(LearningCurve(trainer, evaluator, test))
            train_or_resume(trainer)
            if evaluator.arguments.learning_curves:
                firsts = [row for row in result.rows if row["name"] == run.starts_from]
                points: list[dict[str, Any]] = [{**curve_point(row), "step": 0, "epoch": 0.0} for row in firsts]
                for entry in trainer.state.log_history:
                    if f"{_PREFIX}length" in entry and entry["step"]:
                        numbers = {k.removeprefix(_PREFIX): v for k, v in entry.items() if k.startswith(_PREFIX)}
                        points.append({**numbers, "step": entry["step"], "epoch": entry["epoch"] or 0.0})
                if len(points) > 1:  # a run without evaluations has no curve
                    result.curves[run.name] = points
            history = [{**before[run.starts_from], "epoch": 0.0, "step": 0}] if run.starts_from in before else []
            history += [entry for entry in trainer.state.log_history if "eval_length" in entry]
            keys = ("length", "recall_at_1", METRIC, "hallucination", "unmentioned_objects")
            result.histories[run.name] = [
                {"epoch": e.get("epoch") or 0.0, "step": e["step"]} | {key: e.get(f"eval_{key}") for key in keys}
                for e in history
            ]
            add_row(run.name, trainer, run.name in starts)
            # A selected checkpoint was checked in its evaluation. The captions of the test split select nothing.
            is_checked = trainer.selection is not None and "kept_instead" not in trainer.selection
            guard = None if is_checked or trainer.collapsed is not None else trainer.guard
            if guard is not None and (reason := guard.judge(result.captions[run.name])[1]) is not None:
                note_collapse(trainer, reason)
            if trainer.selection is not None:
                result.selected[run.name] = trainer.selection
                is_start = trainer.selection.get("start", {}).get("delivered", False)
                judged_itself = trainer.scorer is not None and not evaluator.arguments.has_reward_scorer
                notes = ["the start, because no checkpoint is significantly better"] * is_start
                if notes := notes + ["the scorer that evaluates it also selected it"] * judged_itself:
                    result.rows[-1]["note"] = "; ".join(notes)
            if trainer.collapsed is not None:
                result.collapsed[run.name] = trainer.collapsed
                result.rows[-1]["note"] = trainer.collapsed[0].lower() + trainer.collapsed[1:]
        is_withheld = is_main and run.name in result.collapsed
        if not is_withheld:
            trainer.save_model()
        elif trainer.is_world_process_zero():
            withhold(Path(run.config.output_dir))
        if is_main:
            result.captioner = None if is_withheld else trainer.captioner
            result.main = run.name if is_training else START
    result.rows.append(evaluator.reference_row()[0])
    return result


def compare_runs(
    runs: Sequence[Run],
    evaluator: Evaluator,
    arguments: tuple[Any, ...],
    splits: datasets.DatasetDict,
    *,
    complete: Callable[[Comparison], Any] = lambda result: None,
    **report: Any,
) -> Path:
    """Train and evaluate the runs, `complete` the comparison on the main process, and [`finish`] it with the `report`'s settings."""
    result = train_runs(runs, evaluator, splits)
    if arguments[-1].process_index > 0:
        return Path(arguments[-1].output_dir) / "results.json"
    complete(result)
    return finish(result, evaluator, arguments, splits, **report)


def finish(
    result: Comparison,
    evaluator: Evaluator,
    arguments: tuple[Any, ...],
    splits: datasets.DatasetDict,
    *,
    title: str,
    objective: dict[str, Any],
    columns: Sequence[Column] = COLUMNS,
    more_files: Sequence[str] = (),
) -> Path:
    """Write, print and push the result; returns the path of results.json.

    `objective` are fields of the card, `more_files` names of further files in the folder. Raises SystemExit if the captions of
    the recipe's own run have collapsed, so that there is no model.
    """
    config: CaptionConfig = _of(CaptionConfig, arguments)
    folder, columns = Path(str(config.output_dir)), (*columns, *evaluator.columns)
    last = "The weights of the last step; no checkpoint was selected."
    shown = (*columns, *by_reward_scorer(*COLUMNS))
    heads = {f"eval_{c.key.replace('pool_', '')}": f"validation {c.title.rstrip(' ↑↓')}" for c in shown}
    worded = {n: {**s, "metric": heads.get(s["metric"], s["metric"])} for n, s in result.selected.items()}
    delivery = {n: selection_line(worded[n]) if n in worded else last for n in result.histories}
    histories = {name: result.histories.get(name, []) for name in result.captions}  # the gallery's colours
    described = describe(arguments) | ({"runs": result.settings} if result.settings else {})
    more = {"selected": result.selected, "learning_curves": result.curves}
    path = write_results(
        folder, result.rows, seed=config.seed, config=described, title=title, columns=columns, more=more
    )
    for name, captions in result.captions.items():  # `captionrl evaluate --captions` compares them image by image
        rows = zip(evaluator.dataset["image_id"], captions, strict=True)
        write_jsonl(folder / "captions" / f"{_slug(name)}.jsonl", ({"image_id": i, "caption": c} for i, c in rows))
    number = len(evaluator.dataset)
    chosen = sorted(random.Random(config.seed).sample(range(number), min(GALLERY_SIZE, number)))
    items = [gallery_item(evaluator, index, result.captions) for index in chosen]
    write_gallery(folder / "gallery.html", items, title=title, note=delivery.get(result.main, ""))
    if any(result.histories.values()):
        if getattr(config, "early_evaluations", None):
            points = [point for history in result.histories.values() for point in history]
            panels = [panel for panel in DOSE_CURVES if any(point[panel[0]] is not None for point in points)]
            write_curves(folder / "curves.png", histories, x="step", panels=panels)
        else:
            write_curves(folder / "curves.png", histories)
    if result.curves:
        keys = {key for points in result.curves.values() for point in points for key in point}
        panels = [panel for panel in CURVES if panel[0] in keys]
        write_curves(folder / "learning_curves.png", result.curves, x="step", panels=panels)
    # A terminal may hide the last columns: degenerate captions come first if they exceed the guard's limit.
    limit = GuardThresholds().max_degenerate or 0.0
    if any((row.get(DEGENERATE.key) or 0.0) > limit for row in result.rows):
        columns = (DEGENERATE, *(column for column in columns if column.key != DEGENERATE.key))
    print_table(result.rows, title=title, columns=columns)
    if result.captioner is not None:
        captions = result.captions[result.main]
        facts = {**objective, "selection": delivery.get(result.main, "")}
        write_publication(path, result.captioner, captions, result.main, evaluator, arguments, splits, facts)
    is_collapsed = result.main in result.collapsed
    drawn = ["curves.png", *(["learning_curves.png"] if result.curves else [])]
    files = ", ".join(["results.json", "results.md", "captions/", "gallery.html", *drawn, *more_files])
    model = "there is no model" if is_collapsed else "the checkpoint is model/"
    print(folded(f"Written to {folder}: {files}; {model}"))
    if config.pushes and not is_collapsed:  # type: ignore[attr-defined]
        pushed = push_folder(
            folder / "model",
            config.hub_model_id or folder.name,
            private=True if config.hub_private_repo is None else config.hub_private_repo,
            token=config.hub_token,
            revision=config.hub_revision,
        )
        print(f"Pushed: {pushed}")
    for name in sorted(result.histories, key=result.main.__eq__):  # the recipe's own run last
        print(f"{name}{' (model/)' if name == result.main and not is_collapsed else ''}")
        print(folded(f"  {delivery[name]}"))
    if is_collapsed:
        raise SystemExit(
            f"The guard refuses {result.main!r}, so model/ was not written; its checkpoints are in {COLLAPSED_FOLDER}/. "
            f"{result.collapsed[result.main]} docs/self_retrieval.md says more."
        )
    return path


def gallery_item(evaluator: Evaluator, index: int, captions: dict[str, list[str]]) -> GalleryItem:
    """One image of the gallery with its captions; claims are checked if the facts are known."""
    row = evaluator.dataset[index]
    shown = []
    for name, mine in captions.items():
        marks = [] if evaluator.facts is None else mark_caption(mine[index], evaluator.facts[index])
        claims = [Mark(mark.claim.text, mark.verdict, mark.start, mark.end) for mark in marks]
        ranks = evaluator.ranks.get(name)
        rank = None if ranks is None else int(ranks[index])
        shown.append(GalleryCaption(name, mine[index], claims, rank, len(mine)))
    return GalleryItem(open_still(row), row["image_id"], shown, list(row["captions"]))
