"""Failed pushes and downloads on the command line: one line with the remedy and without a token; nothing is sent."""

import re

import pytest

from hf_captionrl.cli import main
from tests.hub.folders import publishable
from tests.hub.server import READ, WRITE, WRONG

CASES = {
    "no token": (None, {}, "smile", r"needs a token, but there is none\. Log in"),
    "wrong token": (WRONG, {}, "smile", r"does not accept the token \(401\)\. Create a new one"),
    "read-only token": (READ, {}, "smile", r"may not write to 'smile' \(403\)\. Use a token with write permission"),
    "somebody else's name": (WRITE, {}, "google/smile", r"may not write to 'google/smile'"),
    "other content": (WRITE, {}, "thesis", r"exists and has other content \(thesis.tex\)\. Use another name"),
    "invalid name": (WRITE, {}, "a b/c", r"'a b/c', not a name that the Hub accepts .*Use owner/name"),
    "HTML": (WRITE, {"README.md": "<script>alert(1)</script>"}, "smile", r"contains HTML, '<script>.*Use Markdown"),
    "a path outside": (WRITE, {"README.md": "[x](../../x.json)"}, "smile", r"outside its folder\. Put the file into"),
    "pickles only": (WRITE, {"model.safetensors": None}, "smile", r"no \*\.safetensors.*Save with save_pretrained"),
    "a token inside": (
        WRITE,
        {"results.json": f" {WRITE}"},
        "smile",
        r"results.json contains an access token or a private key\. Remove it",
    ),
    "a placeholder": (WRITE, {"README.md": "TODO"}, "smile", r"'TODO', a placeholder\. Replace it"),
}


@pytest.mark.parametrize("case", CASES)
def test_rejected_push_prints_one_line(case, hub, tmp_path, monkeypatch, capfd):
    token, changes, name, message = CASES[case]
    folder = publishable(tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    for file, more in changes.items():
        path = folder / file
        before = path.read_text() if more is not None else ""
        path.unlink()
        if more is not None:
            path.write_text(f"{before}\n{more}\n")
    hub.add("tester/thesis", {"thesis.tex": b"..."})
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    capfd.readouterr()
    assert main(["push", str(folder), "--repo_id", name, "--json"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = [line for line in said.err.splitlines() if not line.startswith("Loading weights")]
    assert line.startswith("captionrl push: error: ")
    assert re.search(message, line), line
    assert "Traceback" not in line
    sent = {name for repo in hub.repos.values() for name in repo.files} - {".gitattributes"}
    assert sent == {"thesis.tex"}
    # This token was written on purpose; `hub` searches all other files for tokens at its end.
    (folder / "results.json").unlink()


def test_model_with_only_pickles_is_not_loaded(tmp_path, capfd):
    folder = publishable(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    capfd.readouterr()
    assert main(["caption", str(folder), "--output", str(tmp_path / "c.jsonl"), "--max_images", "1", "--json"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert "no weights in safetensors" in said.err.splitlines()[-1]


def test_complete_folder_is_pushed(hub, tmp_path, monkeypatch, capfd):
    """Control: without any fault, the same command succeeds."""
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert main(["push", str(publishable(tmp_path / "model")), "--repo_id", "smile", "--json"]) == 0
    assert "model.safetensors" in hub.repo("tester/smile").files
