"""`kill -9` of `captionrl boost` with an endpoint that fails from time to time: no answer is lost or asked for twice.

Kills come right after a request; tests/faults has kills at any call. The file is compared with that of a run that nothing disturbed.
"""

import collections
import functools
import random
import signal
import tempfile

import pytest

from hf_captionrl.apps.boosting.boost import journals, read_journals
from hf_captionrl.apps.boosting.prompts import blend_prompt, holistic_prompt
from hf_captionrl.captioners.language_models import image_url
from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from tests.apps.boosting.doubles import content, endpoint_answer, scenes
from tests.apps.boosting.server import ChatServer
from tests.processes import Forked

SCENES = 30
CONCURRENCY = 2
PER_SHARD = 14
# By number of the request since the run began: its undisturbed forerunner has none of them.
FAULTS = {3: 429, 20: "garbage", 41: "cut"}


class World:
    """An endpoint, an uninterrupted run, and its requests."""

    def __init__(self, server, folder):
        self.server, self.folder, self.begun, self.hit = server, folder, None, set()

    def plan(self, number, _):
        if self.begun is None or number - self.begun not in FAULTS:
            return "ok"
        self.hit.add(number - self.begun)
        return FAULTS[number - self.begun]

    def arguments(self, folder, *more):
        models = ["--text", "openai:writer", "--vision", "openai:describer", "--text_url", self.server.url]
        # Files of 7 rows at a time, and waits that a test can wait for.
        options = ["--concurrency", CONCURRENCY, "--rows_at_once", 7, "--backoff_s", 0.01]
        return [*models, *options, "--output", folder, *more]


@pytest.fixture(scope="module")
def start():
    """Starts `captionrl boost` in a process that is forked from this one, which has imported everything."""
    rows = scenes(SCENES)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr("hf_captionrl.scenes.load_scenes", lambda **options: {"test": rows})
        assert main(["boost", "--max_images", "2", "--output", folder]) == 0
        yield lambda words: Forked(main, ["boost", *map(str, words)], environment={"no_proxy": "*"})


def finish(process):
    with process:
        return process.wait()


@pytest.fixture(scope="module")
def world(start, tmp_path_factory):
    rows, folder = scenes(SCENES), tmp_path_factory.mktemp("whole")
    world = World(None, folder)
    with ChatServer(endpoint_answer(rows), lambda number, messages: world.plan(number, messages)) as server:
        world.server = server
        assert finish(start(world.arguments(folder))) == 0
        assert len(content(folder / "captions.parquet")) == SCENES
        assert not world.hit
        yield world


@functools.cache
def references():
    rows = scenes(SCENES)
    return {
        image_id: (captions, image_url(open_image(image)))
        for image_id, captions, image in zip(rows["image_id"], rows["captions"], rows["image"], strict=True)
    }


def question(body):
    """Identity of a question at the server: text and image."""
    return str(body["messages"][-1]["content"])


def paid(folder):
    """Questions of the answers in the journal, as the server sees them."""
    entries = read_journals(folder)
    texts = {(entry["image_id"], entry["stage"]): entry["text"] for entry in entries}
    found = set()
    for image_id, stage in texts:
        captions, url = references()[image_id]
        if stage == "blend":
            found.add(blend_prompt(image_id, captions).user)
        elif stage == "holistic":
            found.add(holistic_prompt(image_id, texts[image_id, "blend"], texts[image_id, "visual"]).user)
        else:
            text = {"type": "text", "text": "Briefly describe the content of the image."}
            found.add(str([text, {"type": "image_url", "image_url": {"url": url}}]))
    # Scenes of one bag may share references: their BlendCaps are one question of several images.
    shared = collections.Counter(blend_prompt("", captions).user for captions, _ in references().values())
    return {text for text in found if shared[text] <= 1}


def tear(folder, rng):
    """State after a loss of power: half of the last line. Journals of finished shards are on the disk."""
    for path in journals(folder):
        if any((folder / "shards").glob(f"part-{int(path.name.split('-')[1]) // PER_SHARD:05d}-*")):
            continue
        data = path.read_bytes()
        last = data[: data.rstrip(b"\n").rfind(b"\n") + 1]
        if len(data) > len(last) + 2:
            path.write_bytes(data[: rng.randint(len(last) + 1, len(data) - 1)])


def test_killed_run_equals_uninterrupted_run(world, start, tmp_path):
    rng, server, folder = random.Random(1), world.server, tmp_path / "killed"
    world.begun, world.hit = len(server.requests), set()
    arguments = world.arguments(folder, "--rows_per_shard", PER_SHARD)
    for is_killed in (True, True, False):
        begun, before = len(server.requests), paid(folder)
        process = start(arguments)
        if is_killed:
            assert server.wait_for(begun + rng.randint(1, SCENES // 2))
            process.kill()
        assert finish(process) == (-signal.SIGKILL if is_killed else 0)
        # What stood in the journal when this run began was not asked again.
        assert not {question(body) for body in server.requests[begun:]} & before
        if is_killed:
            tear(folder, rng)
    assert content(folder / "captions.parquet") == content(world.folder / "captions.parquet")
    assert (folder / "statistics.json").read_bytes() == (world.folder / "statistics.json").read_bytes()
    entries = read_journals(folder)
    assert len({(e["image_id"], e["stage"]) for e in entries}) == len(entries) == 3 * SCENES
    assert world.hit == set(FAULTS)
    # Twice asked is only what was on its way when the process died, torn (a line of the shard), or failed at the server.
    spent = len(server.requests) - world.begun - 3 * SCENES
    assert spent <= 2 * (CONCURRENCY + 1) + len(FAULTS)


def test_lost_answer_is_detected(world, start, tmp_path):
    world.begun = None
    folder = tmp_path / "lost"
    (folder).mkdir()
    (whole,) = journals(world.folder)
    lines = whole.read_bytes().splitlines(keepends=True)
    (folder / whole.name).write_bytes(b"".join(lines[:10] + lines[11:]))
    before = len(world.server.requests)
    assert finish(start(world.arguments(folder))) == 0
    assert len(world.server.requests) == before + 1
    assert content(folder / "captions.parquet") == content(world.folder / "captions.parquet")
