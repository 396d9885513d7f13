"""`captionrl train METHOD`: run a recipe, from wherever the package is installed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hf_captionrl.utils.options import CommandOptions, option

METHODS = {
    "smile": ("smile_blip.py", "SMILE for any captioner: cross-entropy over only the words of the caption"),
    "self-retrieval": (
        "self_retrieval_blip.py",
        "rewards captions from which a scorer finds the image; bags and curriculum",
    ),
    "self-retrieval-clipcap": ("self_retrieval_clipcap.py", "self-retrieval for ClipCap, as in the papers"),
    "sle": ("sle_blip.py", "rewards CIDEr-D and differences between samples"),
    "mle-clipcap": ("mle_clipcap.py", "maximum likelihood for ClipCap, which self-retrieval starts from"),
    "smile-video": ("smile_video.py", "SMILE on videos"),
    "smile-text": ("smile_llama_lora.py", "SMILE for text: a language model with LoRA on instructions"),
}
"""Recipe and description of each method."""

_EXAMPLES = """\
methods:
{methods}

Options of this command stand before METHOD; the recipe gets everything after it. --help there lists the arguments of the
recipe, --config takes a YAML file of recipes/configs, by path or by name (such as coco.yaml), and --row selects a row of a
paper's table (such as smile/table3/row7).

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

    processes: int = option(1, metavar="P", help="number of processes; more than one are started by accelerate")
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
    """A file of `recipes/`, in a checkout or where a wheel installs it."""
    folders = (
        Path(__file__).parents[2] / "recipes",
        Path(sysconfig.get_path("data"), "share/hf_captionrl/recipes"),
    )
    for folder in folders:
        if folder.joinpath(*parts).is_file():
            return folder.joinpath(*parts)
    raise FileNotFoundError(
        f"recipes/{'/'.join(parts)} is neither in {folders[0]} nor in {folders[1]}. Check the name, or install from a "
        "checkout: pip install -e ."
    )


def _with_config(arguments: list[str], recipe: str) -> list[str]:
    """The arguments, with the path of a configuration in place of its name."""
    found = [
        part
        for argument in arguments
        for part in (argument.split("=", 1) if argument.startswith("--config=") else [argument])
    ]
    for index, argument in enumerate(found):
        if argument == "--config" and index + 1 < len(found) and not Path(found[index + 1]).exists():
            name = found[index + 1]
            if os.sep not in name:
                found[index + 1] = str(recipe_path("configs", Path(recipe).stem, name))
    return found


def _run_for_json(options: TrainOptions, command: list[str], recipe: str, own: list[str]) -> None:
    """Run the recipe in a subprocess with its output on stderr, and print its results."""
    from hf_captionrl.hub import public_command

    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "results.json")
        start = command.index(recipe)
        script = str(Path(__file__).with_name("train_recipe.py"))
        wrapped = [*command[:start], script, str(said), *command[start:]]
        running = subprocess.Popen(wrapped, stdout=2)
        # SIGTERM is passed on to the training, which saves first; Ctrl-C reaches both processes by itself.
        wanted = {signal.SIGTERM: lambda *_: running.terminate(), signal.SIGINT: lambda *_: None}
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            code = running.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if code:
            sys.exit(code if code > 0 else 128 - code)
        path = json.loads(said.read_text(encoding="utf-8"))["results"] if said.is_file() else None
    results = None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    result = {"method": options.method, "recipe": Path(recipe).name, "arguments": public_command(own), "path": path}
    print(json.dumps({**result, "results": results}, ensure_ascii=False))


def train(options: TrainOptions) -> None:
    """Replace this process with the recipe's; with `--json` wait for it, and print its results."""
    if options.processes < 1:
        raise ValueError(f"--processes is {options.processes}. Use 1 or more.")
    file = METHODS[options.method][0]
    recipe = str(recipe_path(file))
    own = _with_config(options.arguments, file)
    # -P: a file in the working folder, such as accelerate.py, must not shadow an installed module.
    start = [sys.executable, "-P"]
    passed = [*own, "--traceback"] if options.traceback else own
    command = [*start, recipe, *passed]
    if options.processes > 1 or options.accelerate_config:
        launcher = str(Path(__file__).with_name("train_launch.py"))
        command = [*start, launcher, "--num_processes", str(options.processes)]
        if options.accelerate_config:
            config = options.accelerate_config
            named = config if Path(config).exists() or os.sep in config else str(recipe_path("accelerate", config))
            command += ["--config_file", named]
        command += [recipe, *passed]
    if options.json:
        _run_for_json(options, command, recipe, own)
        return
    sys.stdout.flush()
    # The recipe receives the signals and sets the exit code, as if it had been called directly.
    os.execv(command[0], command)  # this Python, no shell # nosec B606
