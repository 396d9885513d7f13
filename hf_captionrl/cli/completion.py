"""`captionrl completion SHELL`: a script that completes commands and options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from hf_captionrl.cli.arguments import add_common

__all__ = ["add_parser", "completion_script", "run"]

_EPILOG = """\
examples:
  captionrl completion bash >> ~/.bashrc
  captionrl completion zsh > ~/.zfunc/_captionrl
  captionrl completion fish > ~/.config/fish/completions/captionrl.fish
"""

_BASH = """\
_captionrl() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    case "${{COMP_WORDS[1]:-}}" in
{cases}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then words="{commands} --help"; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ ${{#COMPREPLY[@]}} -eq 0 ]; then COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _captionrl captionrl
"""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description="Print a script that completes commands and options.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script")
    add_common(parser)
    parser.set_defaults(run=run)


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Options and choices that a parser knows, those of its own subcommands too."""
    words: list[str] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                words += [name, *_words(inner)]
        elif action.choices and not action.option_strings:
            words += [str(choice) for choice in action.choices]
    return list(dict.fromkeys(words))


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script."""
    inner = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    words = {name: _words(command) for name, command in inner.items()}
    if shell == "fish":
        lines = [f"complete -c captionrl -n __fish_use_subcommand -a '{' '.join(words)}'"]
        for name, own in words.items():
            for word in own:
                what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
                lines.append(f"complete -c captionrl -n '__fish_seen_subcommand_from {name}' {what}")
        return "\n".join(lines) + "\n"
    cases = "\n".join(f'        {name}) words="{" ".join(own)}" ;;' for name, own in words.items())
    script = _BASH.format(cases=cases, commands=" ".join(words))
    if shell == "zsh":
        script = "#compdef captionrl\nautoload -U +X bashcompinit && bashcompinit\n" + script
    return script


def run(arguments: argparse.Namespace) -> None:
    """Print the script."""
    from hf_captionrl.cli.main import build_parser

    make: Callable[[], argparse.ArgumentParser] = build_parser
    script = completion_script(make(), arguments.shell)
    if arguments.json:
        print(json.dumps({"shell": arguments.shell, "script": script}))
    else:
        print(script, end="")
