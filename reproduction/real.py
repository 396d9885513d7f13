"""The papers' rows: which presets can be run with the data and captioners of a folder, and what is missing for the others.

The folder (`--data_root`) is laid out as the presets name things:

    dataset_coco.json, dataset_flickr30k.json                                 Karpathy splits
    boosted/train/captions.parquet, boosted/test/captions.parquet             what `captionrl boost` writes
    capenrich_hard_pool.json, truematch/                                      names of the hard pool, TrueMatch's release
    images/                                                                   what their image paths are relative to
    conceptual_captions/, msr-vtt/, tgif/                                     data sets that are folders
    nocaps/, concadia/                                                        the same
    vicuna/question.jsonl, vicuna/answer.jsonl, models/judge                  questions, reference answers, a judge
    models/blip-coco-finetuned, models/clipcap-coco ...                       captioners and scorers
    checkpoints/blip_smile_base.pth ...                                       the authors' files of captioners that models/ does not have

A model that another preset makes (`outputs/ndlb/table11/coco/model`) may be there too; otherwise that preset is run first.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.apps.experiments.arguments import MODEL_OPTIONS, SCORERS, Row, load_row, read_yaml, row_names
from hf_captionrl.apps.instruct.judges import ANSWER_COLUMNS
from hf_captionrl.evaluation.evaluator import more_columns
from hf_captionrl.evaluation.options import EMBEDDED, EvaluationArguments
from hf_captionrl.metrics.columns import COLUMNS, SAMPLE_COLUMNS, VIDEO_COLUMNS
from hf_captionrl.utils.io import installed_versions, write_json
from reproduction.run_seeds import aggregate, aggregate_curves
from reproduction.runs import CONFIGS, Caller, UnreachedError, by_seed, call, digests, hardware, reached

_START = "model_name_or_path"
_FOLDERS = ("msr-vtt", "tgif")
_FILES = ("train_captions", "test_references", "pool", "bags")
_JUDGED = {
    "judge_model": "models/judge",
    "questions": "vicuna/question.jsonl",
    "reference_answers": "vicuna/answer.jsonl",
}
"""What a table of answers needs beside data and model; no preset names it."""
CHECKPOINTS = {
    "blip-coco-finetuned": "model_base_caption_capfilt_large.pth",
    "blip-smile": "blip_smile_base.pth",
    "blip-mle-smile": "blip_mle_smile_base.pth",
    "clipcap-coco": "coco_weights.pt",
}
"""The authors' files in `checkpoints/`, by the captioner in `models/` that `captionrl convert` makes of each."""
_PARTS = {
    ".pth": {"config": "Salesforce/blip-image-captioning-base"},
    ".pt": {"vision_model": "openai/clip-vit-base-patch32", "language_model": "openai-community/gpt2"},
}
"""What a conversion takes from other models; they are the defaults, for which a folder of `models/` may stand."""
_CONVERTING = threading.Lock()


@functools.cache
def preset_names() -> list[str]:
    """What a run can be configured by: rows of the papers' tables, and base files such as smile_blip/coco."""
    bases = [f"{file.parent.name}/{file.stem}" for file in CONFIGS.glob("*/*.yaml") if file.parent.name != "rows"]
    return [*row_names(CONFIGS), *bases]


@functools.cache
def _preset(name: str) -> Row:
    """A row of recipes/configs/rows, or a base file such as smile_blip/coco."""
    base = CONFIGS / f"{name}.yaml"
    return Row(name, name, base.parent.name, read_yaml(base)) if base.is_file() else load_row(CONFIGS, name)


def settings_of(preset: str) -> dict[str, Any]:
    """The settings of a preset, with those of its bases."""
    return dict(_preset(preset).settings)


def is_embedded(preset: str) -> bool:
    """Whether a preset is for the embedded world, not for the paper's data."""
    return settings_of(preset).get("dataset_name", EMBEDDED[0]) in EMBEDDED


def makers_of(preset: str) -> dict[str, str]:
    """The presets that make the captioner from which a preset starts, and its scorers, by option."""
    values = {option: str(settings_of(preset).get(option, "")) for option in (_START, *SCORERS)}
    names = {option: value.removeprefix("outputs/").removesuffix("/model") for option, value in values.items()}
    return {o: name for o, name in names.items() if values[o] == f"outputs/{name}/model" and name in preset_names()}


def _makers_to_run(preset: str, data_root: Path | None) -> dict[str, str]:
    """The makers of what the folder does not have."""
    makers = makers_of(preset)
    places = {} if data_root is None else _places(preset, data_root)
    return {option: maker for option, maker in makers.items() if not (places and places[option].exists())}


def with_makers(
    presets: Iterable[str], data_root: Path | None, until: Mapping[str, Sequence[str]] | None = None
) -> dict[str, set[str]]:
    """Presets and what they need, each with the presets that must run before it, in an order in which they can be run.

    These make its start and its scorers, or the number that its curve has to reach (`until`).
    """
    ordered: dict[str, set[str]] = {}

    def add(preset: str) -> None:
        needed = {*_makers_to_run(preset, data_root).values(), *(until or {}).get(preset, ())[:1]}
        for other in sorted(needed - ordered.keys()):
            add(other)
        ordered[preset] = needed

    for preset in presets:
        add(preset)
    return ordered


def columns_of(preset: str) -> set[str]:
    """Keys of the columns of a preset's results table; Table 7 of SMILE has a judge."""
    recipe, settings = _preset(preset).recipe, _preset(preset).settings
    if recipe == "smile_llama_lora":
        return {column.key for column in ANSWER_COLUMNS}
    own = {"smile_video": VIDEO_COLUMNS, "sle_blip": SAMPLE_COLUMNS}.get(recipe, ())
    held_out, scorer = (settings.get(option) for option in SCORERS)
    evaluation = EvaluationArguments(scorer, held_out, settings.get("perplexity_name_or_path"))
    evaluation.resolve(settings.get("dataset_name", EMBEDDED[0]), is_training=False)
    has_bags = is_embedded(preset) or bool(settings.get("bags"))
    more = more_columns(
        settings.get("paper"), evaluation.has_reward_scorer, bool(settings.get("test_references")), has_bags
    )
    keys = {column.key for column in (*COLUMNS, *own, *more)}
    return keys - ({"perplexity"} if evaluation.perplexity_name_or_path == "none" else set())


def _places(preset: str, data_root: Path) -> dict[str, Path]:
    """What a preset reads, by the option that names it."""
    settings = _preset(preset).settings
    places = {
        option: data_root / "models" / settings[option].removeprefix("outputs/")
        for option in MODEL_OPTIONS
        if settings.get(option, "none") != "none"
    }
    # Files that other commands write into outputs/ stand directly in the folder.
    places |= {o: data_root / settings[o].removeprefix("outputs/") for o in _FILES if settings.get(o)}
    if _preset(preset).recipe == "smile_llama_lora":
        places |= {option: data_root / name for option, name in _JUDGED.items()}
    name = settings["dataset_name"]
    if "data_dir" in settings:
        places["data_dir"] = data_root / settings["data_dir"]
    elif name in _FOLDERS:
        places["data_dir"] = data_root / name
    else:
        places["dataset_name"] = data_root / name
        if name.endswith(".json"):
            places["image_root"] = data_root / "images"
    return places


def _checkpoint(captioner: Path) -> Path:
    """The authors' file of a captioner in `models/`; a place where nothing is if they released none."""
    return captioner.parents[1] / "checkpoints" / CHECKPOINTS.get(captioner.name, "none")


def _convert(captioner: Path, caller: Caller) -> str | None:
    """Convert the file of a captioner that is not there; returns why that failed."""
    with _CONVERTING:  # two presets can need the same captioner
        file = _checkpoint(captioner)
        if captioner.exists() or not file.exists():
            return None
        words = ["convert", str(file), str(captioner)]
        for option, name in _PARTS[file.suffix].items():
            words += [f"--{option}", str(captioner.parent / name)] if (captioner.parent / name).exists() else []
        code = caller([sys.executable, "-m", "hf_captionrl.cli", *words])
        return f"exit code {code} of `captionrl {' '.join(words)}`" if code else None


def missing_of(preset: str, data_root: Path | None) -> list[str]:
    """What a preset needs that is not there; for a model that another preset makes, what that one needs."""
    root = Path("DATA") if data_root is None else data_root
    makers = _makers_to_run(preset, data_root)
    missing = [
        path.relative_to(root).as_posix()
        for option, path in _places(preset, root).items()
        if (data_root is None or not (path.exists() or _checkpoint(path).exists())) and option not in makers
    ]
    for maker in makers.values():
        missing += missing_of(maker, data_root)
    return list(dict.fromkeys(missing))


def needs_of(preset: str) -> str:
    """What a preset needs on the paper's data, in words; what the model of another preset needs, that one says."""
    makers, root = makers_of(preset), Path("DATA")
    files = [
        f"`{path.relative_to(root).as_posix()}`"
        for option, path in _places(preset, root).items()
        if option not in makers
    ]
    parts = [*dict.fromkeys(files), *(f"the model of `{maker}`" for maker in makers.values()), "a GPU"]
    return f"needs {', '.join(parts[:-1])} and {parts[-1]}"


def _folder_of(preset: str, runs_dir: Path, seed: int) -> Path:
    """Where a run of a preset writes its results and its model."""
    return runs_dir / preset.replace("/", "-") / f"seed-{seed}"


def _made(preset: str, data_root: Path, seed: int, runs_dir: Path) -> dict[str, Path]:
    """The models of other presets, by option: those of the seed, else those of seed 0."""
    folders = {
        option: [_folder_of(maker, runs_dir, s) / "model" for s in (seed, 0)]
        for option, maker in _makers_to_run(preset, data_root).items()
    }
    return {option: own if own.exists() else first for option, (own, first) in folders.items()}


def arguments_of(preset: str, data_root: Path, seed: int, runs_dir: Path) -> list[str]:
    """The command line that runs a preset with the data of a folder, and with the captioners of other runs."""
    recipe, is_base = _preset(preset).recipe, (CONFIGS / f"{preset}.yaml").is_file()
    selected = ["--config", f"recipes/configs/{preset}.yaml"] if is_base else ["--row", preset]
    places = _places(preset, data_root.resolve())
    places |= _made(preset, data_root.resolve(), seed, runs_dir)
    options = [word for option, path in places.items() for word in (f"--{option}", str(path))]
    options += ["--judge", "model"] if "judge_model" in places else []
    folder = _folder_of(preset, runs_dir, seed)
    own = settings_of(preset).get("seed", 0)  # two scorers must not start alike
    return [f"recipes/{recipe}.py", *selected, *options, "--seed", str(own + seed), "--output_dir", str(folder)]


def result_path(preset: str, output: Path) -> Path:
    """Where the result of a preset is kept."""
    return output / "papers_data" / f"{preset.replace('/', '-')}.json"


def run_preset(
    preset: str,
    data_root: Path,
    seeds: Sequence[int],
    *,
    output: Path,
    runs_dir: Path,
    until: Sequence[str] | None = None,
    caller: Caller = call,
    told: Callable[[str], None] = print,
) -> str | None:
    """Run a preset for each seed that is not done, and write mean, standard error and values of every number.

    The preset that makes its start must have run before, and the one that `until` names, with the place of a number: the entry
    `reached` of the result is the learning curve where it reaches this number, seed by seed. See [`with_makers`].
    """
    if missing := missing_of(preset, data_root):
        return f"{', '.join(missing)} not in the data root"
    for option, maker in _makers_to_run(preset, data_root).items():
        if not all(_made(preset, data_root, seed, runs_dir)[option].exists() for seed in seeds):
            return f"the model of {maker} is not there, which it needs"
    start = _places(preset, data_root.resolve()).get(_START)
    if start is not None and (why := _convert(start, caller)):
        return why
    path = result_path(preset, output)
    if until is not None and not result_path(until[0], output).exists():
        return f"needs the result of {until[0]}"
    commands, runs = [], []
    for seed in seeds:
        folder = _folder_of(preset, runs_dir, seed)
        words = arguments_of(preset, data_root, seed, runs_dir)
        command = " ".join(["accelerate launch", *words])
        commands.append(command)
        marker = folder.parent / f"seed-{seed}.json"
        done = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else {}
        versions = installed_versions()
        if (done.get("command"), done.get("version")) == (command, versions["hf_captionrl"]):
            told(f"{preset}: seed {seed} is done")
        else:
            told(f"{preset}: seed {seed}")
            words.append("--resume_from_checkpoint=true")
            if code := caller([sys.executable, "-m", "accelerate.commands.launch", *words]):
                return f"exit code {code} of `{command}`"
            write_json(marker, {"command": command, "version": versions["hf_captionrl"]})
        runs.append(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    record: dict[str, Any] = {"rows": aggregate([run["rows"] for run in runs]), "seeds": list(seeds)}
    record["selected"] = [run.get("selected", {}) for run in runs]
    if all(run.get("learning_curves") for run in runs):
        record["learning_curves"] = aggregate_curves([run["learning_curves"] for run in runs])
    # Paths of this machine mean nothing elsewhere.
    places = {str(data_root.resolve()): "DATA", str(runs_dir): "RUNS"}
    record["commands"] = [functools.reduce(lambda t, p: t.replace(*p), places.items(), text) for text in commands]
    why = None
    if until is not None:
        folder = _folder_of(preset, runs_dir, 0).parent
        targets = by_seed(path.parent, result_path(until[0], output).stem, until[1])
        try:
            record["reached"] = aggregate([[reached(preset, folder, "trained", seed, targets)] for seed in seeds])[0]
        except UnreachedError as error:
            why = str(error)  # the curve is of use without it
    more = {"versions": installed_versions(), "hardware": hardware(), "settings": digests([preset], CONFIGS)}
    write_json(path, record | more)
    return why
