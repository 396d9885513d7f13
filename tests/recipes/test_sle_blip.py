"""The recipe from the command line's arguments to every file it promises."""

import json

import numpy as np
import pytest
import torch

from hf_captionrl.apps.experiments.data import SampleArguments, Sampler
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import vision_tower_features
from hf_captionrl.data import load_captions, sample_frames
from hf_captionrl.metrics.columns import COLUMNS, SAMPLE_COLUMNS
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SLEConfig
from hf_captionrl.utils.model_files import model_path
from recipes import sle_blip as recipe
from tests.data.films import make_tgif
from tests.recipes.conftest import GENERATION, train
from tests.tolerances import assert_close

SHORT = [
    *"--rl_start_epoch 1 --num_train_epochs 2 --xe_learning_rate 3e-4".split(),  # an epoch of cross-entropy first
    *"--max_train_images 16 --max_eval_images 8 --max_test_images 105 --sample_images 6 --max_steps 2".split(),
    *"--per_device_train_batch_size 8 --num_generations 3 --num_samples 3 --eval_steps 2 --save_steps 2".split(),
    *"--sample_temperatures 0.5 --compare_alphas 1.0 0.3 --report_best_alpha".split(),
    *GENERATION,
]


def names_of(folder):
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [row["name"] for row in rows if row["name"] != "references"]


def test_results_have_the_expected_rows_and_columns(run):
    results = json.loads((run / "results.json").read_text())
    names = ["MLE", "XE", "SLL", "SLL-ME (entropy=0.03)", "SLE (alpha=0.3)", "SLE (alpha=0.6)"]
    assert [row["name"] for row in results["rows"]] == [*names, "references"]
    for row in results["rows"][:-1]:
        for key in (column.key for column in (*COLUMNS, *SAMPLE_COLUMNS)):
            missing = key.startswith("equal_cider_") and row[f"{key}_reason"] if row[key] is None else None
            is_missing = missing == "none of the sampled temperatures has the CIDEr-D of SLL" and row["name"] != "SLL"
            assert is_missing or isinstance(row[key], float), (row["name"], key)
    references = results["rows"][-1]
    assert references["rs_div_2"] is None
    assert "not samples" in references["rs_div_2_reason"]
    assert results["config"]["SLEBlipConfig"]["alpha"] == 0.6


def test_everything_is_written(run):
    for name in ("results.md", "gallery.html", "curves.png", "tradeoff.png", "panel.html", "model/README.md"):
        assert (run / name).stat().st_size > 100, name
    for folder in ("model", "model-xe", "model-sll", "model-sll-me--entropy-0.03"):
        assert (run / folder / "model.safetensors").exists(), folder
    samples = json.loads((run / "samples.json").read_text())
    assert set(samples["points"]) == set(samples["captions"]) == set(names_of(run))
    for points in samples["points"].values():
        assert [point["temperature"] for point in points] == [0.5, 1.0]
    for captions in samples["captions"].values():
        assert [len(group) for group in captions.values()] == [3] * 6
    assert samples["best_alpha"]["on"] == "validation"
    assert set(samples["best_alpha"]["at_equal_cider_d"]) == {"SLL", "SLE (alpha=0.3)", "SLE (alpha=0.6)"}
    assert (run / "panel.html").read_text().count("SLE (alpha=0.6)") == 6
    card = (run / "model" / "README.md").read_text()
    assert "CIDEr-D with the end token" in card
    assert "; 3 sampled captions per image; baseline" in card


def test_every_run_starts_from_the_captioner_after_cross_entropy(run):
    """What stands in the table as XE is where the others start."""
    start, *others = (
        dict(load_captioner(str(run / folder), dtype=torch.float32).model.named_parameters())
        for folder in ("model-xe", "model", "model-sll")
    )
    shipped = dict(load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32).model.named_parameters())

    def distance(a, b):
        return sum(float((a[name] - b[name]).detach().square().sum()) for name in a)

    assert distance(start, shipped) > 0
    for other in others:
        assert 0 < distance(other, start) < distance(other, shipped)
    assert json.loads((run / "results.json").read_text())["rows"][1]["cider_d"] is not None


VIDEO = ["--row", "sle/table3/sle", "--use_cpu"]
SHIPPED = [
    *"--model_name_or_path scenes:blip-mle --scorer_name_or_path scenes:clip-reward".split(),
    *"--held_out_scorer_name_or_path scenes:siglip-held-out --perplexity_name_or_path scenes:gpt2-perplexity".split(),
    *("--prompt", ""),
]


@pytest.mark.slow  # test_smile_video.py trains on videos every day
def test_videos_are_trained_on(tmp_path):
    """Table 3's configuration on small videos: mean-pooled features from the first step to the panel."""
    world, out = make_tgif(tmp_path / "world", 12), tmp_path / "out"
    more = (
        "--num_frames 4 --rl_start_epoch 1 --num_train_epochs 2 --num_generations 3 --per_device_train_batch_size 4 "
    )
    more += "--total_train_batch_size 4 --num_samples 2 --sample_temperatures 1.0 --generation_max_new_tokens 8 "
    more += "--max_completion_length 8 --generation_num_beams 2 --disable_tqdm true --learning_rate 1e-3 --guard off"
    train(recipe, tmp_path, [*VIDEO, *SHIPPED, "--data_dir", str(world)], more)
    assert names_of(out) == ["MLE", "XE", "SLE (alpha=0.75)"]
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert all(isinstance(row[key], float) for row in rows[:-1] for key in ("cider_d", "clip_score", "rs_div_2"))
    assert (out / "quarantine.jsonl").read_text() == ""
    for name in ("gallery.html", "panel.html", "tradeoff.png"):
        assert (out / name).stat().st_size > 100, name
    assert "videos with their captions (4 frames of each)" in (out / "model" / "README.md").read_text()
    start, trained = (
        dict(load_captioner(path, dtype=torch.float32).model.named_parameters())
        for path in (model_path("scenes:blip-mle"), str(out / "model"))
    )
    moved = {name for name in start if not torch.equal(start[name], trained[name])}
    assert moved
    assert not any(name.startswith("vision_model") for name in moved)
    # What the model was trained on, against the frames one by one.
    captioner = load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32)
    data = load_captions("tgif", split="test", data_dir=world, num_frames=4)
    features = vision_tower_features(captioner, data, cache_dir=str(tmp_path / "cache"))
    with torch.no_grad():
        frames = sample_frames(world / "gifs" / "t11.gif", 4)
        single = [captioner.image_features(**captioner.encode_images([frame])) for frame in frames]
    assert_close(torch.tensor(np.array(features[0])), torch.cat(single).mean(0), ulps=64)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--tune", "language", "--rl_start_epoch", "1", "--num_train_epochs", "2"], "rl_start_epoch"),
        (["--num_samples", "1"], "num_samples"),
        (["--sample_temperatures", "0"], "sample_temperatures"),
        (["--report_best_alpha"], r"the alphas \[0.6, 1.0\]"),
        (["--report_best_alpha", "--compare_alphas", "0.5", "0.25"], r"the alphas \[0.25, 0.5, 0.6\]"),
        (["--report_best_alpha", "--compare_alphas", "1", "0.5", "--entropy_weight", "0.1"], r"alphas \[0.5, 1.0\]"),
        (
            ["--report_best_alpha", "--compare_alphas", "1", "0.5", "--sample_temperatures", "1"],
            "sample_temperatures has only 1",
        ),
        ([*VIDEO, "--cache_image_features", "false"], "num_frames is 8.*--cache_image_features"),
        ([*VIDEO, *SHIPPED, "--num_frames", "0"], "Set num_frames"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, arguments, name):
    data = ["--data_dir", str(make_tgif(tmp_path / "world"))] if VIDEO[1] in arguments else []
    with pytest.raises(ValueError, match=name):
        recipe.main(["--output_dir", str(tmp_path / "out"), "--use_cpu", *arguments, *data])


def test_samples_come_from_their_seed_and_leave_the_random_state_alone():
    test = load_scenes(num_train=0, num_validation=0, num_test=8)["test"]
    captioner = load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32)
    arguments = SampleArguments(num_samples=3, sample_images=4, sample_temperatures=[0.5])

    def samples(seed, **more):
        settings = {"per_device_eval_batch_size": 3, "generation_max_new_tokens": 8, **more}
        sampler = Sampler(test, arguments, SLEConfig("unused", seed=seed, use_cpu=True, **settings))
        row = sampler.measure("MLE", captioner)
        assert [len(group) for group in sampler.samples["MLE"]] == [3] * 4
        return sampler.samples["MLE"], row

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, row = samples(0)
    assert torch.equal(torch.rand(3), expected)
    assert samples(0, freeze_vision_tower=True, cache_image_features=True) == (first, row)
    assert samples(1)[0] != first
    assert {column.key for column in SAMPLE_COLUMNS if not column.key.startswith("equal_cider_")} <= row.keys()


class Curves(Sampler):
    """A sampler of given points."""

    def __init__(self, **points):
        self.points = {
            name: [
                {"temperature": t, "cider_d": c, "div_2": d, "mbleu_4_per_image": 1 - d}
                for t, c, d in zip((0.5, 1.0), *of_name, strict=True)
            ]
            for name, of_name in points.items()
        }


def test_rows_are_compared_at_the_cider_d_of_sll():
    sampler = Curves(SLL=((1.4, 1.2), (0.2, 0.4)), MLE=((1.3, 0.7), (0.3, 0.9)), far=((0.9, 0.7), (0.3, 0.9)))
    rows = [{"name": name} for name in ("MLE", "SLL", "far", "references")]
    sampler.add_equal_cider_d(rows, "SLL")
    assert [row.get("equal_cider_div_2") for row in rows] == [pytest.approx(0.4), 0.4, None, None]
    assert rows[0]["equal_cider_mbleu_4_per_image"] == pytest.approx(0.6)
    assert rows[2]["equal_cider_div_2_reason"] == "none of the sampled temperatures has the CIDEr-D of SLL"
    rows = [{"name": "MLE"}]
    sampler.add_equal_cider_d(rows, "SLL-ME")
    assert rows[0]["equal_cider_div_2_reason"] == "SLL-ME was not sampled"


def test_the_best_alpha_is_the_most_diverse_at_equal_cider_d(capsys):
    points = {"SLL": ((1.4, 1.2), (0.2, 0.4)), "SLE (alpha=0.5)": ((1.3, 1.1), (0.3, 0.5))}
    found = recipe.best_alpha(Curves(**points, **{"SLE (alpha=0.25)": ((1.0, 0.7), (0.3, 0.95))}))
    assert found["name"] == "SLE (alpha=0.5)"  # the more diverse one never has SLL's CIDEr-D
    assert found["at_equal_cider_d"]["SLE (alpha=0.5)"]["div_2"] == pytest.approx(0.4)
    assert found["at_equal_cider_d"]["SLE (alpha=0.25)"] is None
    assert "Best alpha on the validation split: SLE (alpha=0.5), Div-2 0.400" in capsys.readouterr().out
    assert recipe.best_alpha(Curves(SLL=points["SLL"]))["name"] is None
