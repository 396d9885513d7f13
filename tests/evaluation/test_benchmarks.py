"""Benchmarks of a command line: small files in the published layouts, scores against loops."""

import json

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.cli.benchmark import BenchmarkOptions, benchmark
from hf_captionrl.data import choose_split
from hf_captionrl.data.benchmarks import load_mmvp, load_winoground
from hf_captionrl.metrics.clip_scores import pair_matching
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import model_path
from tests.tolerances import close

SCORER = "scenes:clip-reward"


def picture(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 32), (40 * number % 256, 90 * number % 256, 255 - number)).save(path)


@pytest.fixture
def winoground(tmp_path):
    rows = []
    for n in range(3):
        names = {f"image_{i}": f"ex_{n}_img_{i}" for i in (0, 1)}
        for i, name in enumerate(names.values()):
            picture(tmp_path / "data" / "images" / f"{name}.png", 2 * n + i)
        captions = {"caption_0": f"a red cat {n}", "caption_1": f"two dogs {n}"}
        rows.append({"id": n, **names, **captions, "collapsed_tag": "Object"})
    (tmp_path / "data" / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def mmvp(tmp_path):
    lines = ["Question ID,Type,Statement"]
    for number, kind in ((1, "Quantity"), (2, "Quantity"), (3, "Color"), (4, "Color")):
        lines.append(f'{number},{kind},"statement, number {number}"')
        picture(tmp_path / "MLLM_VLM Images" / kind / f"{number}.jpg", number)
    (tmp_path / "Questions.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def printed(capsys, *arguments, **options):
    benchmark(BenchmarkOptions(*arguments, scorer=SCORER, json=True, **options))
    return json.loads(capsys.readouterr().out)


def loop(pairs, prefix):
    scorer = load_scorer(model_path(SCORER))
    text = image = group = 0
    for pair in pairs:
        images = scorer.image_features([Image.open(path).convert("RGB") for path in pair.images])
        captions = scorer.text_features([prefix + caption for caption in pair.captions])
        s = [[float(c @ i) for i in images] for c in captions]
        prefers_caption = s[0][0] > s[1][0] and s[1][1] > s[0][1]
        prefers_image = s[0][0] > s[0][1] and s[1][1] > s[1][0]
        text, image, group = text + prefers_caption, image + prefers_image, group + (prefers_caption and prefers_image)
    return [count / len(pairs) for count in (text, image, group)]


def test_winoground_scores_equal_a_loop(winoground, capsys):
    found = printed(capsys, name="winoground", data_dir=winoground)
    pairs = load_winoground(winoground)
    assert [pair.captions for pair in pairs] == [(f"a red cat {n}", f"two dogs {n}") for n in range(3)]
    assert [found[key] for key in ("text_score", "image_score", "group_score")] == close(loop(pairs, "a photo of "))
    assert found["pairs"] == 3
    (winoground / "data" / "images" / "ex_1_img_0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"ex_1_img_0\.png"):
        load_winoground(winoground)


def test_mmvp_scores_equal_a_loop(mmvp, capsys):
    found = printed(capsys, name="mmvp", data_dir=mmvp, prefix="")
    pairs = load_mmvp(mmvp)
    assert pairs[0].captions == ("statement, number 1", "statement, number 2")
    assert found["image_score"] == close(loop(pairs, "")[1])
    assert list(found["image_score_by_category"]) == ["Quantity", "Color"]
    (mmvp / "Questions.csv").write_text("Question ID,Type,Statement\n1,Quantity,a\n2,Color,b\n")
    with pytest.raises(ValueError, match="questions 1 and 2 are of different types"):
        load_mmvp(mmvp)


def test_pairs_name_only_images_of_their_folder(winoground, mmvp, tmp_path):
    picture(tmp_path / "private.png", 1)
    picture(tmp_path / "private.jpg", 1)
    row = {"image_0": "../../private", "image_1": str(tmp_path / "private"), "caption_0": "a", "caption_1": "b"}
    (winoground / "data" / "examples.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="image_root"):
        load_winoground(winoground)
    for kind, name in (("..", "private"), (str(tmp_path), "private"), (".", "../private")):
        (mmvp / "Questions.csv").write_text(f"Question ID,Type,Statement\n{name},{kind},a\n{name},{kind},b\n")
        with pytest.raises(ValueError, match="image_root"):
            load_mmvp(mmvp)


def test_scores_of_pairs_by_hand():
    # right, ties, captions exchanged, only the images are told apart
    values = [[[2, 1], [1, 2]], [[1, 1], [1, 1]], [[1, 2], [2, 1]], [[3, 2], [4, 5]]]
    found = pair_matching(np.array(values))
    assert found["text_score"] == close(1 / 4)
    assert found["image_score"] == close(2 / 4)
    assert found["group_score"] == close(1 / 4)
    assert found["text_accuracy"] == close(3 / 8)
    with pytest.raises(ValueError, match=r"Pass \(pairs, 2 captions, 2 images\)"):
        pair_matching(np.zeros((2, 2)))


@pytest.fixture
def imagecode(tmp_path):
    sets = {"open-images-1_a": {"3": "a red cat", "5": "a dog"}, "video-2_b": {"0": "two birds"}}
    for number, name in enumerate(sets):
        for i in range(10):
            picture(tmp_path / "image-sets" / name / f"img{i}.jpg", 10 * number + i)
    (tmp_path / "valid_data.json").write_text(json.dumps(sets))
    return tmp_path


def test_imagecode_is_a_data_set_and_a_benchmark(imagecode, tmp_path, capsys):
    rows = choose_split("imagecode", None, data_dir=str(imagecode)).dataset
    ids = list(rows["image_id"])
    assert ids == ["open-images-1_a/3", "open-images-1_a/5", "video-2_b/0"]
    assert list(rows["captions"]) == [["a red cat"], ["a dog"], ["two birds"]]
    texts = ["a large red cat", "a small dog", "some birds"]
    lines = [json.dumps({"image_id": i, "caption": text}) + "\n" for i, text in zip(ids, texts, strict=True)]
    (tmp_path / "captions.jsonl").write_text("".join(lines))
    found = printed(capsys, name="imagecode", data_dir=imagecode, captions=tmp_path / "captions.jsonl")
    scorer = load_scorer(model_path(SCORER))
    wins = []
    for i, text in zip(ids, texts, strict=True):
        name, _, own = i.partition("/")
        images = [Image.open(imagecode / "image-sets" / name / f"img{n}.jpg").convert("RGB") for n in range(10)]
        s = (scorer.text_features([text]) @ scorer.image_features(images).T)[0]
        wins.append(all(s[int(own)] > s[n] for n in range(10) if n != int(own)))
    assert found["recall_at_1_all"] == close(sum(wins) / 3)
    assert found["recall_at_1_static"] == close(sum(wins[:2]) / 2)
    assert found["recall_at_1_video"] == close(float(wins[2]))
    with pytest.raises(ValueError, match=r"imagecode ranks captions. Use --captions"):
        benchmark(BenchmarkOptions(name="imagecode", data_dir=imagecode, scorer=SCORER))
