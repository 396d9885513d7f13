"""The papers' rows: which presets can be run with the data and captioners of a folder, and what is missing for the others.

The folder (`--data_root`) is laid out as the presets name things:

    dataset_coco.json, dataset_flickr30k.json                                 Karpathy splits
    boosted/train/captions.parquet, boosted/test/captions.parquet             what `captionrl boost` writes
    capenrich_hard_pool.json, truematch/                                      names of the hard pool, TrueMatch's release
    images/                                                                   what their image paths are relative to
    conceptual_captions/, msr-vtt/, tgif/                                     data sets that are folders
    models/blip-coco-finetuned, models/clipcap-coco ...                       captioners and scorers
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.evaluate_modules.results_columns import COLUMNS, REWARD_COLUMNS, SAMPLE_COLUMNS
from hf_captionrl.evaluation.paper_columns import more_columns
from hf_captionrl.experiments.rows import Row, load_row, read_yaml
from hf_captionrl.experiments.video import VIDEO_COLUMNS
from hf_captionrl.instruct.answers import ANSWER_COLUMNS
from hf_captionrl.io import write_json
from hf_captionrl.reports.versions import installed_versions
from scripts.reproduction.runs import CONFIGS, Caller, call, hardware
from scripts.run_seeds import aggregate

_MODELS = ("model_name_or_path", "held_out_scorer_name_or_path", "scorer_name_or_path")
_FOLDERS = ("msr-vtt", "tgif")
_FILES = ("train_captions", "test_references", "pool", "bags")


@functools.cache
def _preset(name: str) -> Row:
    """A row of recipes/configs/rows, or a base file such as smile_blip/coco."""
    base = CONFIGS / f"{name}.yaml"
    return Row(name, name, base.parent.name, read_yaml(base)) if base.is_file() else load_row(CONFIGS, name)


def settings_of(preset: str) -> dict[str, Any]:
    """The settings of a preset, with those of its bases."""
    return dict(_preset(preset).settings)


def columns_of(preset: str) -> set[str]:
    """Keys of the columns of a preset's results table; Table 7 of SMILE has a judge."""
    recipe, settings = _preset(preset).recipe, _preset(preset).settings
    if recipe == "smile_llama_lora":
        return {column.key for column in ANSWER_COLUMNS}
    rewards = recipe.startswith("self_retrieval")
    own = {"smile_video": VIDEO_COLUMNS, "sle_blip": SAMPLE_COLUMNS}.get(recipe, REWARD_COLUMNS if rewards else ())
    more = more_columns(settings.get("paper"), rewards, bool(settings.get("test_references")))
    return {column.key for column in (*COLUMNS, *own, *more)}


def _places(preset: str, data_root: Path) -> dict[str, Path]:
    """What a preset reads, by the option that names it."""
    settings = _preset(preset).settings
    places = {
        option: data_root / "models" / settings[option].removeprefix("outputs/")
        for option in _MODELS
        if option in settings
    }
    # Files that other commands write into outputs/ stand directly in the folder.
    places |= {o: data_root / settings[o].removeprefix("outputs/") for o in _FILES if settings.get(o)}
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


def missing_of(preset: str, data_root: Path | None) -> list[str]:
    """What a preset needs that is not there."""
    root = Path("DATA") if data_root is None else data_root
    return [
        path.relative_to(root).as_posix()
        for path in _places(preset, root).values()
        if data_root is None or not path.exists()
    ]


def arguments_of(preset: str, data_root: Path, seed: int, folder: Path) -> list[str]:
    """The command line that runs a preset with the data of a folder."""
    recipe, is_base = _preset(preset).recipe, (CONFIGS / f"{preset}.yaml").is_file()
    selected = ["--config", f"recipes/configs/{preset}.yaml"] if is_base else ["--row", preset]
    places = _places(preset, data_root.resolve())
    options = [word for option, path in places.items() for word in (f"--{option}", str(path))]
    return [f"recipes/{recipe}.py", *selected, *options, "--seed", str(seed), "--output_dir", str(folder)]


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
    caller: Caller = call,
    told: Callable[[str], None] = print,
) -> str | None:
    """Run a preset for each seed that is not done, and write mean, standard error and values of every number."""
    missing = missing_of(preset, data_root)
    if missing:
        return f"{', '.join(missing)} not in the data root"
    path = result_path(preset, output)
    commands, runs = [], []
    for seed in seeds:
        folder = runs_dir / path.stem / f"seed-{seed}"
        words = arguments_of(preset, data_root, seed, folder)
        command = " ".join(["accelerate launch", *words])
        commands.append(command)
        marker = folder.parent / f"seed-{seed}.json"
        done = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else {}
        versions = installed_versions()
        if (done.get("command"), done.get("version")) == (command, versions["hf_captionrl"]):
            told(f"{preset}: seed {seed} is done")
        else:
            told(f"{preset}: seed {seed}")
            code = caller([sys.executable, "-m", "accelerate.commands.launch", *words])
            if code:
                return f"exit code {code} of `{command}`"
            write_json(marker, {"command": command, "version": versions["hf_captionrl"]})
        runs.append(json.loads((folder / "results.json").read_text(encoding="utf-8"))["rows"])
    record: dict[str, Any] = {"rows": aggregate(runs), "seeds": list(seeds), "commands": commands}
    # Paths of this machine mean nothing elsewhere.
    record["commands"] = [text.replace(str(data_root.resolve()), "DATA") for text in commands]
    write_json(path, record | {"versions": installed_versions(), "hardware": hardware()})
    return None
