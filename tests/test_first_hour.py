"""The script that plays four users: it sees what goes wrong, and the users pass."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from scripts import first_hour
from scripts.first_hour_users.photographer import OTHERS, make_photos
from scripts.first_hour_users.researcher import SPLITS, make_karpathy_split
from scripts.first_hour_users.session import CommandFailedError, Session

ROOT = Path(__file__).parents[1]


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path / "user", source=ROOT, python=Path(sys.executable))


def test_photographs_are_of_many_kinds(tmp_path):
    names = make_photos(tmp_path)
    assert len(names) == len(set(names)) == 30
    kinds = set()
    for name in names:
        with Image.open(tmp_path / name) as image:
            image.load()
            kinds.add((image.format, image.mode))
    assert {kind for kind, _ in kinds} == {"JPEG", "PNG", "WEBP"}
    assert {"RGB", "RGBA", "L", "CMYK"} <= {mode for _, mode in kinds}
    assert len({(tmp_path / name).read_bytes() for name in names}) == 30
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 30 + len(OTHERS)


def test_the_karpathy_file_is_read_by_the_package(session):
    from hf_captionrl.data import load_captions

    make_karpathy_split(session)
    splits = load_captions(str(session.path("dataset_coco.json")), split=None, image_root=str(session.path("coco")))
    found = {name: len(rows) for name, rows in splits.items()}
    assert sum(found.values()) == sum(SPLITS.values())
    assert found["test"] == SPLITS["test"]


def test_a_command_that_ends_otherwise_is_shown(session):
    with pytest.raises(CommandFailedError, match=r"ended with 3 instead of 0:\n    \| it broke"):
        session.run("python -c 'print(\"it broke\"); raise SystemExit(3)'")
    assert session.run("python -c 'raise SystemExit(2)'", code=2) == ""
    assert [command["code"] for command in session.commands] == [3, 2]


def test_checks_say_what_was_found_and_wanted(session):
    session.run("python -c 'print(1); print(2); print(3)'", max_lines=2)
    session.check("a number", 3, 3)
    session.check("a list", ["a"], [])
    session.check_says("captions of 29 of 30\nimages.", "captions of 30 of 30 images")
    assert [check["passed"] for check in session.checks] == [False, True, False, False]
    assert session.checks[0] == {"what": "lines of `python -c print(1); print(2); print(3)`", "found": 3, "wanted": "at most 2", "passed": False}  # fmt: skip


def test_a_user_who_fails_is_reported(session, monkeypatch, capsys):
    def fails(user):
        user.check("captions", 27, 30)
        user.read_json("missing.json")

    monkeypatch.setitem(first_hour.USERS, "photographer", fails)
    monkeypatch.setattr(Session, "check_source", lambda self: None)
    entry = first_hour.play("photographer", session)
    assert not entry["passed"]
    assert "FileNotFoundError" in entry["error"]
    first_hour._report(entry)
    said = capsys.readouterr().out
    assert "FAIL  captions: 27 (wanted 30)" in said
    assert "photographer: FAILED" in said


@pytest.mark.slow
@pytest.mark.parametrize("user", first_hour.USERS)
def test_the_first_hour_of(user, tmp_path, capsys):
    log = tmp_path / "log.json"
    code = first_hour.main(["--python", sys.executable, "--user", user, "--output", str(log)])
    assert code == 0, capsys.readouterr().out
    assert json.loads(log.read_text())["passed"]
