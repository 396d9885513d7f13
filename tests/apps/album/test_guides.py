"""Every command and the program of docs/album.md, with small stand-ins for the model and the photographs."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hf_captionrl.apps.album.album import PROBLEMS
from hf_captionrl.cli import main
from hf_captionrl.scenes import load_scenes

PAGE = Path(__file__).parents[3] / "docs" / "album.md"
QUICK = "--num_beams 1 --num_samples 2 --max_new_tokens 8 --cache_dir cache".split()
STAND_INS = {"Salesforce/blip-image-captioning-base": "scenes:blip-mle", "10m": "1s"}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = load_scenes(num_train=0, num_validation=0, num_test=15)["test"]["image"][:3]
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(images):
        image.save(tmp_path / "photos" / f"{number}.png")
    rows = [{"image_id": f"{number}.png", "caption": "a pig"} for number in range(3)]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guides_write_their_files(photos, command, capsys):
    words = [STAND_INS.get(word, word) for word in shlex.split(command)]
    assert words[:2] == ["captionrl", "album"]
    scorer = [] if "--adapt" in words else ["--scorer", "scenes:siglip-held-out"]
    assert main([*words[1:], *QUICK, *scorer]) == 0
    assert "images in" in capsys.readouterr().out
    named = words[words.index("--output") + 1 :] if "--output" in words else ["album.jsonl"]
    assert all(Path(name).stat().st_size for name in named if "." in name)
    if "--sidecars" in words:
        assert all(Path(f"photos/{n}.txt").read_text().startswith("ohwx dog") for n in range(3))


def test_guides_of_three_jobs_are_there():
    text = " ".join(COMMANDS)
    assert all(word in text for word in ("--max_characters 125", "--drop_shared", "--captions", "--adapt"))
    rows = dict(re.findall(r"^\| (\w+) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name: rows.get(name) for name in PROBLEMS} == PROBLEMS


def test_program_of_the_guide_writes_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("python")
    exec(compile(program, str(PAGE), "exec"), {})
    assert Path("album.csv").read_text(encoding="utf-8-sig").startswith("image_id,caption")
    assert capsys.readouterr().out
