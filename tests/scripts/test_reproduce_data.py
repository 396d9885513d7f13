"""Rows on the papers' data: what they need, in which order they run, and where they start."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import reproduce
from scripts.make_paper_index import load_rows, until_of
from scripts.reproduction import real
from scripts.reproduction.numbers import measured

ROOT = Path(__file__).parents[2]
NDLB_DATA = (
    "dataset_coco.json",
    "images",
    "truematch",
    "boosted/train/captions.parquet",
    "boosted/test/captions.parquet",
)
MODELS = ("openai/clip-vit-base-patch32", "openai/clip-vit-large-patch14", "openai-community/gpt2")


def make_data(data):
    for name in (*NDLB_DATA, *(f"models/{name}" for name in MODELS)):
        (data / name).mkdir(parents=True)


def test_every_preset_of_the_index_says_what_it_needs(tmp_path):
    presets = reproduce._presets(load_rows())
    assert real.is_embedded("smile/scenes/figure4a-random")
    rows = [row for row in load_rows() if row["kind"] == "table"]
    assert {line["preset"] for row in rows for line in row["lines"] if "preset" in line} <= set(presets)
    for preset in presets:
        assert "scenes" not in str(real.settings_of(preset)), preset
        assert real.missing_of(preset, None), preset
        recipe, option, value, *_ = real.arguments_of(preset, tmp_path, 0, tmp_path / "out")
        assert (ROOT / recipe).is_file()
        assert option == ("--config" if value.endswith(".yaml") else "--row")
        assert value in (preset, f"recipes/configs/{preset}.yaml")


def test_a_preset_runs_where_its_data_are(tmp_path):
    preset, data, called = "discritune/coco", tmp_path / "data", []
    arguments = {"output": tmp_path / "out", "runs_dir": tmp_path / "runs", "told": lambda text: None}
    said = real.run_preset(preset, data, [0], caller=lambda words: 1, **arguments)
    assert said.startswith(
        "models/clipcap-coco, models/openai/clip-vit-large-patch14, models/openai/clip-vit-base-patch32, dataset_coco.json, images"
    )
    scorers = ("models/openai/clip-vit-base-patch32", "models/openai/clip-vit-large-patch14")
    for name in ("models/clipcap-coco", *scorers, "images"):
        (data / name).mkdir(parents=True)
    (data / "dataset_coco.json").write_text("{}")

    def caller(words):
        called.append(words)
        folder = Path(words[words.index("--output_dir") + 1])
        folder.mkdir(parents=True)
        rows = [{"name": "MLE", "cider_d": 1.0}, {"name": "SR (random)", "cider_d": 0.5 + len(called)}]
        curves = {"SR (random)": [{"step": step, "cider_d": step + len(called)} for step in (0, 5)]}
        (folder / "results.json").write_text(json.dumps({"rows": rows, "learning_curves": curves}))
        return 0

    assert real.run_preset(preset, data, [0, 1], caller=caller, **arguments) is None
    assert real.run_preset(preset, data, [0, 1], caller=caller, **arguments) is None
    assert len(called) == 2
    assert called[0][called[0].index("--image_root") + 1] == str(data / "images")
    record = json.loads(real.result_path(preset, tmp_path / "out").read_text())
    assert measured("trained/cider_d", record).values == (1.5, 2.5)
    assert measured("learning_curves/SR (random)/last/cider_d", record).values == (6, 7)
    assert str(tmp_path) not in json.dumps(record["commands"]).replace(str(tmp_path / "runs"), "")


def test_a_preset_comes_after_the_one_that_makes_its_start(tmp_path):
    presets = reproduce._presets(load_rows())
    for given in (presets, presets[::-1]):
        ordered = real.with_makers(given, tmp_path)
        assert set(presets) <= set(ordered)
        assert len(ordered) == len(set(ordered))
        for place, preset in enumerate(ordered):
            start = real.settings_of(preset).get("model_name_or_path", "")
            makers = [n for n in real.preset_names() if f"{real.settings_of(n).get('output_dir')}/model" == start]
            assert all(maker in ordered[:place] for maker in makers), preset
    assert "smile/mle/from-scratch" in set(real.with_makers(presets, None)) - set(presets)
    (tmp_path / "models/smile/mle/from-scratch/model").mkdir(parents=True)
    assert "smile/mle/from-scratch" not in real.with_makers(presets, tmp_path)


def test_what_a_start_needs_is_missing_instead_of_the_start(tmp_path):
    preset, start = "ndlb/table5/row8", "models/ndlb/table11/holisticcap/model"
    assert real.makers_of(preset) == {"model_name_or_path": "ndlb/table11/holisticcap"}
    assert real.makers_of("smile_blip/coco") == real.makers_of("ndlb/table11/coco") == {}
    make_data(tmp_path)
    assert real.missing_of(preset, tmp_path) == []
    (tmp_path / "models/openai-community/gpt2").rmdir()  # only maximum likelihood begins with it
    assert real.missing_of(preset, tmp_path) == ["models/openai-community/gpt2"]
    (tmp_path / start).mkdir(parents=True)
    assert real.missing_of(preset, tmp_path) == []
    assert start not in real.missing_of(preset, None)
    # A preset whose curve has to reach the result of another one comes after it.
    until = until_of(load_rows())
    assert until["ndlb/table14/coco"] == ["ndlb/table4/row2", "trained/reward_rd100_recall_at_1"]
    assert real.with_makers(["ndlb/table14/coco"], None, until)[-2:] == ["ndlb/table4/row2", "ndlb/table14/coco"]
    make_data(tmp_path / "data")
    folders = {"output": tmp_path / "out", "runs_dir": tmp_path / "runs", "caller": None}
    said = real.run_preset(preset, tmp_path / "data", [0], **folders)
    assert said == "the model of ndlb/table11/holisticcap is not there, which it needs"


def test_a_missing_start_is_made_first_and_read_from_its_folder(tmp_path, monkeypatch, capsys):
    make_data(tmp_path / "data")
    called = []

    def caller(words):
        called.append(words)
        folder = Path(words[words.index("--output_dir") + 1])
        (folder / "model").mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"rows": [{"name": "MLE", "cider_d": 1.0}]}))
        return 0

    row = {"id": "ndlb-table-9", "kind": "table", "lines": [{"preset": "ndlb/table5/row8"}]}
    monkeypatch.setattr(reproduce.index, "load_rows", lambda: [row])
    monkeypatch.setattr(reproduce, "load_runs", dict)
    monkeypatch.setattr(real.run_preset, "__kwdefaults__", {**real.run_preset.__kwdefaults__, "caller": caller})
    folders = ["--output", str(tmp_path / "out"), "--runs_dir", str(tmp_path / "runs")]
    assert reproduce.main(["--data_root", str(tmp_path / "data"), "--seeds", "1", *folders]) == 0, capsys.readouterr()
    made, used = called
    assert made[made.index("--row") + 1] == "ndlb/table11/holisticcap"
    assert used[used.index("--row") + 1] == "ndlb/table5/row8"
    assert used[used.index("--model_name_or_path") + 1] == made[made.index("--output_dir") + 1] + "/model"
    assert "seed-1" in made[made.index("--output_dir") + 1]


def test_a_table_with_a_judge_gets_one(tmp_path):
    words = real.arguments_of("smile/table7/5-epochs", tmp_path, 0, tmp_path / "runs")
    assert words[words.index("--judge") + 1] == "model"
    assert words[words.index("--judge_model") + 1] == str(tmp_path / "models/judge")
    assert "--judge" not in real.arguments_of("smile/table3/row7", tmp_path, 0, tmp_path / "runs")
