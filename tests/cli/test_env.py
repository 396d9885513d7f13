"""The report of `captionrl env`, and its exit code."""

import importlib.metadata as metadata
import json

from hf_captionrl.cli import main


def test_every_dependency_is_listed(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"] == metadata.version("torch")
    assert {"transformers", "trl", "gradio"} <= set(facts["packages"])
    assert main(["env"]) == 0
    assert f"- torch: {metadata.version('torch')}\n" in capsys.readouterr().out


def test_a_missing_or_old_package_exits_with_1(monkeypatch, capsys):
    real = metadata.version

    def version(name):
        if name in ("peft", "gradio"):
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "trl" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["env"]) == 1
    output = capsys.readouterr()
    assert "- gradio: not installed (pip install 'hf-captionrl[demo]')" in output.out
    assert "- peft: not installed (pip install 'peft" in output.out
    assert "- trl: 0.1, but needed: " in output.out
    assert "peft, trl." in output.err  # what is optional never fails


def test_how_a_scorer_reads_captions_is_shown(capsys):
    assert main(["env", "--json", "--scorer", "scenes:clip-reward"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tokens read"], facts["scorer"].partition("@")[0]) == (40, "clip-reward")
    assert facts["canonical text"].startswith("as written")
    assert main(["env", "--scorer", "nowhere/at/all"]) == 2
