"""Arguments of recipes: presets, the classes that recipes share, and the parser."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import yaml

from hf_captionrl.captioners import Captioner, load_captioner
from hf_captionrl.cli.train import METHODS
from hf_captionrl.data.options import LoadingArguments, SplitArguments
from hf_captionrl.trainers.caption_config import trl_remedy
from hf_captionrl.trainers.checkpoints import ExactResumeArguments
from hf_captionrl.trainers.policy import check_model_init_kwargs
from hf_captionrl.trainers.publishing import LAST_CHECKPOINT, deciding_settings
from hf_captionrl.utils.model_files import PREFIX, model_path
from hf_captionrl.utils.option_parser import OptionParser
from hf_captionrl.utils.options import NotNegative, Positive, check_values, documented

# --- Rows of the papers' tables: a base configuration and what differs from it, selected by `--row ndlb/table5/row8` ---

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C implementation is ten times faster

ROWS = "rows"
"""Folder of the row files in `recipes/configs`; the other folders there contain the base files of each recipe."""


@dataclass(frozen=True)
class Row:
    """One row of a paper's table."""

    name: str  # `<paper>/<row>`
    title: str  # description of what the row trains or evaluates
    recipe: str  # file name of its recipe, without ending
    settings: dict[str, Any]  # arguments of the recipe; `output_dir` is `outputs/<name>`


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not valid YAML ({' '.join(str(error).split())}). Correct it.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds a {type(content).__name__}. Use one `argument: value` per line.")
    return content


def row_names(configs: Path) -> list[str]:
    """Names of all rows of `recipes/configs`."""
    return [f"{file.stem}/{row}" for file in sorted((configs / ROWS).glob("*.yaml")) for row in read_yaml(file)]


def load_row(configs: Path, name: str) -> Row:
    """A row by name, including the settings of its bases."""
    paper, _, title = name.partition("/")
    file = configs / ROWS / f"{paper}.yaml"
    rows = read_yaml(file) if file.is_file() else {}
    if title not in rows:
        near = difflib.get_close_matches(name, row_names(configs), n=1)
        remedy = f"Use {near[0]!r}" if near else "Use one of recipes/configs/rows"
        raise ValueError(f"There is no row {name!r}. {remedy}, as in --row ndlb/table5/row8.")

    def resolve(base: str) -> tuple[str, dict[str, Any]]:
        """Recipe and settings of a row, or of a base file such as `smile_blip/coco`."""
        if base not in rows:
            return base.partition("/")[0], read_yaml(configs / f"{base}.yaml")
        recipe, settings = resolve(str(rows[base]["base"]))
        return recipe, settings | {key: value for key, value in rows[base].items() if key not in ("title", "base")}

    recipe, settings = resolve(title)
    return Row(name, str(rows[title].get("title", title)), recipe, settings | {"output_dir": f"outputs/{name}"})


# --- Arguments shared by the recipes: captioner, data, determinism ---------------------------------------------------


@dataclass
class ModelArguments(LoadingArguments):
    """The captioner, and the parts of it that are finetuned."""

    model_name_or_path: str = documented(
        "scenes:blip-mle",
        "Captioner: a folder, a name on the Hub, or a shipped model (scenes:blip-mle).",
        aliases=["--model"],
    )
    model_revision: str | None = documented(None, "Branch, tag or commit of the model on the Hub.")
    dtype: str = documented("float32", "Dtype of frozen weights; 16-bit ones need --tune. 'auto': the checkpoint's.")
    # Copied from the trainer's configuration, because the recipe loads the model; not an argument.
    model_init_kwargs: dict[str, Any] = field(default_factory=dict, init=False)
    fresh_language_model: bool = documented(False, "Start with random weights in all parts but the vision tower.")
    tune: str | None = documented(None, "Train a LoRA on 'language', 'vision' or 'both'. None: train all weights.")
    lora_r: Positive = documented(32, "Rank of the LoRA.")
    lora_alpha: int = documented(16, "Scale of the LoRA.")
    lora_init: Literal["peft", "paper"] = documented(
        "peft", "Initial LoRA: PEFT's, or N(0, 1) and 0 ('paper', as NDLB)."
    )
    lora_dropout: float = documented(0.0, "Dropout before the LoRA.")
    model_license: str | None = documented(
        None, "Licence for the model card: an identifier of the Hub, or terms in words."
    )

    def __post_init__(self) -> None:
        check_values(self)
        check_model_init_kwargs({"dtype": self.dtype})
        needs_lora = [
            *(name for name in self.loading if name.startswith("load_in")),
            *["lora_init"] * (self.lora_init != "peft"),
        ]
        if needs_lora and self.tune is None:
            raise ValueError(f"{needs_lora[0]} needs a LoRA. Use --tune language, vision or both.")

    def load(self, prompt: str | None = None) -> Captioner:
        """Load the captioner, in fp32 by default. Every caption continues `prompt`; None: the default of the family."""
        settings = {"revision": self.model_revision, "dtype": self.dtype, **self.loading, **self.model_init_kwargs}
        captioner = load_captioner(model_path(self.model_name_or_path), prompt=prompt, **settings)
        if self.fresh_language_model:
            model = captioner.base_model
            kept = {id(p) for p in captioner.find_vision_tower(model).parameters()}
            fresh = dict(type(model)(model.config).named_parameters())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if id(parameter) not in kept:
                        parameter.copy_(fresh[name])
        return captioner

    @property
    def public_name(self) -> str:
        """Name of the captioner for the model card, never a local path."""
        name = self.model_name_or_path
        if name.startswith(PREFIX):
            return f"hf-captionrl-scenes-{name.removeprefix(PREFIX)}"
        return Path(name).name if Path(name).exists() else name

    @property
    def license(self) -> str:
        """Licence of the finetuned model, in the Hub's spelling."""
        return self.model_license or ("apache-2.0" if self.model_name_or_path.startswith(PREFIX) else "other")

    @property
    def peft_config(self) -> dict[str, Any] | None:
        """Arguments of `Captioner.add_lora`, or None if all weights are trained."""
        if self.tune is None:
            return None
        names = {"tune": "tune", "r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "init": "lora_init"}
        return {key: getattr(self, name) for key, name in names.items()}


@dataclass
class DataArguments(SplitArguments):
    """The images and captions for training and evaluation."""

    dataset_name: str = documented(
        "scenes",
        "'scenes', 'moving_scenes' (clips), 'imagefolder' with --data_dir, a Karpathy-split JSON with --image_root, 'concadia', "
        "'nocaps', 'tgif' or 'msr-vtt' with --data_dir, or any data set on the Hub or on disk.",
        aliases=["--dataset"],
    )
    data_root: str | None = documented(None, "Folder that dataset_name, data_dir and image_root are relative to.")
    train_captions: str | None = documented(
        None,
        "Parquet or JSONL file with image_id and captions, or a folder of shards, that replaces those of the training split. "
        "Images that are not in it are left out.",
    )
    train_captions_column: str = documented("captions", "Caption column of train_captions, e.g. 'blend_caption'.")
    test_references: str | None = documented(
        None, "More references of the test split, for a further column of CIDEr-D."
    )
    test_references_column: str = documented("captions", "Caption column of test_references.")
    simplify: Literal["simplest", "simpler"] | None = documented(
        None,
        "Shorten captions to the subject ('simplest') or subject, verb, object: SMILE's Figure 4(b). Needs spaCy.",
    )
    num_frames: NotNegative = documented(
        0, "Frames per video; 0: images. Videos need freeze_vision_tower and cache_image_features."
    )
    max_train_images: Positive | None = documented(None, "Maximum number of training images.")
    table_split: str = documented(
        "test",
        "Split of the table. 'validation': the test split selects. An evaluation can use any, such as 'near_domain'.",
    )
    max_eval_images: Positive | None = documented(None, "Maximum number of validation images.")
    max_test_images: Positive | None = documented(None, "Maximum number of test images.")

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("dataset_name", "data_dir", "image_root") if self.data_root is not None else ():
            given, path = getattr(self, name), os.path.join(str(self.data_root), getattr(self, name) or "")
            if given and (name != "dataset_name" or "." in given):  # a name such as imagefolder is no path
                if not os.path.exists(path):
                    raise FileNotFoundError(
                        f"data_root {self.data_root!r} has no {given!r} ({name}). Use the folder that has it."
                    )
                setattr(self, name, path)


def enable_determinism() -> None:
    """Use the deterministic version of every operation that has one; to be called before cuBLAS reads its workspace."""
    # Without a workspace of fixed size, cuBLAS may select another algorithm when streams compete.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def describe(arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments by the names of their dataclasses, for results.json, and the configuration that a recipe uses."""
    values = {type(a).__name__: {f.name: getattr(a, f.name) for f in dataclasses.fields(a)} for a in arguments}
    has_line = hasattr(arguments[-1], "configuration")
    return values | ({"configuration": configuration_line(arguments)} if has_line else {})


def configuration_line(arguments: Sequence[Any]) -> str:
    """The configuration that a recipe uses, and the settings that decide what it trains."""
    config = arguments[-1]
    settings = deciding_settings(config)
    del settings["configuration"]
    has_scorer = all(getattr(part, "scorer_name_or_path", None) != "none" for part in arguments)
    if config.load_best_model_at_end and not has_scorer and getattr(config, "has_default_metric", False):
        settings["selection"] = config.metric_without_scorer or LAST_CHECKPOINT
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"Configuration: {config.configuration}. {listed[0].upper()}{listed[1:]}."


# --- Parses the arguments of a recipe; errors are one sentence that names the argument, the rule and the remedy ------

_EPILOG = """\
--scorer none trains and evaluates without a scorer. The command line overrides --config and --row; a list option without values
empties the list of either. --traceback shows where an error happened.
"""

PARTS = ("vision_model", "language_model", "text_model")
SCORERS = ("held_out_scorer_name_or_path", "scorer_name_or_path")
MODEL_OPTIONS = ("model_name_or_path", *PARTS, *SCORERS, "perplexity_name_or_path")
"""Options that name a model; with `data_root`, its folder may stand there, as models/NAME."""
_NAMED = {"--model_name_or_path", "--model", "--dataset_name", "--dataset", "--data_dir", "--image_root"}
"""With another model or other data, the defaults are the paper's settings, not those of the tiny model."""
_FOR_EVERY_MODEL = {"early_evaluations"}


class _RecipeParser(OptionParser):
    def error(self, message: str) -> NoReturn:  # argparse would print the usage first, which is a hundred lines long
        raise ValueError(f"{message[:1].upper()}{message[1:]}. Use --help for the list of arguments.")


def parse_arguments(
    dataclass_types: Sequence[type], argv: Sequence[str] | None, *, default_config: Path | None = None
) -> tuple[Any, ...]:
    """Fill one dataclass of each type: defaults, then `--config file.yaml` or `--row name`, then the command line.

    `default_config` is used if the command line (None: `sys.argv`) names no configuration, row, model or data set.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--help", "-h", action="store_true", help="show the arguments of this method")
    first.add_argument(
        "--help-all", action="store_true", help="show also those of transformers and TRL, which all work here"
    )
    first.add_argument("--config", metavar="FILE", help="YAML file of arguments")
    first.add_argument("--row", metavar="NAME", help="row of recipes/configs/rows, such as ndlb/table5/row8")
    chosen, words = first.parse_known_args(argv)
    stem = Path(sys.argv[0]).stem if default_config is None else default_config.parent.name
    method = next((name for name, (file, _) in METHODS.items() if file == f"{stem}.py"), stem)
    parser = _RecipeParser(
        dataclass_types,
        shows_foreign=chosen.help_all,
        prog=f"captionrl train {method}",
        usage="%(prog)s [--config FILE | --row NAME] [--ARGUMENT VALUE ...]",
        epilog=_EPILOG,
        parents=[first],
        add_help=False,
    )
    if chosen.help or chosen.help_all:
        parser.print_help()
        raise SystemExit(0)
    options = {"--" + word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    configuration, settings = "the defaults", {}
    if chosen.row is not None and chosen.config is not None:
        raise ValueError(f"--config is {chosen.config!r} and --row is {chosen.row!r}. Use one of them.")
    if chosen.row is not None:
        if default_config is None:
            raise ValueError(f"--row is {chosen.row!r}, but this program has no rows. Use --config.")
        row = load_row(default_config.parents[1], chosen.row)
        if row.recipe != stem:
            raise ValueError(f"The row {chosen.row} belongs to another recipe. Use recipes/{row.recipe}.py.")
        configuration, settings = f"--row {chosen.row}", row.settings
    elif chosen.config is not None:
        if not Path(chosen.config).is_file():
            raise FileNotFoundError(f"There is no configuration file {chosen.config!r}. Use the path of a YAML file.")
        configuration, settings = f"--config {chosen.config}", read_yaml(Path(chosen.config))
    elif default_config is not None:
        configuration = f"{stem}/{default_config.name}"
        if reasons := sorted(options & _NAMED):
            configuration = f"the defaults, not {configuration}, because of {' and '.join(reasons)}"
            settings = {name: value for name, value in read_yaml(default_config).items() if name in _FOR_EVERY_MODEL}
        else:
            settings = read_yaml(default_config)
    if "--gradient_accumulation_steps" in options and "--total_train_batch_size" not in options:
        settings.pop("total_train_batch_size", None)  # the command line overrides the batch of a preset
    _set_defaults(parser, settings, configuration.removeprefix("--config "))
    *parsed, _, unknown = parser.parse_args_into_dataclasses(
        words, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        name = unknown[0].split("=")[0]
        raise ValueError(f"Unknown argument {name!r}.{_suggestion(parser, name.lstrip('-'), '--')}")
    root = next((part.data_root for part in parsed if getattr(part, "data_root", None)), None)
    for part, option in itertools.product(parsed if root else (), MODEL_OPTIONS):
        name = getattr(part, option, None) or ""
        folder = Path(str(root), "models", name.removeprefix("outputs/"))
        if name and folder.is_dir() and not os.path.exists(name):
            setattr(part, option, str(folder))
    config = parsed[-1]
    if (total := getattr(config, "total_train_batch_size", None)) is not None:
        set_total_batch(config, total)
    if getattr(config, "deterministic", False):
        enable_determinism()
    # Recipes load the model and pass it to the trainer.
    if isinstance(parsed[0], ModelArguments) and getattr(config, "model_init_kwargs", None):
        parsed[0].model_init_kwargs, config.model_init_kwargs = config.model_init_kwargs, None
    config.configuration = configuration
    return tuple(parsed)


def set_total_batch(config: Any, total: int) -> None:
    """Split an optimizer step among processes and micro-batches of at most `per_device_train_batch_size`."""
    if config.gradient_accumulation_steps != 1:
        raise ValueError(f"total_train_batch_size ({total}) sets gradient_accumulation_steps. Leave one of them out.")
    processes = config.world_size * max(1, config.n_gpu)
    if total < 1 or total % processes:
        raise ValueError(
            f"total_train_batch_size ({total}) must be a multiple of the number of processes ({processes})."
        )
    share = total // processes
    steps = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= config.per_device_train_batch_size)
    config.per_device_train_batch_size, config.gradient_accumulation_steps = share // steps, steps


def _suggestion(parser: argparse.ArgumentParser, name: str, prefix: str = "") -> str:
    name = name.replace("-", "_")
    if remedy := trl_remedy(name):
        return remedy
    near = difflib.get_close_matches(name, [action.dest for action in parser._actions], n=1)
    return f" Use {prefix + near[0]!r}, or --help for the list." if near else " Use --help for the list of arguments."


def _set_defaults(parser: Any, settings: Mapping[str, Any], source: str) -> None:
    """Make the values of a YAML file or of a row the defaults of the parser, with the types of its arguments."""
    actions = {action.dest: action for action in reversed(parser._actions)}
    hints = {key: hint for kind in parser.dataclass_types for key, hint in typing.get_type_hints(kind).items()}
    for key, value in settings.items():
        if key not in hints:
            raise ValueError(f"{source} holds the unknown argument {key!r}.{_suggestion(parser, str(key))}")
        hint, convert = hints[key], actions[key].type
        kinds = set(typing.get_args(hint)) - {type(None)} or {hint}  # of a union
        if value is None and hint in (int, float, bool):
            raise ValueError(f"{source}: {key} is empty. Use a value of type {hint.__name__}, or leave it out.")
        if isinstance(value, list) != (typing.get_origin(hint) is list) and value is not None and len(kinds) == 1:
            form = "a single value" if isinstance(value, list) else "a list"
            raise ValueError(f"{source}: {key} is {value!r}. Use {form}.")
        try:
            if isinstance(value, list):
                value = [convert(str(one)) for one in value]
            elif isinstance(value, float | str) or (type(value) is int and len(kinds) == 1):
                value = convert(str(value))
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            raise ValueError(f"{source}: invalid value for --{key}: {str(value)!r}.") from None
        parser.set_defaults(**{key: value})


# --- Defaults of training arguments that several recipes share; base classes before the trainer's configuration ------


def with_default(config: type[Any], name: str, default: Any) -> Any:
    """A field of a configuration with another default and the same help text."""
    return field(default=default, metadata=config.__dataclass_fields__[name].metadata)


def output_folder(recipe: str) -> Any:
    """The field `output_dir` of a recipe."""
    return documented(f"outputs/{recipe}", "Folder for all output.")


@dataclass
class RecipeDefaults:
    """Options and defaults of every recipe that trains: each epoch is saved and evaluated, and the best one is kept."""

    overwrite_output_dir: bool = documented(False, "Start anew. Otherwise the same command resumes.")
    deterministic: bool = documented(False, "Use deterministic kernels where they exist; see docs/reliability.md.")
    total_train_batch_size: int | None = documented(
        None, "Images or captions per step on all processes. It sets gradient_accumulation_steps."
    )
    save_on_signal: bool = with_default(ExactResumeArguments, "save_on_signal", True)
    save_strategy: str = documented("epoch", "When to save: 'no', 'steps' or 'epoch'.")
    save_total_limit: int | None = documented(1, "Number of checkpoints to keep, in addition to the best one.")
    eval_strategy: str = documented("epoch", "When to evaluate: 'no', 'steps' or 'epoch'.")
    load_best_model_at_end: bool | None = documented(
        None, "Select the checkpoint with the best R@1 on the validation split. None: if each is evaluated."
    )

    def __post_init__(self) -> None:
        if self.load_best_model_at_end is None:
            self.load_best_model_at_end = str(self.eval_strategy) == str(self.save_strategy) != "no"
        super().__post_init__()  # type: ignore[misc]
