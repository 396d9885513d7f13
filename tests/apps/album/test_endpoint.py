"""`captionrl album --endpoint`, several captions per image, decorative images."""

import csv
import json
import time
from pathlib import Path

import pytest
from PIL import Image

from hf_captionrl.apps.album import album as steps
from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.cli import main
from tests.apps.album.conftest import Axes, album, picture, rows_of, write_images
from tests.apps.boosting.server import ChatServer, texts_of
from tests.cli.test_caption_endpoint import log_probs, shade_of
from tests.processes import Forked

SCORER = "--scorer scenes:siglip-held-out --cache_dir cache --batch_size 2 --backoff_s 0".split()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
    monkeypatch.chdir(tmp_path)
    return write_images(scenes[:5], [f"{number}.png" for number in range(5)])


def answer(body):
    return f"shade {shade_of(body['messages'])} of seed {body['seed']}"


def ask(server, *more):
    command = ["album", "photos", *SCORER, "--model", "seer", "--endpoint", server.url, "--num_samples", "2"]
    return main([*command, "--language", "any", *more])


def test_candidates_are_samples_and_nothing_is_asked_twice(photos, capsys):
    with ChatServer(answer, of_body=True, log_probs=log_probs) as server:
        assert ask(server, "--output", "o.csv", "o.jsonl", "--seed", "5", "--temperature", "0.4", "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        told = sorted((body["seed"], body["temperature"]) for body in server.requests)
        assert told == sorted([(5, 0.0), (6, 0.4), (7, 0.4)] * 5)
        assert (summary["endpoint"]["requests"], summary["endpoint"]["completion_tokens"]) == (15, 75)
        rows = rows_of("o.jsonl")
        for row in rows:
            shade, seed = row["caption"].split()[1::3]
            assert seed in "567"
            assert row["mean_log_prob"] == pytest.approx((-0.75 - float(shade) / 100) / 3)
        with Path("o.csv").open(encoding="utf-8-sig", newline="") as file:
            assert [row["mean_log_prob"].lstrip("'") for row in csv.DictReader(file)] == [
                str(r["mean_log_prob"]) for r in rows
            ]
        # Shards and answers are both kept, and another choice asks nothing.
        Path("o.jsonl").unlink()
        again = [
            "--output",
            "o.csv",
            "o.jsonl",
            "--seed",
            "5",
            "--temperature",
            "0.4",
            "--overwrite",
            "--choice",
            "first",
        ]
        answers = Path("o.answers.jsonl").read_bytes()
        assert ask(server, *again[:-3], *again[-2:]) == 0
        assert len(server.requests) == 15
        assert [row["caption"].split()[-1] for row in rows_of("o.jsonl")] == ["5"] * 5
        assert Path("o.answers.jsonl").read_bytes() == answers
        assert ask(server, *again) == 0
        assert len(server.requests) == 30


def test_killed_album_asks_only_for_what_is_left(photos, capsys):
    with ChatServer(answer, lambda number, _: "hang" if number == 10 else "ok", of_body=True) as server:
        with Forked(ask, server, "--concurrency", "1") as run:
            while len(server.requests) < 11:
                assert run.returncode is None
                time.sleep(0.01)
            run.kill()
            run.wait()
        assert ask(server, "--json") == 0
        assert json.loads(capsys.readouterr().out)["endpoint"]["requests"] == 15 - 10
        assert len({(shade_of(b["messages"]), b["seed"]) for b in server.requests}) == len(server.requests) - 1


def test_contrastive_prompt_tells_the_captions_of_similar_images(photos):
    with ChatServer(answer, of_body=True) as server:
        assert ask(server, "--contrastive", "--num_distractors", "2", "--do_not_mention", "logo") == 0
    told = [texts_of(body["messages"])[0] for body in server.requests[15:]]
    assert len(told) == 5
    for text in told:
        assert 'Do not mention: "logo".' in text
        assert text.count("\n- shade ") == 2


def test_image_without_an_answer_stops_the_album_and_keeps_the_others(photos, capsys):
    with ChatServer(answer, lambda number, _: 400 if number in (6, 7) else "ok", of_body=True) as server:
        assert ask(server, "--concurrency", "1", "--num_samples", "0", "--choice", "first") == 0
        assert ask(server, "--concurrency", "1", "--overwrite", "--num_samples", "0", "--choice", "first") == 1
        assert "has no answer: HTTP 400" in capsys.readouterr().err
        number = len(server.requests)
        server.plan = lambda number, _: "ok"
        assert ask(server, "--num_samples", "0", "--choice", "first") == 0
        assert len(server.requests) < number + 5


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--num_samples", "0"], "--num_samples"),
        (["--decoding", "rsa"], "--decoding"),
        (["--num_beams", "3"], "--num_beams"),
        (["--processes", "2"], "--processes"),
        (["--dry_run"], "--dry_run"),
        (["--adapt", "10m", "--held_out_scorer", "scenes:clip-reward"], "--adapt"),
        (["--captions_per_image", "2", "--prefer_existing"], "--captions_per_image"),
        (["--min_new_tokens", "41"], "--min_new_tokens"),
        (["--prompts", "missing.jsonl"], "--prompts"),
        (["--decorative", "*"], "--decorative"),
        (["--why", "0.png", "1.png", "--decorative", "0.*"], "--why"),
        (["--audit", "--audit_references", "missing"], "--audit_references"),
        (["--output", "o.jsonl", "--forbid", " "], "forbid"),
        (["--trigger", ""], "trigger"),
        (["--copy_threshold", "nan"], "copy_threshold"),
    ],
)
def test_options_that_exclude_each_other_are_refused(photos, capsys, more, named):
    with ChatServer(answer, of_body=True) as server:
        assert ask(server, *more) == 2
        assert server.requests == []
    assert named in capsys.readouterr().err
    assert main(["album", "photos", *SCORER, "--endpoint", "http://127.0.0.1:9/v1"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_command_that_failed_or_had_no_model_binds_no_later_one(photos, capsys):
    (photos / "0.txt").write_text("a pig")
    assert album("--output", "o.jsonl") == 0
    with ChatServer(answer, lambda number, _: 404, of_body=True) as server:
        assert ask(server, "--output", "o.jsonl", "--temperature", "0.1") == 1
    assert album("--model", "no/model", "--output", "o.jsonl") == 2
    capsys.readouterr()
    with ChatServer(answer, of_body=True) as server:
        assert ask(server, "--output", "o.jsonl") == 0
        assert ask(server, "--output", "o.jsonl", "--temperature", "0.1") == 2
    assert "temperature is now 0.1" in capsys.readouterr().err
    assert json.loads(Path("o.run.json").read_text())["settings"]["model"] == "seer"


# --- Several captions per image --------------------------------------------------------------------------------------


def test_the_choice_is_repeated_without_the_captions_already_chosen():
    """Image i has the candidates `image i`, `all` (which is shared) and others; a loop over the rounds says what is left."""
    images = [picture(number) for number in range(3)]
    captions = [[f"image {i}", "all", f"also image {i}", f"IMAGE {i}."] for i in range(3)]
    found = describe_album(images, None, Axes(), captions=captions, diagnose_only=False, captions_per_image=4)
    for row, image in enumerate(found.images):
        texts = [image.caption, *(one.caption for one in image.further)]
        # "IMAGE i." is the same text as "image i"; `all` fits every image, so it comes last.
        assert sorted(texts) == sorted([texts[0], texts[1], "all"])
        assert {texts[0].lower().rstrip("."), texts[1].lower()} == {f"image {row}", f"also image {row}"}
        assert texts[2] == "all"
        assert [one.rank for one in (image, *image.further)] == [1, 1, 3]
        # Every image has "all", the third caption of each.
        assert [one.is_distinct for one in (image, *image.further)] == [True, True, False]
        assert image.further[1].problems[0] == "duplicate"


def test_text_files_have_one_caption_per_line_and_are_read_so(photos, capsys):
    with ChatServer(answer, of_body=True) as server:
        assert ask(server, "--sidecars", "--captions_per_image", "2", "--output", "o.jsonl") == 0
    rows = {}
    for row in rows_of("o.jsonl"):
        rows.setdefault(row["image_id"], []).append(row["caption"])
    for name, texts in rows.items():
        assert len(set(texts)) == 2
        assert (photos / name).with_suffix(".txt").read_text().splitlines() == texts
    more = ["--output", "d.jsonl", "--captions_per_image", "2"]
    assert album(*more) == 0
    assert [row["number"] for row in rows_of("d.jsonl")] == [1, 2] * 5
    assert {(row["image_id"], row["caption"]) for row in rows_of("d.jsonl")} == {
        (n, t) for n, ts in rows.items() for t in ts
    }
    # A person's lines are kept as lines through a captioner and back.
    (photos / "0.txt").write_text("mine\nalso mine\n")
    assert album(*more, "--sidecars", "--overwrite") == 0
    assert (photos / "0.txt").read_text() == "mine\nalso mine\n"
    assert album("--output", "joined.jsonl") == 0
    assert rows_of("joined.jsonl")[0]["caption"] == "mine also mine"


# --- Decorative images -----------------------------------------------------------------------------------------------


def test_other_images_have_the_result_of_an_album_without_the_decorative_ones(photos, monkeypatch, capsys):
    quick = ["--model", "scenes:blip-mle"]
    assert album(*quick, "--output", "without.jsonl") == 0
    for name in ("icons/copy-of-0.png", "icons/x.png"):
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).write_bytes((photos / "0.png").read_bytes())
    Image.new("RGB", (16, 9)).save(photos / "dot.png")
    captioned, real = [], steps.generate_candidates
    monkeypatch.setattr(
        steps, "generate_candidates", lambda c, i, rows, *rest: captioned.extend(rows) or real(c, i, rows, *rest)
    )
    capsys.readouterr()
    rules = ["--decorative", "icons/*", "--decorative_size", "16"]
    assert album(*quick, "--output", "o.jsonl", "o.html", *rules, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["decorative"], summary["captions"], summary["copies"], summary["problems"]) == (3, 5, 0, {})
    rows = {row["image_id"]: row for row in rows_of("o.jsonl")}
    before = {row["image_id"]: row for row in rows_of("without.jsonl")}
    names = list(rows)
    assert {names[row] for row in captioned} == set(before)
    for name, row in before.items():
        assert rows[name] == row | {"decorative": False}
    for name in rows.keys() - before.keys():
        assert (rows[name]["caption"], rows[name]["decorative"], rows[name]["problems"]) == ("", True, [])
    page = Path("o.html").read_text()
    assert ", 3 decorative." in page
    assert page.count('"decorative": true') == 3
    # Without a rule nothing is decorative.
    assert album(*quick, "--output", "all.jsonl") == 0
    assert all(row["caption"] and "decorative" not in row for row in rows_of("all.jsonl"))


def test_words_that_must_not_be_mentioned_are_a_constraint(photos, capsys):
    quick = ["--model", "scenes:blip-mle", "--num_beams", "3"]
    assert album(*quick, "--output", "free.jsonl") == 0
    assert any(" a " in f" {row['caption']} " for row in rows_of("free.jsonl"))
    (photos / "0.txt").write_text("a")
    assert album(*quick, "--output", "o.jsonl", "--do_not_mention", "a", "two") == 0
    assert not any({"a", "two"} & set(row["caption"].split()) for row in rows_of("o.jsonl"))
