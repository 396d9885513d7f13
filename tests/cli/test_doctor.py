"""`captionrl doctor` tells what is there, and says so with its exit code."""

import json

import pytest

from hf_captionrl.cli import doctor, main


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


def test_here_nothing_is_broken(report):
    assert not [finding for findings in report.values() for finding in findings if finding.state == "broken"]
    named = {finding.name: finding for findings in report.values() for finding in findings}
    assert named["torch"].state == "ok"
    assert {"GPU"} & set(named) or "GPU 0" in named
    assert named["scenes:blip-mle"].what == "shipped"
    for name in ("faiss", "spacy", "vllm", "gradio", "Java", "Chromium"):
        assert named[name].state in ("ok", "missing"), name
    assert all(finding.what for finding in named.values())


def test_both_kinds_of_output(report, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"packages", "devices", "optional", "programs", "places", "shipped models"}
    assert found["packages"][0]["name"] == "python"
    assert main(["doctor"]) == 0
    assert "[ ok ] torch" in capsys.readouterr().out


def test_a_missing_package_is_broken_and_ends_with_1(monkeypatch, capsys):
    import importlib.metadata as metadata

    real = metadata.version

    def version(name):
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "trl" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    for group in ("_devices", "_optional_modules", "_programs", "_places", "_shipped_models"):
        monkeypatch.setattr(doctor, group, list)
    assert main(["doctor"]) == 1
    output = capsys.readouterr()
    assert "[FAIL] peft: not installed" in output.out
    assert "[FAIL] trl: 0.1, but needed: <1.17" in output.out
    assert "broken: peft, trl." in output.err


def test_a_group_that_fails_does_not_end_the_report(monkeypatch, capsys):
    def broken():
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "_devices", broken)
    monkeypatch.setattr(doctor, "_optional_modules", list)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "[FAIL] devices: OSError: no such device" in output
    assert "scenes:blip-mle" in output


def test_without_a_browser_it_is_only_missing(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    browser = next(f for f in doctor._programs() if f.name == "Chromium")
    assert (browser.state, browser.what) == ("missing", "some tests of the HTML pages are skipped")
