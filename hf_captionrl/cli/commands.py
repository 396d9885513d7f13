"""The commands of `captionrl`: what each is called, where its options are declared, and which function runs it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hf_captionrl.cli.help_text import filled
from hf_captionrl.options import add_options, options_from

__all__ = ["COMMANDS", "Command", "add_commands"]


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name (`str`): As typed.
        help (`str`): One line in the list of commands.
        options (`str`): `"module:Class"`, a subclass of `CommandOptions`. Its docstring describes the command, its `examples`
            end the help text. It is imported when the command is used.
        function (`str`): `"function"` of the same module, or `"module:function"`; called with the options.
        is_resumable (`bool`): Whether the same command continues an interrupted run.
        subcommands (`tuple[Command, ...]`): Instead of options and function.
        description (`str`): Of a command with subcommands.
        examples (`str`): Of a command with subcommands.
    """

    name: str
    help: str
    options: str = ""
    function: str = ""
    is_resumable: bool = False
    subcommands: tuple[Command, ...] = ()
    description: str = ""
    examples: str = ""


COMMANDS: tuple[Command, ...] = (
    Command(
        "train",
        "finetune a captioner by one of the methods",
        options="cli.train:TrainOptions",
        function="train",
    ),
    Command(
        "caption",
        "write captions of a data set, resumable",
        options="evaluation.caption_options:CaptionOptions",
        function="evaluation.write_captions:write_captions",
        is_resumable=True,
    ),
    Command(
        "album",
        "caption a set of similar images with distinct captions, or diagnose existing ones",
        options="album.options:AlbumOptions",
        function="album.command:describe",
        is_resumable=True,
    ),
    Command(
        "evaluate",
        "compare files of captions, side by side",
        options="evaluation.evaluate_options:EvaluateOptions",
        function="evaluation.evaluate_captions:evaluate_captions",
    ),
    Command(
        "benchmark",
        "evaluate a scorer on Winoground or MMVP-VLM, captions on ImageCoDe",
        options="evaluation.benchmarks:BenchmarkOptions",
        function="benchmark",
    ),
    Command(
        "explain",
        "show a caption token by token, under MLE, SMILE and self-retrieval",
        options="explain.write_explanation:ExplainOptions",
        function="explain",
    ),
    Command(
        "gallery",
        "show captions of several systems side by side, errors marked",
        options="gallery.write_pages:GalleryOptions",
        function="write_pages",
    ),
    Command(
        "features",
        "compute the features of a scorer for every image, resumable",
        options="evaluation.write_features:FeaturesOptions",
        function="write_features",
        is_resumable=True,
    ),
    Command(
        "pixels",
        "prepare every image for a captioner once, resumable",
        options="evaluation.write_pixels:PixelsOptions",
        function="write_pixels",
        is_resumable=True,
    ),
    Command(
        "bags",
        "mine bags of similar images",
        options="evaluation.mine_bags:BagsOptions",
        function="mine_bags",
        is_resumable=True,
    ),
    Command(
        "truematch",
        "build, review and use a benchmark of similar images",
        description="TrueMatch (No Detail Left Behind, section 3): bags of 3, 5 and 7 similar images. A caption passes if it "
        "retrieves its target image within the bag.",
        subcommands=(
            Command(
                "build",
                "find bags of similar images and write the benchmark",
                options="truematch.options:BuildOptions",
                function="truematch.build:build",
                is_resumable=True,
            ),
            Command(
                "review",
                "keep or drop each bag in a browser",
                options="truematch.options:ReviewOptions",
                function="truematch.review:review",
                is_resumable=True,
            ),
            Command(
                "apply",
                "apply decisions, and write kept.json and the card again",
                options="truematch.options:ApplyOptions",
                function="truematch.review:apply",
                is_resumable=True,
            ),
            Command(
                "evaluate",
                "evaluate captioners on the benchmark",
                options="truematch.options:EvaluateOptions",
                function="truematch.evaluate:evaluate",
                is_resumable=True,
            ),
            Command(
                "leaderboard",
                "combine results into one table, best first",
                options="truematch.options:LeaderboardOptions",
                function="truematch.leaderboard:leaderboard",
                is_resumable=True,
            ),
        ),
    ),
    Command(
        "study",
        "build a human study and score its answers",
        description="Human studies without a server. `build` writes one HTML page per participant, which opens from disk and "
        "exports the answers as a file, and the key, which stays with you. `score` scores the answers with the key.",
        subcommands=(
            Command(
                "build",
                "write the pages and the key",
                description="Write the pages and the key of one of two designs.",
                subcommands=(
                    Command(
                        "retrieval",
                        "pick the image of a caption among ten similar images (DiscriTune)",
                        options="studies.options:RetrievalOptions",
                        function="studies.build:build_retrieval",
                    ),
                    Command(
                        "rating",
                        "rate descriptiveness, accuracy and fluency from 1 to 5 (SMILE)",
                        options="studies.options:RatingOptions",
                        function="studies.build:build_rating",
                    ),
                ),
            ),
            Command(
                "score",
                "score answers with the key",
                options="studies.options:ScoreOptions",
                function="studies.score:score",
            ),
        ),
    ),
    Command(
        "boost",
        "write richer references with language and vision models, resumable",
        options="boosting.options:BoostOptions",
        function="boosting.boost:boost",
        is_resumable=True,
    ),
    Command(
        "card",
        "write or check the card of a model or a data set",
        options="cli.card:CardOptions",
        function="write_card",
    ),
    Command(
        "push",
        "publish a model or data set, or repeat a push that failed",
        options="cli.push:PushOptions",
        function="push",
    ),
    Command(
        "convert",
        "write a checkpoint of pickles as safetensors",
        options="conversion.command:ConvertOptions",
        function="convert_checkpoint",
    ),
    Command(
        "metrics",
        "make evaluate.load find the metrics by name",
        description="The metrics as modules of the `evaluate` library.",
        examples="""
            examples:
              captionrl metrics install
              python -c 'import evaluate; print(evaluate.load("self_retrieval").description)'
              captionrl metrics path caption_diversity
        """,
        subcommands=(
            Command(
                "install",
                "add every metric to evaluate's modules cache",
                options="cli.metrics:InstallOptions",
                function="install_metrics",
            ),
            Command("path", "print the folder of a metric", options="cli.metrics:PathOptions", function="print_path"),
        ),
    ),
    Command(
        "demo",
        "show captioners and the images that their captions find, on a local page",
        options="album.demo:DemoOptions",
        function="serve_demo",
    ),
    Command(
        "doctor",
        "say what is installed, and what works with it",
        options="cli.doctor:DoctorOptions",
        function="report",
    ),
    Command(
        "completion",
        "print a completion script for bash, zsh or fish",
        options="cli.completion:CompletionOptions",
        function="cli.main:complete",
    ),
)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"hf_captionrl.{module}"), name)


def add_commands(subparsers: Any, commands: Iterable[Command], chosen: str | None = None) -> None:
    """Add commands to a parser."""
    for command in commands:
        parser = subparsers.add_parser(
            command.name, help=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if chosen is not None and command.name != chosen:
            continue
        if command.subcommands:
            parser.description = filled(command.description)
            parser.epilog = filled(command.examples) or None
            parser.set_defaults(traceback=False)
            nested = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
            add_commands(nested, command.subcommands)
            examples = [(inner.epilog or "").removeprefix("examples:\n") for inner in nested.choices.values()]
            parser.epilog = parser.epilog or "examples:\n" + "\n".join(filter(None, examples))
            continue
        cls = _load(command.options)
        parser.description = filled(cls.__doc__ or "")
        parser.epilog = filled(cls.examples) or None
        add_options(parser, cls)
        function = (
            command.function if ":" in command.function else f"{command.options.partition(':')[0]}:{command.function}"
        )
        parser.set_defaults(run=_runner(cls, function), is_resumable=command.is_resumable)


def _runner(cls: type[Any], function: str) -> Any:
    def run(arguments: argparse.Namespace) -> None:
        _load(function)(options_from(cls, arguments))

    return run
