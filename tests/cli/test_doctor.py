"""The report of `captionrl doctor`, and its exit code."""

import logging

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants

from hf_captionrl.cli import doctor, main
from hf_captionrl.metrics import meteor_spice
from hf_captionrl.utils import console


def test_nothing_is_broken_in_the_test_environment(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "[ ok ] torch" in said
    assert "scenes:blip-mle: shipped" in said
    for name in ("faiss", "spacy", "vllm", "gradio", "Java", "METEOR", "SPICE", "Chromium"):
        assert f"] {name}" in said


def test_missing_package_is_broken_and_exits_with_1(monkeypatch, capsys):
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
    assert "[FAIL] trl: 0.1, but needed: " in output.out
    assert "broken: peft, trl." in output.err


def test_failing_check_does_not_end_the_report(monkeypatch, capsys):
    def broken():
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "_devices", broken)
    monkeypatch.setattr(doctor, "_optional_modules", list)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "[FAIL] devices: OSError: no such device" in output
    assert "scenes:blip-mle" in output


def programs():
    return {finding.name: finding for finding in doctor._programs()}


def test_meteor_is_ok_exactly_if_it_can_be_computed(monkeypatch, tmp_path):
    def computes():
        try:
            return meteor_spice.meteor(["a dog"], [["a dog"]])["meteor"] > 0
        except meteor_spice.JavaError:
            return False

    assert (programs()["METEOR"].state == "ok") == computes()
    # A program called java that does not run METEOR, such as the stub of a system without Java.
    (tmp_path / "java").write_text("#!/bin/sh\necho no runtime present >&2\nexit 1\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setattr(meteor_spice, "find_java", lambda java=None: str(tmp_path / "java"))
    found = programs()
    assert found["Java"].state == "ok"
    assert found["METEOR"].state == "missing"
    assert "no runtime present" in found["METEOR"].what
    assert not computes()

    def nowhere(java=None):
        raise meteor_spice.JavaError("there is no Java")

    monkeypatch.setattr(meteor_spice, "find_java", nowhere)
    assert {programs()[name].state for name in ("Java", "METEOR", "SPICE")} == {"missing"}


def test_hub_is_ok_only_after_an_answer(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert doctor._hub().state == "ok"
    assert "offline" in doctor._hub().what
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for content, status, state, what in (
        (b"[]", 200, "ok", "answers"),
        (b"<html>Sign in", 200, "missing", "not the Hub's"),
        (b"{}", 200, "missing", "200 without"),
        (b"", 503, "missing", "503"),
        (None, 0, "missing", "does not answer"),
    ):

        def answer(request, content=content, status=status):
            assert request.url.raw_path == b"/api/models?limit=1"
            if content is None:
                raise httpx.ConnectError("nothing listens")
            return httpx.Response(status, content=content)

        with httpx.Client(transport=httpx.MockTransport(answer)) as session:
            monkeypatch.setattr(huggingface_hub, "get_session", lambda session=session: session)
            finding = doctor._hub()
        assert finding.state == state
        assert what in finding.what
        assert ("Use HF_HUB_OFFLINE=1" in finding.what) == (state == "missing")


@pytest.fixture
def client(monkeypatch):
    """Asks a Hub at an address where nothing listens, and how long it would have waited between the tries."""
    import huggingface_hub.utils._http as client

    waits = []
    monkeypatch.setattr(client.time, "sleep", waits.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(logging.getLogger("huggingface_hub.utils._http"), "filters", [])
    client.close_session()
    yield lambda method: client.http_backoff(method, "http://127.0.0.1:9/nothing", max_retries=2), waits
    client.close_session()


def test_a_hub_that_does_not_answer_is_asked_once(client, capsys):
    from huggingface_hub.errors import OfflineModeIsEnabled

    ask, waits = client
    console.work_offline_without_hub()
    console.work_offline_without_hub()
    with pytest.raises(Exception, match=r"refused|failed|connect"):  # an upload is tried again
        ask("PUT")
    for _ in range(2):
        with pytest.raises(OfflineModeIsEnabled):
            ask("GET")
    assert len(waits) == 2
    said = capsys.readouterr().err
    assert said.count("HF_HUB_OFFLINE=1") == 1
    assert len(said.splitlines()) == 1


def test_retries_continue_where_the_hub_answers(client, monkeypatch, capsys):
    ask, waits = client
    monkeypatch.setattr(console, "_hub_answers", lambda: True)
    console.work_offline_without_hub()
    with pytest.raises(Exception, match=r"refused|failed|connect"):
        ask("GET")
    assert len(waits) == 2
    assert not constants.HF_HUB_OFFLINE
    assert capsys.readouterr().err == ""
