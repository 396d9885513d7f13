"""Every existing caption of an image is judged."""

import csv
import json
from pathlib import Path

from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.command import summary_text
from hf_captionrl.cli import main
from tests.apps.album.axes import Axes, picture

PICTURES = [picture(n) for n in (0, 1, 2, 3, 4, 5, 0)]  # the last one is a copy of the first
TEXTS = [
    ["image 0", "all", "", "picture 1"],
    ["image 1"],
    ["long image 2", "IMAGE 1."],
    [],
    ["image 4", "image 4"],
    ["  ", "image 5"],
    ["image 0", "image 3"],
]


def test_every_caption_has_a_row():
    found = describe_album(PICTURES, None, Axes(), captions=TEXTS, copy_threshold=2)
    rows = [
        (r["image_id"], r["number"], r["caption"], r["rank"], r["confused_with"], r["problems"]) for r in found.rows()
    ]
    assert rows == [
        ("0", 1, "image 0", 1, [], []),
        ("0", 2, "all", 6, ["1", "2", "3", "4", "5"], ["generic"]),
        ("0", 3, "picture 1", 6, ["1", "2", "3", "4", "5"], ["generic"]),
        ("1", 1, "image 1", 1, [], ["duplicate"]),
        ("2", 1, "long image 2", 1, [], ["unread"]),
        ("2", 2, "IMAGE 1.", 6, ["0", "1", "3", "4", "5"], ["duplicate", "generic"]),
        ("3", 1, "", None, [], ["missing"]),
        ("4", 1, "image 4", 1, [], []),
        ("4", 2, "image 4", 1, [], []),
        ("5", 1, "image 5", 1, [], []),
        ("6", 1, "image 0", 1, [], []),
        ("6", 2, "image 3", 6, ["3", "1", "2", "4", "5"], ["generic"]),
    ]
    assert len(found.images) == 7
    assert found.captions == ["image 0", "image 1", "long image 2", "", "image 4", "image 5", "image 0"]
    assert (2, 1) in found.confusions
    assert len(set(found.confusions)) == len(found.confusions) == 10
    summary = found.summary()
    assert (summary["images"], summary["captions"], summary["texts"], summary["copies"]) == (7, 6, 11, 1)
    assert summary["problems"] == {"duplicate": 2, "generic": 4, "missing": 1, "unread": 1}
    # 9 captions of images that are not copies: 7 distinct, 6 of rank 1.
    assert (summary["distinct"], summary["rank_1"]) == (7 / 9, 6 / 9)
    text = summary_text({**summary, "outputs": ["o.csv"], "seconds": 1.0, "unreadable_images": []}, found)
    assert "Of 11 captions, 77.8% are distinct, and 66.7% rank their image first among 6" in text


def test_command_judges_every_caption_of_a_file(tmp_path, monkeypatch, scenes, capsys):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(3):
        scenes[number].save(f"photos/{number}.png")
    rows = [{"image_id": "0.png", "captions": ["a pig", "two cows"]}, {"image_id": "1.png", "caption": "a pig"}]
    Path("old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    quick = ["--scorer", "scenes:siglip-held-out", "--cache_dir", "cache", "--json"]
    assert main(["album", "photos", "--captions", "old.jsonl", "--output", "o.csv", "o.jsonl", "o.html", *quick]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["captions"], summary["texts"], summary["problems"]["duplicate"]) == (2, 3, 2)
    with open("o.csv", encoding="utf-8-sig", newline="") as file:
        table = [(row["image_id"], row["number"], row["caption"]) for row in csv.DictReader(file)]
    assert table == [("0.png", "1", "a pig"), ("0.png", "2", "two cows"), ("1.png", "1", "a pig"), ("2.png", "1", "")]
    assert Path("o.html").read_text(encoding="utf-8").count("two cows") >= 1
    # Both tables can be judged again.
    for name in ("o.csv", "o.jsonl"):
        assert main(["album", "photos", "--captions", name, "--output", f"again-{name}", *quick]) == 0
        again = json.loads(capsys.readouterr().out)
        assert (again["texts"], again["problems"]) == (3, summary["problems"])
