"""Parse, run, and end with an exit code: 0 done, 2 usage or bad input (one line says which), 1 anything else."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from hf_captionrl.utils.console import flush_stdout, is_input_error, one_line
from hf_captionrl.utils.options import CommandOptions, option, options_from

# --- The commands of `captionrl`: what each is called, where its options are declared, and which function runs it ----


@dataclass(frozen=True)
class Command:
    """One command.

    `options` is `"module:Class"`, a subclass of `CommandOptions` that is imported when the command is used; its docstring describes
    the command, its `examples` end the help text. `function` is called with the options; it is of the same module, or
    `"module:function"`. With `is_resumable`, the same command continues an interrupted run.
    """

    name: str
    help: str
    options: str = ""
    function: str = ""
    is_resumable: bool = False
    subcommands: tuple[Command, ...] = ()
    description: str = ""
    examples: str = ""


# fmt: off
COMMANDS: tuple[Command, ...] = (
    Command("train", "finetune a captioner by one of the methods", "cli.train:TrainOptions", "train"),
    Command("assemble", "connect a vision tower and a language model to an untrained captioner",
            "cli.assemble:AssembleOptions", "write_captioner"),
    Command("caption", "write captions of a data set, resumable", "cli.caption:CaptionOptions", "write_captions",
            is_resumable=True),
    Command("album", "caption a set of similar images with distinct captions, or rank existing ones",
            "apps.album.options:AlbumOptions", "apps.album.command:run", is_resumable=True),
    Command("evaluate", "compare files of captions, side by side, also without images", "cli.options:EvaluateOptions",
            "cli.evaluate:evaluate_captions"),
    Command("agreement", "compare metrics with human ratings of captions", "cli.agreement:AgreementOptions",
            "measure_agreement"),
    Command("bags", "mine bags of similar images", "cli.bags:BagsOptions", "mine_bags"),
    Command("truematch", "build, review and use a benchmark of similar images",
            description="TrueMatch (No Detail Left Behind, section 3): bags of 3, 5 and 7 similar images. A caption\n"
                        "passes if it retrieves its target image within the bag.",
            subcommands=(
                Command("build", "find bags of similar images and write the benchmark",
                        "apps.truematch.options:BuildOptions", "apps.truematch.build:build", is_resumable=True),
                Command("review", "write a page that keeps or drops each bag", "apps.truematch.options:ReviewOptions",
                        "apps.truematch.review:review"),
                Command("apply", "apply decisions, and write kept.json and the card again",
                        "apps.truematch.options:ApplyOptions", "apps.truematch.review:apply", is_resumable=True),
                Command("evaluate", "evaluate captioners on the benchmark", "apps.truematch.options:EvaluateOptions",
                        "apps.truematch.evaluate:evaluate", is_resumable=True),
            )),
    Command("pairs", "write preference pairs for DPO, by any reward", "apps.pairs.options:PairsOptions",
            "apps.pairs.pairs:write_pairs"),
    Command("boost", "write richer references with language and vision models, resumable",
            "apps.boosting.options:BoostOptions", "apps.boosting.boost:boost", is_resumable=True),
    Command("card", "write or check the card of a model or a data set", "cli.publish:CardOptions", "write_card"),
    Command("push", "publish a model or data set, or repeat a push that failed", "cli.publish:PushOptions", "push"),
    Command("convert", "write a checkpoint of pickles as safetensors", "apps.convert.options:ConvertOptions",
            "apps.convert.convert:convert_checkpoint"),
    Command("metrics", "the metrics as modules of evaluate",
            description="The metrics as modules of the `evaluate` library.",
            examples="""
            examples:
              python -c 'import evaluate, hf_captionrl; print(evaluate.load("self_retrieval").description)'
              captionrl metrics path caption_diversity
        """,
            subcommands=(
                Command("path", "print the file of a metric", "cli.main:PathOptions", "print_path"),
            )),
    Command("demo", "show captioners and the images that their captions find, on a local page",
            "apps.album.options:DemoOptions", "apps.album.demo:serve_demo"),
    Command("env", "print versions, devices and optional parts", "cli.env:EnvOptions", "report"),
)
# fmt: on

WITHDRAWN = {
    "audit-metric": "reproduction/metric_audit.md in the repository",
    "benchmark": "`captionrl truematch evaluate` with ImageCoDe's folder; Winoground and MMVP-VLM evaluate scorers only",
    "completion": "the help of each command, such as `captionrl caption --help`",
    "doctor": "`captionrl env`",
    "explain": "`captionrl evaluate`, which has the ranks of every caption",
    "features": "the command that needs the features, which fills the feature store, such as `captionrl evaluate`",
    "gallery": "`captionrl train`, whose recipes write gallery.html",
    "pixels": "`--cache_pixels` of a recipe",
    "serve-rewards": "`as_function()` of a reward in the other trainer",
    "study": "`captionrl agreement`, which compares metrics with ratings that exist",
}
"""What replaces each command that is no longer there."""


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"hf_captionrl.{module}"), name)


def add_commands(subparsers: Any, commands: Iterable[Command], chosen: str | None = None) -> None:
    """Add commands to a parser, with their options if they are the `chosen` one or none is chosen."""
    for command in commands:
        if chosen is not None and command.name != chosen:
            subparsers.add_parser(command.name, help=command.help)
            continue
        cls = _load(command.options) if command.options else None
        text, examples = (command.description, command.examples) if cls is None else (cls.__doc__ or "", cls.examples)
        parser = subparsers.add_parser(
            command.name,
            help=command.help,
            dataclass_types=[] if cls is None else [cls],
            description=inspect.cleandoc(text),
            epilog=inspect.cleandoc(examples),
        )
        if cls is None:
            parser.set_defaults(traceback=False)
            nested = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
            add_commands(nested, command.subcommands)
            continue
        function = command.function
        if ":" not in function:
            function = f"{command.options.partition(':')[0]}:{function}"
        parser.set_defaults(options=cls, function=function, is_resumable=command.is_resumable)


# --- `captionrl metrics path` ----------------------------------------------------------------------------------------


@dataclass
class PathOptions(CommandOptions):
    """Print the file of a metric. evaluate.load takes it too."""

    examples: ClassVar[str] = """
        example:
          captionrl metrics path self_retrieval
    """

    name: str = option(
        positional=True, metavar="NAME", help="name of the metric, such as self_retrieval or caption_diversity"
    )


def print_path(options: PathOptions) -> None:
    """Print the file of a module."""
    from hf_captionrl.metrics.evaluate_modules import path

    file = path(options.name)
    print(json.dumps({"name": options.name, "path": file}) if options.json else file)


# --- Parse, run, and end with an exit code: 0 done, 2 usage or bad input (one line says which), 1 anything else ------

_EPILOG = """\
examples:
  captionrl train smile
  captionrl caption scenes:blip-mle --dataset scenes --output mle.jsonl
  captionrl evaluate --captions mle.jsonl smile.jsonl --dataset scenes
  captionrl bags --dataset scenes --output truematch.json
  captionrl push outputs/smile_blip/model --repo_id me/blip-smile
  captionrl env

Each command has a --help with more examples.
Exit codes: 0 done, 2 usage or bad input, 1 anything else.
"""


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, or only of the options of one command."""
    parser = argparse.ArgumentParser(
        prog="captionrl",
        description="Train captioners, write and compare captions, publish and convert models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind: Any = argparse.ArgumentParser
    if chosen is None or chosen in {command.name for command in COMMANDS}:  # a quarter of a second
        from hf_captionrl.utils.option_parser import OptionParser

        kind = OptionParser
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True, parser_class=kind)
    add_commands(subcommands, COMMANDS, chosen)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    code = _run(argv)
    flush_stdout()
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        if words and words[0] in WITHDRAWN:
            print(f"captionrl: error: {words[0]} is withdrawn. Use {WITHDRAWN[words[0]]}.", file=sys.stderr)
            return 2
        arguments = build_parser(words[0] if words else "").parse_args(words)
    except SystemExit as stop:  # argparse has printed the reason
        return stop.code if isinstance(stop.code, int) else 2
    try:
        options = options_from(arguments.options, arguments)  # values are checked before torch is imported
        _load(arguments.function)(options)
    except BrokenPipeError:  # the reader of the output (`head`) has closed it
        return 0
    except SystemExit as stop:  # a subprocess has printed the reason
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        hint = "; the same command resumes" if getattr(arguments, "is_resumable", False) else ""
        print(f"captionrl: interrupted{hint}.", file=sys.stderr)
        return 130
    except Exception as error:
        is_input = is_input_error(error)
        if arguments.traceback:
            traceback.print_exc()
        kind = "" if is_input else f"{type(error).__name__}: "
        hint = "" if is_input or arguments.traceback else " (--traceback shows where)"
        print(f"captionrl {arguments.subcommand}: error: {kind}{one_line(error)}{hint}", file=sys.stderr)
        return 2 if is_input else 1
    return 0


def console() -> NoReturn:
    """Entry point of the console script: `main` without the libraries' progress bars and warnings."""
    # Set before the libraries are imported, and only here: a program that calls `main` keeps its own settings.
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    sys.exit(main())
