"""Parse, run, and end with an exit code: 0 done, 2 usage or bad input (one line says which), 1 anything else."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from hf_captionrl.cli.commands import Command, add_commands, filled
from hf_captionrl.console import CheckedOutput, announce_offline_waits, is_input_error, one_line

if TYPE_CHECKING:
    from hf_captionrl.cli.completion import CompletionOptions

__all__ = ["COMMANDS", "build_parser", "complete", "console", "main"]

_EPILOG = """\
examples:
  captionrl train smile
  captionrl caption scenes:blip-mle --dataset scenes --output mle.jsonl
  captionrl evaluate --captions mle.jsonl smile.jsonl --dataset scenes --suite smile
  captionrl bags --dataset scenes --output truematch.parquet
  captionrl push outputs/smile_blip/model --repo_id me/blip-smile
  captionrl convert Salesforce/blip-image-captioning-base blip-base
  captionrl metrics install
  captionrl demo
  captionrl doctor

Each command has its own --help, with more examples. Exit codes: 0 done, 2 usage or bad input, 1 anything else.
"""


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
        options="evaluation.write_captions:CaptionOptions",
        function="write_captions",
        resumes=True,
    ),
    Command(
        "evaluate",
        "compare files of captions, side by side",
        options="evaluation.evaluate_captions:EvaluateOptions",
        function="evaluate_captions",
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
        "bags",
        "mine bags of similar images",
        options="evaluation.mine_bags:BagsOptions",
        function="mine_bags",
        resumes=True,
    ),
    Command(
        "truematch",
        "build, review and use a benchmark of similar images",
        description="TrueMatch (No Detail Left Behind, section 3): bags of 3, 5 and 7 similar images. A caption passes if it "
        "retrieves its own image within the bag.",
        subcommands=(
            Command(
                "build",
                "find bags of similar images and write the benchmark",
                options="truematch.options:BuildOptions",
                function="truematch.build:build",
                resumes=True,
            ),
            Command(
                "review",
                "keep or drop each bag in a browser",
                options="truematch.options:ReviewOptions",
                function="truematch.review:review",
                resumes=True,
            ),
            Command(
                "apply",
                "apply decisions, and write kept.json and the card again",
                options="truematch.options:ApplyOptions",
                function="truematch.review:apply",
                resumes=True,
            ),
            Command(
                "evaluate",
                "evaluate captioners on the benchmark",
                options="truematch.options:EvaluateOptions",
                function="truematch.evaluate:evaluate",
                resumes=True,
            ),
            Command(
                "leaderboard",
                "combine results into one table, best first",
                options="truematch.options:LeaderboardOptions",
                function="truematch.leaderboard:leaderboard",
                resumes=True,
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
        resumes=True,
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


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, or only of the options of one command."""
    parser = argparse.ArgumentParser(
        prog="captionrl",
        description=filled(
            "Train captioners, write captions, compare captioners, mine bags of similar images, publish and convert models, "
            "install the metrics."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subcommands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_commands(subcommands, COMMANDS, chosen)
    return parser


def complete(options: CompletionOptions) -> None:
    """Print the completion script of this parser."""
    from hf_captionrl.cli.completion import print_script

    print_script(options, build_parser())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    if sys.stdout is None:
        print("captionrl: error: stdout is closed. Use > /dev/null to discard the output.", file=sys.stderr)
        return 2
    output = CheckedOutput(sys.stdout)
    with contextlib.redirect_stdout(output):
        code = _run(argv)
    return output.finish("captionrl", code)


def _run(argv: Sequence[str] | None) -> int:
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        arguments = build_parser(words[0] if words else "").parse_args(words)
    except SystemExit as stop:  # argparse has printed the reason
        return stop.code if isinstance(stop.code, int) else 2
    try:
        arguments.run(arguments)
    except BrokenPipeError:  # the reader of the output (`head`) has closed it
        return 0
    except SystemExit as stop:  # a subprocess has printed the reason
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        hint = "; the same command resumes" if getattr(arguments, "resumes", False) else ""
        print(f"captionrl: interrupted{hint}.", file=sys.stderr)
        return 1
    except Exception as error:
        is_input = is_input_error(error)
        if arguments.traceback:
            traceback.print_exc()
        kind = "" if is_input else f"{type(error).__name__}: "
        hint = "" if is_input or arguments.traceback else " (--traceback shows where)"
        print(f"captionrl {arguments.command}: error: {kind}{one_line(error)}{hint}", file=sys.stderr)
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
    announce_offline_waits()
    sys.exit(main())
