"""`captionrl completion`: a script that completes commands and options."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import ClassVar, Literal

from hf_captionrl.options import CommandOptions, option

__all__ = ["CompletionOptions", "completion_script", "print_script"]


@dataclass
class CompletionOptions(CommandOptions):
    """Print a script that completes commands and options."""

    examples: ClassVar[str] = """
        examples:
          captionrl completion bash >> ~/.bashrc
          captionrl completion zsh > ~/.zfunc/_captionrl
          captionrl completion fish > ~/.config/fish/completions/captionrl.fish
    """

    shell: Literal["bash", "zsh", "fish"] = option(positional=True, help="shell that runs the script")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that completes a parser's commands and options in a shell."""
    import shtab

    return str(shtab.complete(parser, shell))


def print_script(options: CompletionOptions, parser: argparse.ArgumentParser) -> None:
    """Print the script."""
    script = completion_script(parser, options.shell)
    print(json.dumps({"shell": options.shell, "script": script}) if options.json else script)
