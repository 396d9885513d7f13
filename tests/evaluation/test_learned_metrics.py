"""`captionrl evaluate` with BLEURT, entailment and the entropy of a captioner, on tiny models."""

import json

import pytest

from hf_captionrl.captioners.prompts import caption_entropy
from hf_captionrl.cli import main
from hf_captionrl.evaluation.evaluator import learned_table
from hf_captionrl.metrics.nlg import bleurt, entailment
from hf_captionrl.metrics.suites import EMPTY_CAPTION
from hf_captionrl.scenes import load_scenes
from tests.tiny import tiny_captioner, tiny_pair_model
from tests.tolerances import close

IMAGES = 6


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))


@pytest.fixture(scope="module")
def written(scenes, tmp_path_factory):
    """Captions, folders of models, and the table of `captionrl evaluate`."""
    folder = tmp_path_factory.mktemp("learned")
    captions = ["a red cat", "two dogs", "", "a bird on a mat", "a cat", "dogs"]
    lines = [
        json.dumps({"image_id": i, "caption": c}) + "\n" for i, c in zip(scenes["image_id"], captions, strict=True)
    ]
    (folder / "mine.jsonl").write_text("".join(lines))
    tiny_pair_model(folder / "bleurt", ["score"])
    tiny_pair_model(folder / "nli", ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"])
    tiny_captioner("blip").save_pretrained(folder / "captioner")
    command = ["evaluate", "--captions", str(folder / "mine.jsonl"), "--max_images", str(IMAGES), "--scorer", "none"]
    command += ["--language_model", "none", "--bleurt", str(folder / "bleurt"), "--nli", str(folder / "nli")]
    command += ["--entropy_of", str(folder / "captioner"), "--output_dir", str(folder / "out")]
    assert main(command) == 0
    result = json.loads((folder / "out" / "comparison.json").read_text())
    return folder, captions, result


def test_numbers_are_those_of_the_functions(written, scenes):
    folder, captions, result = written
    assert list(result["tables"]) == ["smile", "learned", "preferences", "captions"]
    mine, human = result["tables"]["learned"]["rows"]
    references = [list(group) for group in scenes["captions"]]
    captions = [caption or EMPTY_CAPTION for caption in captions]
    expected = bleurt(captions, references, model=str(folder / "bleurt"))["bleurt"]
    assert mine["bleurt"] == close(expected, dtype="float32", ulps=64, magnitude=1)
    expected = entailment(captions, references, model=str(folder / "nli"))["entailment"]
    assert mine["entailment"] == close(expected, dtype="float32", ulps=64, magnitude=1)
    assert human["name"] == "references"
    assert human["bleurt_ci"][0] <= human["bleurt"] <= human["bleurt_ci"][1]
    found = caption_entropy(tiny_captioner("blip"), list(scenes["image"]), captions)["entropy"]
    assert mine["caption_entropy"] == close(found, dtype="float32", ulps=64)


def test_signatures_name_the_models_without_their_folders(written):
    folder, _, result = written
    signatures = result["signatures"]["learned"]
    assert signatures["bleurt"] == "metric:bleurt|model:bleurt|" + signatures["bleurt"].rpartition("|")[2]
    assert str(folder) not in json.dumps([signatures, result["tables"]["learned"]])
    assert "| Entropy of the captioner (nats) |" in (folder / "out" / "comparison.md").read_text()


def test_without_a_model_there_is_no_table():
    assert learned_table(None, None, None) is None


def test_only_the_named_models_have_columns(written):
    folder, *_ = written
    table = learned_table(None, str(folder / "nli"), None)
    assert [column.key for column in table.columns] == ["entailment"]
