"""What the record of written files keeps, over crashes and edits."""

import json

import pytest

from hf_captionrl.apps.album.command import OwnFiles


@pytest.fixture
def sidecar(tmp_path):
    path = tmp_path / "1.txt"
    path.write_text("mine", encoding="utf-8")
    return path


def written(kept, path, text):
    with kept.writing([path]):
        path.write_text(text, encoding="utf-8")


def test_old_texts_may_contain_any_separator(tmp_path, sidecar):
    text = "one\u2028two\u2029three\x85four\x0bfive\n"
    sidecar.write_bytes(text.encode("utf-8"))
    written(OwnFiles(tmp_path / "out.jsonl"), sidecar, "new")
    assert OwnFiles(tmp_path / "out.jsonl").old_texts() == {"1.txt": text}


def test_an_incomplete_line_is_dropped(tmp_path, sidecar):
    kept = OwnFiles(tmp_path / "out.jsonl")
    written(kept, sidecar, "new")
    with open(kept.old, "ab") as file:
        file.write(b'{"file": "2.txt", "te')  # the disk was full
    assert kept.old_texts() == {"1.txt": "mine"}
    other = tmp_path / "2.txt"
    other.write_text("theirs", encoding="utf-8")
    written(kept, other, "new")
    assert kept.old_texts() == {"1.txt": "mine", "2.txt": "theirs"}
    assert [json.loads(line)["file"] for line in kept.old.read_text(encoding="utf-8").splitlines()] == [
        "1.txt",
        "2.txt",
    ]


def test_an_edit_after_writing_is_not_ours(tmp_path, sidecar):
    kept = OwnFiles(tmp_path / "out.jsonl")
    written(kept, sidecar, "new")
    assert kept.is_ours(sidecar)
    sidecar.write_text("edited", encoding="utf-8")
    assert OwnFiles(tmp_path / "out.jsonl").foreign([sidecar]) == [sidecar]
