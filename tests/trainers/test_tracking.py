"""Captions with images, references, rewards and ranks, read back from the files of the trackers; offline."""

import functools
import json
import socket
import sqlite3
import sys
import types

import numpy as np
import pytest
from huggingface_hub.utils import close_session
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hf_captionrl.data import open_image
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.trainers.guard import show_completions

from .one_step import captioner
from .rl_step import build

TOKEN = "hf_" + "FAKEtoken" * 4
SHOWN = 3
LOGGED = {"do_sample": True, "per_device_train_batch_size": 4, "num_generations": 2, "hub_token": TOKEN}
LOGGED |= {"log_completions": True, "num_completions_to_print": SHOWN, "project": "captions"}
LOGGED |= {"logging_strategy": "steps", "logging_steps": 1}


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Record connections to other machines, which tests/offline refuses, and set a token that must not be sent."""
    tried, connect, look_up = [], socket.socket.connect, socket.getaddrinfo

    def record(host):
        tried.extend([host] if host not in ("127.0.0.1", "::1", "localhost", None) else [])

    def guarded(self, address):
        record(address[0] if self.family in (socket.AF_INET, socket.AF_INET6) else None)
        return connect(self, address)

    def named(host, *arguments, **more):
        record(host)
        return look_up(host, *arguments, **more)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(socket, "getaddrinfo", named)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # With a token, trackio asks the Hub for its owner, unless the Hub is disabled.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session()
    import trackio
    from trackio import sqlite_storage, utils

    for module in (trackio, utils, sqlite_storage, *(m for n, m in sys.modules.items() if n.startswith("trackio."))):
        # Read once, when trackio is imported.
        for name, below in (("TRACKIO_DIR", ""), ("MEDIA_DIR", "media")):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / "trackio" / below)
    yield tried
    close_session()
    assert tried == []
    holders = [p for p in tmp_path.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]
    assert holders == []


def trackio_rows(folder):
    with sqlite3.connect(folder / "trackio" / "captions.db") as base:
        return [json.loads(text) for (text,) in base.execute("select metrics from metrics order by id")]


def tables_of(folder, tag):
    return [row[tag]["_value"] for row in trackio_rows(folder) if tag in row]


def test_trackers_store_what_was_logged(tmp_path, scenes, offline, capsys):
    data = scenes["train"].select(range(8))
    trainer = build(
        tmp_path / "run", data, report_to=["tensorboard", "trackio"], run_name="one", max_steps=2, **LOGGED
    )
    seen, record = [], trainer.monitor.record
    trainer.monitor.record = lambda *given: seen.append(given[:2]) or record(*given)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(history) == len(seen) == 2
    image_of = dict(zip(data["image_id"], data["image"], strict=True))

    # trackio: numbers and tables, from its data base and folder.
    rows = trackio_rows(tmp_path)
    numbers = [row for row in rows if "train/reward" in row]
    for entry, row in zip(history, numbers, strict=True):
        for name in ("loss", "reward", "recall_at_1", "rewards/self_retrieval/mean", "completions/mean_length"):
            assert row[f"train/{name}"] == pytest.approx(entry[name])
        assert row["train/global_step"] == entry["step"]
    tables = tables_of(tmp_path, "completions")
    for step, (table, (context, rewards)) in enumerate(zip(tables, seen, strict=True), start=1):
        assert [row["step"] for row in table] == [step] * SHOWN
        for n, row in enumerate(table):
            assert row["caption"].replace("\\", "") == context.captions[n]
            assert row["image_id"] == context.image_ids[n // 2]
            assert row["reference"].replace("\\", "") == context.references[n // 2][0]
            assert row["rewards/self_retrieval"] == pytest.approx(float(rewards[n, 0]))
            assert row["rank"] == int(context.ranks[n]) >= 1
            stored = Image.open(tmp_path / "trackio" / "media" / row["image"]["file_path"])
            expected = open_image(image_of[row["image_id"]])
            assert np.array_equal(np.asarray(stored.convert("RGB")), np.asarray(expected))
        assert float((context.ranks == 1).float().mean()) == pytest.approx(history[step - 1]["recall_at_1"])

    # tensorboard: numbers from its event file.
    (folder,) = {str(path.parent) for path in (tmp_path / "run").rglob("events.out.tfevents.*")}
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    assert [e.value for e in events.Scalars("train/reward")] == pytest.approx([e["reward"] for e in history])
    assert TOKEN not in "".join(capsys.readouterr())


def smile(folder, scenes, scorer, **more):
    settings = {"log_completions": True, "report_to": "trackio", "project": "captions", "save_strategy": "no"}
    settings |= {"max_steps": 1, "per_device_train_batch_size": 4, "num_completions_to_print": SHOWN}
    settings |= {"generation_num_beams": 1, "generation_max_new_tokens": 10, "use_cpu": True, "disable_tqdm": True}
    config = SmileConfig(str(folder / "run"), **{**settings, **more})
    data = scenes["train"].select(range(8))
    return SmileTrainer(captioner(), config, train_dataset=data, eval_dataset=scenes["validation"], scorer=scorer)


def test_mle_and_smile_log_evaluation_captions(tmp_path, scenes, held_out_scorer, offline):
    trainer = smile(tmp_path, scenes, held_out_scorer, eval_strategy="steps", eval_steps=1)
    trainer.train()
    (table,) = tables_of(tmp_path, "eval_completions")
    said = trainer.generate_captions(scenes["validation"])
    assert [row["caption"].replace("\\", "") for row in table] == said[:SHOWN]
    assert [row["image_id"] for row in table] == scenes["validation"]["image_id"][:SHOWN]
    pool = trainer.scorer_image_features(trainer.scorer, scenes["validation"])
    similarity = trainer.scorer.text_features(said).float() @ pool.T
    for row, at in zip(table, range(SHOWN), strict=True):
        assert row["rank"] == 1 + sum(float(other) >= float(similarity[at, at]) for other in similarity[at]) - 1
        assert "rewards/self_retrieval" not in row
    found = next(row for row in trackio_rows(tmp_path) if "eval/recall_at_1" in row)
    entry = next(entry for entry in trainer.state.log_history if "eval_recall_at_1" in entry)
    assert found["eval/recall_at_1"] == pytest.approx(entry["eval_recall_at_1"])


def test_nothing_is_shown_by_default(tmp_path, scenes, scorer, offline, capsys):
    trainer = smile(tmp_path, scenes, scorer, log_completions=False, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert any("eval/recall_at_1" in row for row in trackio_rows(tmp_path))
    assert tables_of(tmp_path, "eval_completions") == []
    assert "Captions of step" not in capsys.readouterr().out


HOSTILE = "[bold red]a cat[/] \x1b[2J <script>x</script> | `pipe`\nnew [/nothing]"


COLUMNS = {
    "image_id": [7, "8"],
    "caption": ["a cat", HOSTILE],
    "reference": ["one cat", ""],
    "extra/judge": [2, HOSTILE],
    "rewards/cider": [1.25, float("nan")],
    "advantage": [-0.5, 0.0],
}


@pytest.mark.parametrize("active", [True, False])
def test_hostile_captions_are_shown_as_text(monkeypatch, capsys, active):
    monkeypatch.setenv("COLUMNS", "250")
    logged = {}
    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        module.Table = lambda dataframe: dataframe
        module.Image = lambda image: image.size
        module.log = functools.partial(logged.__setitem__, name)
        module.run = object() if active else None
        module.context_vars = types.SimpleNamespace(current_run=types.SimpleNamespace(get=lambda run=module.run: run))
        monkeypatch.setitem(sys.modules, name, module)
    images = [Image.new("RGB", (4, 3)), Image.new("L", (4, 3))]
    show_completions(COLUMNS, images, step=12, report_to=["wandb", "trackio", "tensorboard"], tag="completions")
    text = " ".join(capsys.readouterr().out.split())
    assert "\x1b[2J" not in text
    for part in ("[bold red]a cat[/] \\x1b[2J", "12", "one cat", "1.25", "-0.50", "judge"):
        assert part in text
    assert set(logged) == ({"wandb", "trackio"} if active else set())  # an evaluation before training has no run
    if active:
        wandb, trackio = (logged[name]["completions"] for name in ("wandb", "trackio"))
        assert (list(wandb["caption"]), list(wandb["image"])) == (COLUMNS["caption"], [(4, 3)] * 2)
        assert logged["wandb"]["train/global_step"] == wandb["step"][0] == 12
        assert "\\<script\\>" in trackio["caption"][1]  # trackio shows text as Markdown
        assert "<script>" not in trackio["extra/judge"][1]
