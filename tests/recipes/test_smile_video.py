"""SMILE on videos from the command line's arguments to the table with EMScore."""

import json
from pathlib import Path

import pytest
import torch

import hf_captionrl.scenes as scenes
from hf_captionrl.apps.experiments import report
from hf_captionrl.apps.experiments.smile import VideoEvaluator
from hf_captionrl.captioners import load_captioner
from hf_captionrl.data import sample_frames
from hf_captionrl.metrics import emscore
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import model_path
from recipes import smile_video as recipe
from tests.recipes.conftest import train
from tests.tolerances import close

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs" / "smile_video"
SHORT = [
    *"--per_device_train_batch_size 8 --per_device_eval_batch_size 32 --generation_num_beams 1 --max_steps 2".split(),
    *"--generation_max_new_tokens 8 --use_cpu --disable_tqdm true --eval_steps 2 --save_steps 2".split(),
    *"--eval_strategy steps --save_strategy steps".split(),
]


@pytest.fixture(scope="module", autouse=True)
def small_world():
    with pytest.MonkeyPatch.context() as patch:
        made = scenes.load_moving_scenes(num_train=16, num_validation=6, num_test=18)
        patch.setattr(scenes, "load_moving_scenes", lambda: made)
        patch.setattr(report, "better_decoding", lambda trainer: 3)
        yield made


def test_the_table_ends_with_emscore(run):
    results = json.loads((run / "results.json").read_text())
    names = ["MLE", "MLE first", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references"]
    assert [row["name"] for row in results["rows"]] == names
    for row in results["rows"]:
        assert -1 <= row["emscore"] <= 1
        assert row["emscore_references"] > row["emscore"]  # texts are nearer to texts than to pictures
        assert 0 <= row["bag_3_recall_at_1"] <= 1
    assert results["rows"][-1]["hallucination"] < 0.06  # annotators make mistakes
    assert results["config"]["SmileVideoConfig"]["frame_pooling"] == "ordered"
    assert "EMScore" in (run / "results.md").read_text()
    assert "clips of Noto Emoji" in (run / "model" / "README.md").read_text()
    captioner = load_captioner(str(run / "model"), dtype=torch.float32)
    assert captioner.family == "blip"
    assert (run / "model-mle" / "model.safetensors").exists()


def test_starts_have_their_better_decoding(run):
    rows = json.loads((run / "results.json").read_text())["rows"]
    noted = {row["name"] for row in rows if "3 beams, which is better for the start" in row.get("note", "")}
    assert noted == {"MLE", "MLE first"}


def test_emscore_of_a_row_is_that_of_frames_and_tokens(small_world, tmp_path):
    rows = small_world["test"].select(range(4)).add_column("video_frames", [3] * 4)
    held_out_scorer = load_scorer(model_path("scenes:clip-reward"))
    evaluator = VideoEvaluator(rows, held_out_scorer, None, seed=0, cache_dir=str(tmp_path))
    captions = ["a pig", "a large bell moving left", "two things", "a tree on a blue background"]
    references = [list(texts[1:]) for texts in rows["captions"]]
    for chosen in (None, references):
        expected = emscore(
            [t.cpu() for t in held_out_scorer.token_features(captions)],
            [held_out_scorer.image_features(sample_frames(row["image"], 3)).cpu() for row in rows],
            reference_features=[
                [t.cpu() for t in held_out_scorer.token_features(texts)]
                for texts in (chosen or list(rows["captions"]))
            ],
        )
        row = evaluator.row("x", captions, chosen)
        assert row["emscore_precision"] == close(expected["precision"], dtype="float32", magnitude=1)
        assert 0 <= row["emscore_recall_at_1"] <= row["emscore_recall_at_5"] == 1  # of 4 videos
        assert row["emscore_recall"] == close(expected["recall"], dtype="float32", magnitude=1)
        found = [row["emscore"], row["emscore_references"]]
        assert found == close([expected["f"], expected["reference_f"]], dtype="float32", magnitude=1)
    without = VideoEvaluator(rows, None, None, seed=0).row("x", captions)
    assert without["emscore"] is None
    siglip = load_scorer(model_path("scenes:siglip-held-out"))
    assert VideoEvaluator(rows, siglip, None, seed=0, cache_dir=str(tmp_path)).row("x", captions)["emscore"] is None
    assert "token features" in without["emscore_reason"]
    with pytest.raises(ValueError, match="The data are images"):
        VideoEvaluator(small_world["test"], None, None, seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_frames", "0"], "num_frames"),
        (["--cache_image_features", "false"], "cache_image_features"),
        (["--frame_pooling", "native"], "frame_pooling"),
        (["--tune", "language"], "mle_epochs"),
        (["--model_name_or_path", "scenes:clipcap-mle"], "one frame, not of 4"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        train(recipe, tmp_path, ["--config", str(CONFIGS / "moving_scenes.yaml"), *SHORT, *arguments])
