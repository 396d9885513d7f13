"""`captionrl explain` on the embedded world: its files, and the reward of self-retrieval."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

import hf_captionrl.scenes
from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import model_path
from tests.tolerances import close, within

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
CAPTION = "two purple trucks above a pizza in the snow"


@pytest.fixture(scope="module")
def rows():
    """The first fifteen scenes of the test split: two bags of 7 and an image of a third."""
    return hf_captionrl.scenes.load_scenes(num_train=0, num_validation=0, num_test=15)["test"]


@pytest.fixture(autouse=True)
def small_world(monkeypatch, rows):
    """Scenes are drawn in order, so a smaller split begins with the same ones."""
    monkeypatch.setattr(hf_captionrl.scenes, "load_scenes", lambda **settings: {"test": rows})


def explain(folder, *more):
    return main(["explain", "scenes:blip-mle", "scenes:test-00012", "--output_dir", str(folder), *more])


def test_page_picture_and_numbers(tmp_path, capsys):
    assert explain(tmp_path, "--caption", CAPTION, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [token["text"] for token in found["tokens"]] == [*CAPTION.split(), "[SEP]"]
    assert found["reward"] is None
    assert found["smile_loss"] < found["mle_loss"]
    assert found["tokens"][0]["whole_vocabulary"]
    assert f"{found['mle_loss']:.2f} nats per token" in re.sub("<[^>]+>", "", (tmp_path / "explain.html").read_text())
    assert Image.open(tmp_path / "explain.png").format == "PNG"
    assert explain(tmp_path, "--caption", CAPTION, "--first_token", "smile", "--top_k", "2", "--json") == 0
    other = json.loads(capsys.readouterr().out)
    assert not other["tokens"][0]["whole_vocabulary"]
    assert len(other["tokens"][0]["mle_top"]) == 2
    assert other["smile_loss"] < found["smile_loss"]


def scores_in_bag(captions, rows):
    """Scores of the purple trucks, which come first, and of the others of their bag, by plain loops."""
    scorer = load_scorer(model_path("scenes:clip-reward"))
    bag = [row for row in rows if row["bag_id"] == "001"]
    bag.sort(key=lambda row: row["image_id"] != "test-00012")
    texts, images = scorer.text_features(captions), scorer.image_features([row["image"] for row in bag])
    return [torch.stack([scorer.logit_scale * (text * image).sum() for image in images]).double() for text in texts]


@pytest.mark.parametrize("baseline", ["none", "greedy", "leave_one_out"])
def test_advantage_is_reward_minus_baseline(baseline, rows, tmp_path, capsys):
    options = ["--distractors", "scenes:bag", "--baseline", baseline, "--num_samples", "3", "--json"]
    assert explain(tmp_path, "--caption", CAPTION, *options) == 0
    found = json.loads(capsys.readouterr().out)["reward"]
    image = {row["image_id"]: row["image"] for row in rows}["test-00012"]
    captioner = load_captioner(model_path("scenes:blip-mle"))
    encoded = captioner.encode_images([image.convert("RGB")])
    others = []
    if baseline == "greedy":
        others = captioner.generate(**encoded, num_beams=1, do_sample=False, max_new_tokens=77).captions
    elif baseline == "leave_one_out":
        torch.manual_seed(0)
        others = captioner.generate(
            **encoded, do_sample=True, num_return_sequences=3, max_new_tokens=77, top_k=0, num_beams=1
        ).captions
    scores = scores_in_bag([CAPTION, *others], rows)
    own, *rest = [float(mine[0] - mine.exp().sum().log()) for mine in scores]
    expected = own - (sum(rest) / len(rest) if rest else 0.0)
    assert found["reward"] == close(own, magnitude=100, dtype="float32")
    assert found["advantage"] == close(expected, magnitude=100, dtype="float32")
    assert found["baseline"] == close(own - expected, magnitude=100, dtype="float32")
    assert found["pool_size"] == 7
    assert found["rank"] == sum(score >= scores[0][0] for score in scores[0])
    number = len(CAPTION.split()) + 1
    assert found["weights"] == within([expected / number] * number, 1e-4)


def test_greedy_caption_has_advantage_0_against_the_greedy_baseline(tmp_path, capsys):
    options = ["--distractors", "scenes:test-00000", "scenes:test-00012", "--baseline", "greedy", "--json"]
    assert explain(tmp_path, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["caption"]
    assert found["reward"]["pool_size"] == 2  # the image's copy is not its distractor
    assert found["reward"]["advantage"] == 0.0


def test_image_files(rows, tmp_path, capsys):
    rows[0]["image"].save(tmp_path / "a<b>.png")
    assert main(["explain", "scenes:clipcap-mle", str(tmp_path / "a<b>.png"), "--output_dir", str(tmp_path)]) == 0
    html = (tmp_path / "explain.html").read_text()
    assert "a&lt;b&gt;.png" in html
    assert str(tmp_path) not in html
    assert "nats per token under MLE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["scenes:test-99999"], "There is no scene 'test-99999'"),
        (["no/such.png"], "There is no image"),
        (["scenes:test-00000", "--caption", " "], "--caption is empty"),
        (["scenes:test-00000", "--distractors", "scenes:test-00000"], "only the image itself"),
        (
            ["scenes:test-00000", "--caption", "a pig", "--distractors", "scenes:bag", "--scorer", "none"],
            "needs a scorer",
        ),
    ],
)
def test_bad_input_exits_with_2_and_the_reason(more, message, tmp_path, capsys):
    assert main(["explain", "scenes:blip-mle", *more, "--output_dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_commands_of_the_documentation_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    explained = [line for line in commands if line.startswith("captionrl explain scenes:")]
    assert len(explained) == 2
    for line in commands:
        build_parser().parse_args(shlex.split(line)[1:])
    for line in explained:
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert (tmp_path / "outputs" / "explain" / "explain.html").is_file()
    assert (ROOT / "docs" / "images" / "explain.png").stat().st_size < 200_000


def test_examples_of_the_help_parse():
    commands = next(action for action in build_parser()._actions if action.dest == "command").choices
    for name, number in (("explain", 3), ("gallery", 4)):
        text = re.sub(r"\\\n *", " ", commands[name].epilog)
        examples = [line for line in text.splitlines() if line.startswith("  captionrl ")]
        assert len(examples) == number
        for line in examples:
            assert callable(build_parser().parse_args(shlex.split(line)[1:]).run)
