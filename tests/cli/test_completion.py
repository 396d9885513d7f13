"""Completion as bash itself does it."""

import shutil
import subprocess

import pytest

from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser, completion_script


def complete(*words: str) -> list[str]:
    """Completions of bash for the last word."""
    script = completion_script(build_parser(), "bash")
    line = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_captionrl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.split()


def test_bash_completes_commands_and_options():
    assert complete("captionrl", "eva") == ["evaluate"]
    assert {"train", "caption", "doctor"} <= set(complete("captionrl", ""))
    assert complete("captionrl", "caption", "--max_new") == ["--max_new_tokens"]
    assert "self-retrieval" in complete("captionrl", "train", "se")
    assert complete("captionrl", "metrics", "inst") == ["install"]
    assert complete("captionrl", "evaluate", "--suite", "nd") == ["ndlb"]
    assert complete("captionrl", "study", "build", "retrieval", "--num") == ["--num_sets"]
    assert complete("captionrl", "caption", "--nothing") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_of_all_shells_contain_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in ("train", "caption", "evaluate", "bags", "boost", "push", "card", "metrics", "doctor"):
        assert command in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_unknown_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice" in capsys.readouterr().err
