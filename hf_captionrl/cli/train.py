"""`captionrl train METHOD`: run a recipe, from wherever the package is installed."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from hf_captionrl.utils.console import RESULT_FILE, run_main
from hf_captionrl.utils.io import shipped_path
from hf_captionrl.utils.options import CommandOptions, Positive, option

METHODS = {
    "smile": ("smile_blip.py", "SMILE for any captioner: cross-entropy over only the words of the caption"),
    "self-retrieval": (
        "self_retrieval_blip.py",
        "rewards captions from which a scorer finds the image; bags and curriculum",
    ),
    "self-retrieval-clipcap": ("self_retrieval_clipcap.py", "self-retrieval for ClipCap, as in the papers"),
    "sle": ("sle_blip.py", "rewards CIDEr-D and differences between samples"),
    "mle-clipcap": ("mle_clipcap.py", "maximum likelihood for ClipCap, which self-retrieval starts from"),
    "scorer": ("scorer.py", "an image-text scorer for your own domain, which rewards or evaluates captions"),
    "smile-video": ("smile_video.py", "SMILE on videos"),
    "smile-text": ("smile_llama_lora.py", "SMILE for text: a language model with LoRA on instructions"),
}
"""Recipe and description of each method."""

_EXAMPLES = """\
methods:
{methods}

Options of this command stand before METHOD; the recipe gets everything after it. --help there lists the arguments of the
recipe and --help-all also those of transformers, --config takes a YAML file of recipes/configs, by path or by name (such as
coco.yaml), and --row selects a row of a paper's table (such as smile/table3/row7). Without a model and data, a method runs its
preset of the embedded world, which for smile also trains two models to compare with; otherwise smile trains one, and
--compare_mle_weights 1 0.01 adds these two.

examples:
  captionrl train smile
  captionrl train smile --model_name_or_path Salesforce/blip-image-captioning-base --dataset_name imagefolder \\
      --data_dir photos --output_dir outputs/photos
  captionrl train self-retrieval --row discritune/blip --dataset_name dataset_coco.json --image_root coco
  captionrl train self-retrieval-clipcap --row ndlb/table5/row8 --image_root coco/images
  captionrl train --processes 8 --accelerate_config ddp.yaml smile --config coco.yaml
  captionrl train --json smile --seed 1 > run.json
  captionrl train smile --help
"""


@dataclass
class TrainOptions(CommandOptions):
    """Run a recipe."""

    examples: ClassVar[str] = _EXAMPLES.format(
        methods="\n".join(f"  {name:<24}{what}" for name, (_, what) in METHODS.items())
    )

    processes: Positive = option(1, metavar="P", help="number of processes; more than one are started by accelerate")
    accelerate_config: str | None = option(
        None, metavar="FILE", help="configuration file of `accelerate config`, or a name in recipes/accelerate"
    )
    method: str = option(
        positional=True, metavar="METHOD", choices=sorted(METHODS), help="method of training, as listed below"
    )
    arguments: list[str] = option(
        positional=True, nargs=argparse.REMAINDER, metavar="...", help="arguments of the recipe"
    )


def recipe_path(*parts: str) -> Path:
    """A file of `recipes/`."""
    return shipped_path("recipes", *parts)


def _with_config(arguments: list[str], recipe: str) -> list[str]:
    """The arguments, with the path of a configuration in place of its name."""
    words = [word for a in arguments for word in (a.split("=", 1) if a.startswith("--config=") else [a])]
    for index, (flag, name) in enumerate(itertools.pairwise(words)):
        if flag == "--config" and not Path(name).exists() and os.sep not in name:
            words[index + 1] = str(recipe_path("configs", Path(recipe).stem, name))
    return words


def run_recipe(recipe: Path, arguments: Sequence[str]) -> NoReturn:
    """Import a recipe and run it in this process, as if it had been called directly."""
    sys.argv = [str(recipe), *arguments]  # the manifest says how the recipe was called
    spec: Any = importlib.util.spec_from_file_location(recipe.stem, recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their annotations there
    spec.loader.exec_module(module)
    run_main(module.main)


def launch(arguments: Sequence[str]) -> int:
    """`accelerate launch`; returns the exit code of the first process that failed."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ["PYTHONSAFEPATH"] = "1"  # an accelerate.py in the working folder would hide the library
    try:
        launch_command(launch_command_parser().parse_args(list(arguments)))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except SignalException as error:  # the processes received the signal and have saved
        code = -int(error.sigval)
    else:
        code = 0
    return code if code >= 0 else 128 - code


def train(options: TrainOptions) -> None:
    """Run the recipe in this process, or in several by accelerate; with `--json` print its results."""
    recipe = recipe_path(METHODS[options.method][0])
    words = _with_config(options.arguments, recipe.name)
    passed = [*words, "--traceback"] if options.traceback else words
    launched: list[str] = []
    if options.processes > 1 or options.accelerate_config:
        launched = ["--num_processes", str(options.processes)]
        if config := options.accelerate_config:
            is_path = Path(config).exists() or os.sep in config
            launched += ["--config_file", config if is_path else str(recipe_path("accelerate", config))]
        launched += [str(recipe), *passed]

    def run() -> NoReturn:
        if launched:
            sys.exit(launch(launched))
        run_recipe(recipe, passed)

    if not options.json:
        run()

    from hf_captionrl.hub import public_command

    stdout = os.dup(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results")
        os.environ[RESULT_FILE] = str(file)
        sys.stdout.flush()
        os.dup2(2, 1)  # what this process and those that it starts print goes to stderr
        try:
            with contextlib.redirect_stdout(sys.stderr):
                run()
        except SystemExit as stop:
            if stop.code or not file.is_file():
                raise
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            del os.environ[RESULT_FILE]
        path = file.read_text(encoding="utf-8") or None
    results = None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    result = {"method": options.method, "recipe": recipe.name, "arguments": public_command(words), "path": path}
    print(json.dumps({**result, "results": results}, ensure_ascii=False))
