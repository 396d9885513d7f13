"""`captionrl caption --endpoint` with a server on 127.0.0.1: answers, cost, faults, resuming, prompts per image."""

import base64
import io
import json
import signal
import time
from collections import Counter

import pytest
from PIL import Image

from hf_captionrl.captioners.language_model_clients import caption_of
from hf_captionrl.cli import main
from hf_captionrl.utils.prompts import Truncated
from tests.apps.boosting.server import ChatServer, texts_of
from tests.processes import Forked

SHADES = {"a.png": 10, "b.png": 90, "sub/c.png": 170}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photos" / "sub").mkdir(parents=True)
    for name, shade in SHADES.items():
        Image.new("RGB", (40, 30), (shade, 90, 20)).save(tmp_path / "photos" / name)
    return tmp_path


def shade_of(messages):
    """The red of the image in a request; PNG is lossless."""
    data = texts_of(messages)[1].partition("base64,")[2]
    return Image.open(io.BytesIO(base64.b64decode(data))).getpixel((0, 0))[0]


def answer(body):
    return f"shade {shade_of(body['messages'])} of seed {body['seed']}"


def serve(plan=lambda number, messages: "ok", **options):
    return ChatServer(answer, plan, of_body=True, **options)


def ask(server, folder, *more):
    """The exit code of a command whose model is the server."""
    url = server if isinstance(server, str) else server.url
    output, quick = str(folder / "out.jsonl"), ["--backoff_s", "0", "--output"]
    command = ["caption", "seer", "--endpoint", url, "--dataset", str(folder / "photos"), *quick, output]
    return main([*command, *more])


def lines_of(folder):
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


SAMPLES = ["--do_sample", "--temperature", "0.6", "--num_return_sequences", "2", "--seed", "7"]


def test_samples_and_cost(folder, capsys, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    with serve(lambda number, _: "ok" if number else 503) as server:
        assert ask(server, folder, *SAMPLES, "--api_key_env", "SOME_KEY", "--max_new_tokens", "33", "--json") == 0
    said = capsys.readouterr()
    for line, (name, shade) in zip(lines_of(folder), SHADES.items(), strict=True):
        captions = [f"shade {shade} of seed {seed}" for seed in (7, 8)]
        assert (line["image_id"], line["caption"], line["captions"]) == (name, captions[0], captions)
    told = [(body["model"], body["temperature"], body["max_tokens"]) for body in server.requests]
    assert told == [("seer", 0.6, 33)] * 7
    cost = json.loads(said.out)["endpoint"]
    assert (cost["requests"], cost["retries"]) == (7, 1)
    assert (cost["prompt_tokens"], cost["completion_tokens"]) == (600, 30)
    assert all(headers["Authorization"] == "Bearer sk-very-secret" for headers in server.headers)
    assert "secret" not in said.out + said.err
    assert not [path for path in folder.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


def test_an_answer_that_repeats_the_key_reaches_no_file(folder, capsys, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    with serve() as server:
        server.answer = lambda body: f"the key sk-very-secret beside {shade_of(body['messages'])}"
        assert ask(server, folder, "--api_key_env", "SOME_KEY") == 0
    assert [line["caption"] for line in lines_of(folder)] == [
        f"the key *** beside {shade}" for shade in SHADES.values()
    ]
    assert not [path for path in folder.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


def test_nothing_is_asked_twice_after_a_kill(folder):
    (folder / "whole").mkdir()
    (folder / "whole" / "photos").symlink_to(folder / "photos")
    with serve() as server:
        assert ask(server, folder / "whole", *SAMPLES) == 0
    with serve(lambda number, _: "hang" if number == 3 else "ok") as server:
        with Forked(ask, server, folder, *SAMPLES, "--concurrency", "1") as run:
            assert server.wait_for(4)  # the last of them hangs
            run.kill()
            assert run.wait() == -signal.SIGKILL
        assert lines_of(folder) == []  # the whole batch was on its way
        torn = folder / "out.answers.jsonl"
        torn.write_bytes(torn.read_bytes() + b'{"key": "ab')
        assert ask(server, folder, *SAMPLES) == 0
        asked = Counter((shade_of(body["messages"]), body["seed"]) for body in server.requests)
        assert sorted(asked.values()) == [1, 1, 1, 1, 1, 2]  # only the one without an answer
        assert (folder / "out.jsonl").read_bytes() == (folder / "whole" / "out.jsonl").read_bytes()
        number = len(server.requests)
        (folder / "out.jsonl").unlink()
        assert ask(server, folder, *SAMPLES) == 0
        assert len(server.requests) == number
        # Other answers belong to other settings.
        assert ask(server, folder, *SAMPLES, "--overwrite", "--temperature", "0.9") == 0
        assert len(server.requests) == number + 6
        assert ask(server, folder, *SAMPLES) == 2  # the file has another temperature


@pytest.mark.parametrize("fault", ["hang", (429, {"Retry-After": "60"})])
def test_ctrl_c_waits_for_no_server(folder, fault):
    plan = lambda number, _: fault if number else "ok"  # noqa: E731
    with serve(plan) as server, Forked(ask, server, folder, "--concurrency", "2") as run:
        while len(server.requests) < 3:
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130
        assert "the same command resumes" in run.stderr.read()


def test_empty_answers_are_asked_again_and_known_ones_counted(folder, capsys):
    (folder / "photos" / "copy.png").write_bytes((folder / "photos" / "a.png").read_bytes())
    with serve() as server:
        empty = ["", "<think>What is it? A dog,", '""']
        server.answer = lambda body: empty[len(server.requests) - 1]
        assert ask(server, folder, "--concurrency", "1", "--json") == 1
        said = capsys.readouterr()
        assert json.loads(said.out)["endpoint"]["answers_of_earlier_runs"] == 0
        assert [one["image_id"] for one in json.loads(said.out)["failed"]] == [
            "a.png",
            "b.png",
            "copy.png",
            "sub/c.png",
        ]
        assert "empty, or only reasoning" in said.err
        server.answer = answer
        assert ask(server, folder) == 0
        assert len(server.requests) == 6
        (folder / "out.jsonl").unlink()
        assert "answers of earlier runs" not in capsys.readouterr().out
        assert ask(server, folder) == 0
        assert "4 answers of earlier runs" in capsys.readouterr().out
    assert len(lines_of(folder)) == 4


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ("<think>It barks.</think>\nA dog.", "A dog."),
        ("It barks.</think>A dog.", "A dog."),  # the prompt opened the reasoning
        ("<think>It barks. A dog.", ""),
        (Truncated(" <think>It barks"), ""),
        (Truncated("A dog on a"), "A dog on a"),
        ("A <think> tag", "A <think> tag"),
    ],
)
def test_reasoning_is_no_caption(answer, caption):
    assert caption_of(answer) == caption


def test_refused_images_do_not_stop_the_others_and_are_asked_again(folder, capsys):
    with serve(lambda number, messages: "ok" if shade_of(messages) == 90 else 413) as server:
        assert ask(server, folder, "--concurrency", "1") == 1  # two failures in a row would end the run
        said = capsys.readouterr()
        assert "captions of 1 of 3 images" in said.out
        assert "'a.png' (HTTP 413" in said.err
        assert [line["image_id"] for line in lines_of(folder)] == ["b.png"]
        number = len(server.requests)
        server.plan = lambda number, messages: "length"
        assert ask(server, folder) == 0
        assert len(server.requests) == number + 2
    assert "2 answers reached --max_new_tokens" in capsys.readouterr().out
    assert sorted(line["image_id"] for line in lines_of(folder)) == sorted(SHADES)


def test_server_that_refuses_connections_ends_the_run(folder, capsys):
    for number in range(20):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / "photos" / f"more-{number}.png")
    with serve() as server:
        url = server.url
    assert ask(url, folder, "--tries", "2") == 1
    error = capsys.readouterr().err
    assert "failed 8 times in a row" in error
    assert "ConnectError" in error


def test_words_reach_the_model_escaped_and_are_counted(folder, capsys):
    with serve() as server:
        more = ["--do_not_mention", "seed 0", "<image>", "--prompt", "Describe."]
        assert ask(server, folder, *more, "--json") == 0
    rule = 'Describe.\nDo not mention: "seed 0", "\\u003cimage>".'
    assert {texts_of(body["messages"])[0] for body in server.requests} == {rule}
    assert json.loads(capsys.readouterr().out)["mentions"] == 3  # all three say "seed 0", which is told and kept


def test_numbers_of_a_resumed_run_are_of_the_whole_file(folder, capsys):
    rules = ["--do_not_mention", "shade", "--concurrency", "1", "--json"]
    with serve(lambda number, _: 413 if number == 2 else "ok") as server:
        assert ask(server, folder, *rules) == 1
        first = json.loads(capsys.readouterr().out)
        assert ask(server, folder, *rules) == 0
        second = json.loads(capsys.readouterr().out)
    assert (first["images"], first["mentions"]) == (2, 2)
    assert (second["images"], second["resumed"], second["mentions"]) == (3, 2, 3)
