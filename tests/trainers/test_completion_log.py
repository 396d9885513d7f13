"""Captions with images and rewards on the terminal and in trackers, which may be missing."""

import contextvars
import io
import logging
import sys
import types

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from hf_captionrl.trainers import guard as completion_log
from hf_captionrl.trainers.guard import log_completions, print_completions

HOSTILE = "[bold red]a cat[/] \x1b[2J <script>x</script> | `pipe`\nnew [/nothing]"
ROWS = [
    {"image_id": 7, "caption": "a cat", "reference": "one cat", "rewards": {"cider": 1.25}, "advantage": -0.5},
    {"image_id": "8", "caption": HOSTILE, "rewards": {"cider": float("nan"), "shape": 0.0}},
]
IMAGES = [Image.new("RGB", (4, 3), "red"), Image.new("L", (4, 3), 255)]


@pytest.fixture(autouse=True)
def _forget_warnings():
    completion_log._warn_once.cache_clear()


def printed(rows, **settings):
    out = io.StringIO()
    print_completions(rows, step=12, console=Console(file=out, width=200, **settings))
    return out.getvalue()


def test_everything_is_printed():
    text = printed(ROWS)
    for part in (
        "12",
        "a cat",
        "one cat",
        "cider",
        "shape",
        "1.250",
        "-0.500",
        "nan",
        "0.000",
        "advantage",
        "reference",
    ):
        assert part in text


def test_captions_are_escaped():
    text = printed(ROWS, force_terminal=True, color_system=None)
    assert "[bold red]a cat[/] \\x1b[2J <script>x</script> | `pipe` new [/nothing]" in " ".join(text.split())
    assert "\x1b[2J" not in text


def test_ascii_terminal_gets_replacements():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_completions([{"image_id": 1, "caption": "café"}], step=1, console=Console(file=out, width=100))
    out.flush()
    assert b"caf\\xe9" in out.buffer.getvalue()


def fake_tracker(monkeypatch, name, *, active=True):
    """A module with the few names of wandb or trackio that are used."""
    module = types.ModuleType(name)
    module.logged = []
    module.Table = lambda dataframe: types.SimpleNamespace(dataframe=dataframe)
    module.Image = lambda image: ("image", image.mode, image.size)
    module.log = module.logged.append
    run = object() if active else None
    module.run = run
    module.context_vars = types.SimpleNamespace(current_run=contextvars.ContextVar("current_run", default=run))
    monkeypatch.setitem(sys.modules, name, module)
    return module


class FakeWriter:
    """The two methods of a SummaryWriter that are used."""

    def __init__(self):
        self.texts, self.images = [], []

    def add_text(self, tag, text, step):
        self.texts.append((tag, text, step))

    def add_image(self, tag, image, step, dataformats):
        self.images.append((tag, image, step, dataformats))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_a_table_with_images(monkeypatch, name):
    module = fake_tracker(monkeypatch, name)
    assert log_completions(ROWS, IMAGES, step=3, report_to=[name]) == [name]
    (logged,) = module.logged
    assert logged["train/global_step"] == 3
    frame = logged["completions"].dataframe
    assert list(frame["step"]) == [3, 3]
    assert list(frame["image_id"]) == ["7", "8"]
    assert list(frame["image"]) == [("image", "RGB", (4, 3))] * 2
    assert frame["rewards/cider"][0] == 1.25
    assert np.isnan(frame["rewards/shape"][0])
    assert frame["rewards/shape"][1] == 0
    if name == "wandb":
        assert frame["caption"][1] == HOSTILE
    else:  # shows text as Markdown
        assert "\\<script\\>" in frame["caption"][1]


def test_without_images_there_is_no_image_column(monkeypatch):
    module = fake_tracker(monkeypatch, "wandb")
    log_completions(ROWS, [], step=3, report_to="wandb")
    log_completions(ROWS, [None, None], step=3, report_to="wandb")
    log_completions(ROWS, [None, IMAGES[0]], step=3, report_to="wandb")
    frames = [logged["completions"].dataframe for logged in module.logged]
    assert ["image" in frame for frame in frames] == [False, False, True]
    assert frames[2]["image"][0] is None


def test_tensorboard_gets_text_and_images():
    writer = FakeWriter()
    assert log_completions(ROWS, IMAGES, step=5, report_to=["tensorboard"], tensorboard_writer=writer) == [
        "tensorboard"
    ]
    ((tag, text, step),) = writer.texts
    assert (tag, step) == ("completions", 5)
    lines = text.splitlines()
    assert len(lines) == 4  # a line break in a caption does not end its row
    assert all(line.replace("\\|", "").count("|") == lines[0].count("|") for line in lines)
    assert "<script>" not in text.replace("\\<", "")
    assert [image.shape for _, image, _, _ in writer.images] == [(3, 4, 3)] * 2
    assert all(layout == "HWC" and at == 5 for _, _, at, layout in writer.images)
    assert tuple(writer.images[0][1][0, 0]) == (255, 0, 0)


def test_only_trackers_in_report_to_are_written(monkeypatch):
    wandb, trackio, writer = fake_tracker(monkeypatch, "wandb"), fake_tracker(monkeypatch, "trackio"), FakeWriter()
    for report_to in (None, [], "none", ["mlflow"]):
        assert log_completions(ROWS, IMAGES, step=1, report_to=report_to, tensorboard_writer=writer) == []
    assert log_completions([], [], step=1, report_to="all", tensorboard_writer=writer) == []
    assert not wandb.logged + trackio.logged + writer.texts
    found = log_completions(ROWS, IMAGES, step=1, report_to=["all"], tensorboard_writer=writer)
    assert found == ["tensorboard", "trackio", "wandb"]


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_missing_tracker_is_skipped_with_one_warning(monkeypatch, caplog, name):
    monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
    with caplog.at_level(logging.WARNING, logger="hf_captionrl"):
        for _ in range(3):
            assert log_completions(ROWS, IMAGES, step=1, report_to=[name]) == []
    assert len(caplog.records) == 1
    assert name in caplog.text


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_without_a_run_is_skipped_with_one_warning(monkeypatch, caplog, name):
    module = fake_tracker(monkeypatch, name, active=False)
    with caplog.at_level(logging.WARNING, logger="hf_captionrl"):
        for _ in range(3):
            assert log_completions(ROWS, IMAGES, step=1, report_to=[name]) == []
    assert not module.logged
    assert len(caplog.records) == 1
    assert "no run is active" in caplog.text


def test_further_columns_are_printed_and_logged():
    rows = [{**ROWS[0], "extra": {"words": 2, "judge": HOSTILE}}, ROWS[1]]
    text = printed(rows)
    assert "words" in text
    assert "judge" in text
    assert "\x1b" not in text
    columns = completion_log._columns(rows, completion_log._escaped)
    assert columns["extra/words"] == ["2", ""]
    assert "<script>" not in columns["extra/judge"][0]
    assert not any(name.startswith("extra/") for name in completion_log._columns(ROWS, str))
