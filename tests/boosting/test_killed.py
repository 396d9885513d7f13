"""`kill -9` at random moments, against a real endpoint: nothing is lost, repeated or paid for twice."""

import collections
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_captionrl.boosting import boost_shard, merge_journals
from hf_captionrl.boosting.journal import journals, read_journal
from tests.boosting.doubles import content, endpoint_answer, endpoints, scenes
from tests.boosting.server import ChatServer

ROOT = Path(__file__).resolve().parents[2]
SCENES = 30
CONCURRENCY = 2


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


def question(body):
    """What identifies a question at the server: its text and image."""
    return str(body["messages"][-1]["content"])


def start(url, folder):
    command = [sys.executable, "-m", "tests.boosting.killed_boost", url, str(folder), str(SCENES)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)


def campaign(tmp_path, kills, seed):
    """Kill a run again and again, each time after a few more answers; then let it finish."""
    rng = random.Random(seed)
    rows, folder = scenes(SCENES), tmp_path / "killed"
    faults = {3: 429, 20: "garbage", 41: "cut"}
    with ChatServer(endpoint_answer(rows), lambda number, _: faults.get(number, "ok")) as server:
        backends = endpoints(server.url, concurrency=CONCURRENCY)
        whole = tmp_path / "whole"
        boost_shard(rows, whole, rows_at_once=7, **backends)
        merge_journals(rows, whole, **backends)
        undisturbed = len(server.requests)
        killed = 0
        for _ in range(kills):
            begun, before = len(server.requests), paid(folder)
            process = start(server.url, folder)
            assert server.wait_for(begun + rng.randint(1, max(1, 3 * SCENES // (kills + 2))))
            os.kill(process.pid, signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
            # What stood in the journal when this run began was not asked again.
            assert not {question(body) for body in server.requests[begun:]} & before
            if rng.random() < 0.5:  # what a loss of power leaves: the last line half on the disk
                tear(folder, rng)
        begun, before = len(server.requests), paid(folder)
        assert start(server.url, folder).wait() == 0
        assert not {question(body) for body in server.requests[begun:]} & before
        assert content(folder / "captions.parquet") == content(whole / "captions.parquet")
        assert len(content(folder / "captions.parquet")) == SCENES
        asked = collections.Counter(map(question, server.requests[undisturbed:]))
    entries = [entry for path in journals(folder) for entry in read_journal(path)]
    assert len({(e["image_id"], e["stage"]) for e in entries}) == len(entries) == 3 * SCENES
    # Twice asked is only what was on its way when the process died, or torn.
    assert killed >= kills - 1
    assert sum(asked.values()) - 3 * SCENES <= kills * (CONCURRENCY + 1)


def paid(folder):
    """Questions of the journal's answers, as the server sees them."""
    from hf_captionrl.boosting.http_backend import image_url
    from hf_captionrl.boosting.prompts import blend_prompt, holistic_prompt
    from hf_captionrl.data import open_image

    rows = scenes(SCENES)
    row_of = {image_id: number for number, image_id in enumerate(rows["image_id"][:])}
    entries = [entry for path in journals(folder) for entry in read_journal(path)] if folder.exists() else []
    texts = {(entry["image_id"], entry["stage"]): entry["text"] for entry in entries}
    found = set()
    for image_id, stage in texts:
        if stage == "blend":
            found.add(blend_prompt(image_id, rows[row_of[image_id]]["captions"]).user)
        elif stage == "holistic":
            found.add(holistic_prompt(image_id, texts[image_id, "blend"], texts[image_id, "visual"]).user)
        else:
            url = image_url(open_image(rows[row_of[image_id]]["image"]))
            found.add(
                str(
                    [
                        {"type": "text", "text": "Briefly describe the content of the image."},
                        {"type": "image_url", "image_url": {"url": url}},
                    ]
                )
            )
    # Scenes of one bag may share references: their BlendCaps are one question of several images.
    shared = collections.Counter(blend_prompt("", captions).user for captions in rows["captions"])
    return {text for text in found if shared[text] <= 1}


def tear(folder, rng):
    for path in journals(folder):
        data = path.read_bytes()
        last = data[: data.rstrip(b"\n").rfind(b"\n") + 1]
        if len(data) > len(last) + 2:
            path.write_bytes(data[: rng.randint(len(last) + 1, len(data) - 1)])


def test_two_kills_change_nothing(tmp_path):
    campaign(tmp_path, 2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_twenty_kills_change_nothing(tmp_path, seed):
    campaign(tmp_path, 5, seed)


def test_a_lost_answer_would_be_noticed(tmp_path):
    rows = scenes(SCENES)
    with ChatServer(endpoint_answer(rows)) as server:
        backends = endpoints(server.url)
        boost_shard(rows, tmp_path, **backends)
        before = len(server.requests)
        (path,) = journals(tmp_path)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:10] + lines[11:]))
        boost_shard(rows, tmp_path, **backends)
        assert len(server.requests) == before + 1
