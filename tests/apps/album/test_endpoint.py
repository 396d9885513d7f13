"""`captionrl album --endpoint`."""

import json
import time
from pathlib import Path

import pytest

from hf_captionrl.cli import main
from tests.apps.album.conftest import rows_of, write_images
from tests.apps.boosting.server import ChatServer
from tests.cli.test_caption_endpoint import shade_of
from tests.processes import Forked

SCORER = "--scorer scenes:siglip-held-out --cache_dir cache --batch_size 2 --backoff_s 0".split()


@pytest.fixture
def photos(tmp_path, monkeypatch, scenes):
    monkeypatch.chdir(tmp_path)
    return write_images(scenes[:5], [f"{number}.png" for number in range(5)])


def answer(body):
    return f"shade {shade_of(body['messages'])} of seed {body['seed']}"


def ask(server, *more):
    command = ["album", "photos", *SCORER, "--model", "seer", "--endpoint", server.url, "--num_samples", "2"]
    return main([*command, *more])


def test_candidates_are_samples_and_nothing_is_asked_twice(photos, capsys):
    with ChatServer(answer, of_body=True) as server:
        assert ask(server, "--output", "o.csv", "o.jsonl", "--seed", "5", "--temperature", "0.4", "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        told = sorted((body["seed"], body["temperature"]) for body in server.requests)
        assert told == sorted([(5, 0.0), (6, 0.4), (7, 0.4)] * 5)
        assert (summary["endpoint"]["requests"], summary["endpoint"]["completion_tokens"]) == (15, 75)
        assert {row["caption"].split()[-1] for row in rows_of("o.jsonl")} <= set("567")
        # Candidates and answers are both kept, and another constraint asks nothing.
        Path("o.jsonl").unlink()
        again = ["--output", "o.csv", "o.jsonl", "--seed", "5", "--temperature", "0.4", "--max_characters", "5"]
        answers = Path("o.answers.jsonl").read_bytes()
        assert ask(server, *again) == 0
        assert len(server.requests) == 15
        assert all(len(row["caption"]) <= 5 for row in rows_of("o.jsonl"))
        assert Path("o.answers.jsonl").read_bytes() == answers
        assert ask(server, *again, "--overwrite") == 0
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


def test_image_without_an_answer_stops_the_album_and_keeps_the_others(photos, capsys):
    with ChatServer(answer, lambda number, _: 400 if number in (6, 7) else "ok", of_body=True) as server:
        assert ask(server, "--concurrency", "1", "--num_samples", "0") == 0
        assert ask(server, "--concurrency", "1", "--overwrite", "--num_samples", "0") == 1
        assert "has no answer: HTTP 400" in capsys.readouterr().err
        number = len(server.requests)
        server.plan = lambda number, _: "ok"
        assert ask(server, "--num_samples", "0") == 0
        assert len(server.requests) < number + 5
