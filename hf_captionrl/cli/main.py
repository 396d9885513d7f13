"""Parse, run, and end with an exit code: 0 done, 2 usage or bad input (one line says which), 1 anything else."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from hf_captionrl.cli.commands import COMMANDS, add_commands
from hf_captionrl.cli.help_text import filled
from hf_captionrl.console import CheckedOutput, announce_offline_waits, is_input_error, one_line

if TYPE_CHECKING:
    from hf_captionrl.cli.completion import CompletionOptions

__all__ = ["build_parser", "complete", "console", "main"]

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

Each command has a --help with more examples. Exit codes: 0 done, 2 usage or bad input, 1 anything else.
"""


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
        hint = "; the same command resumes" if getattr(arguments, "is_resumable", False) else ""
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
