"""Secrets of the environment are in nothing that a run writes or says."""

import json

from hf_captionrl.metrics.columns import COLUMNS
from hf_captionrl.metrics.table import write_results
from hf_captionrl.scenes import load_scenes
from tests.hub.conftest import has
from tests.hub.test_cards import make_results
from tests.tiny import tiny_captioner
from tests.trainers.one_step import train

TOKEN, KEY, PASSWORD = "hf_" + "Q" * 34, "sk-very-secret-key", "a-password-of-somebody"
SECRETS = [secret.encode() for secret in (TOKEN, KEY, PASSWORD)]


def leaks(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file() and has(path.read_bytes(), SECRETS)]


def test_a_run_leaves_none(tmp_path, monkeypatch, capfd):
    for name, value in {"HF_TOKEN": TOKEN, "OPENAI_API_KEY": KEY, "WANDB_API_KEY": PASSWORD}.items():
        monkeypatch.setenv(name, value)
    rows = load_scenes(num_train=4, num_validation=0, num_test=0)["train"]
    settings = {"save_strategy": "steps", "per_device_train_batch_size": 2, "hub_token": TOKEN}
    trainer = train(tmp_path / "run", rows, captioner=tiny_captioner("blip"), **settings)
    trainer.save_model()
    config = {"model": {"api_key": KEY, "password": PASSWORD, "first_token": "mle"}, "training": trainer.args}
    write_results(tmp_path / "run", make_results()["rows"], columns=COLUMNS, seed=0, config=config)
    text = (tmp_path / "run" / "results.json").read_text()
    assert json.loads(text)["config"]["model"]["first_token"] == "mle"
    # A Trainer's file of arguments is a pickle that holds what it was given; it is not kept.
    assert leaks(tmp_path) == []
    said = capfd.readouterr()
    assert not has((said.out + said.err).encode(), SECRETS)


def test_the_search_finds_one(tmp_path):
    (tmp_path / "a.json").write_text(f'{{"x": "{KEY}"}}')
    assert leaks(tmp_path) == [str(tmp_path / "a.json")]
