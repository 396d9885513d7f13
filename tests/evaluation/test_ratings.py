"""Benchmarks of human ratings in the layout of their authors, and `captionrl agreement`."""

import json

import numpy as np
import pytest
from scipy.stats import kendalltau

from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from hf_captionrl.evaluation.metric_functions import metric_function
from hf_captionrl.experimental.ratings import load_ratings, published_agreement
from hf_captionrl.metrics import bleu
from hf_captionrl.scenes import load_scenes
from tests.apps.boosting.server import ChatServer, texts_of

IMAGES = 8


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))


@pytest.fixture
def folder(tmp_path, scenes):
    """Ratings of every first caption for every image, in the files of Flickr8k_text, and the images."""
    (tmp_path / "images").mkdir()
    generator = np.random.default_rng(0)
    tokens, expert, crowd = [], [], []
    for i, row in enumerate(scenes):
        open_image(row["image"]).save(tmp_path / "images" / f"{i}.jpg")
        tokens += [f"{i}.jpg#{n}\t{text}\n" for n, text in enumerate(row["captions"])]
        for j in range(IMAGES):
            rating = 3 if i == j else 1
            expert.append(f"{i}.jpg\t{j}.jpg#0\t1\t{rating}\t{rating + int(generator.integers(2))}\n")
            yes = 3 if i == j else int(generator.integers(3))
            crowd.append(f"{i}.jpg\t{j}.jpg#0\t{yes / 3}\t{yes}\t{3 - yes}\n")
    (tmp_path / "Flickr8k.token.txt").write_text("".join(tokens))
    (tmp_path / "ExpertAnnotations.txt").write_text("".join(expert))
    (tmp_path / "CrowdFlowerAnnotations.txt").write_text("".join(crowd))
    return tmp_path


def test_protocols(folder, scenes):
    expert, crowd = (load_ratings(name, folder) for name in ("flickr8k-expert", "flickr8k-cf"))
    assert len(expert.candidates) < IMAGES**2  # an image's own captions are left out
    assert not any(c in r for c, r in zip(expert.candidates, expert.references, strict=True))
    assert expert.ratings.shape == (len(expert.candidates), 3)
    assert expert.variant == "c"
    assert len(crowd.candidates) == IMAGES**2
    assert not any(c in r for c, r in zip(crowd.candidates, crowd.references, strict=True))
    assert (crowd.ratings[:: IMAGES + 1] == 1).all()
    assert crowd.variant == "b"
    own = crowd.references[0]
    assert own == [text.strip() for text in scenes[0]["captions"] if text.strip() != scenes[0]["captions"][0].strip()]
    # A rated caption of an image is not a reference of the image's other candidates.
    assert crowd.references[:IMAGES] == [own] * IMAGES
    assert expert.references[0] == [text.strip() for text in scenes[0]["captions"]]


def test_captions_of_a_karpathy_split_are_those_of_the_token_file(folder, scenes):
    before = load_ratings("flickr8k-expert", folder)
    (folder / "Flickr8k.token.txt").unlink()
    texts = [[{"raw": text} for text in row["captions"]] for row in scenes]
    images = [{"filename": f"{i}.jpg", "sentences": group} for i, group in enumerate(texts)]
    (folder / "dataset_flickr8k.json").write_text(json.dumps({"images": images}))
    after = load_ratings("flickr8k-expert", folder)
    assert (after.candidates, after.references, after.images) == (before.candidates, before.references, before.images)


def length(candidates, references):
    return [len(text) for text in candidates]


def test_any_metric_can_be_compared(folder, monkeypatch):
    rated = load_ratings("flickr8k-expert", folder)
    found = rated.agreement(length, num_bootstrap=0)
    lengths = np.repeat([len(text) for text in rated.candidates], 3)
    assert found["tau"] == pytest.approx(kendalltau(lengths, rated.ratings.ravel(), variant="c").statistic)
    (folder / "own_metric.py").write_text("def score(texts, references):\n    return [len(text) for text in texts]\n")
    monkeypatch.chdir(folder)
    seen = []

    def with_images(candidates, references, images):
        seen.extend(images)
        return length(candidates, references)

    def with_option(candidates, references, power=1):
        return [len(text) ** power for text in candidates]

    same = {
        "scores": [len(text) for text in rated.candidates],
        "images": with_images,
        "option": with_option,
        "function": "own_metric:score",
        "bleu_1": "bleu_1",
    }
    compared = rated.agreement(same, image_dir="images", num_bootstrap=0)["metrics"]
    assert [name for name, row in compared.items() if row == found] == list(same)[:-1]
    assert str(seen[0]) == f"images/{rated.images[0]}"
    for metric, named in (
        ("no_such:thing", "no_such"),
        ("own_metric:thing", "thing"),
        ("bleu_9", "bleu_9"),
        ("clip_score", "--scorer"),
        (lambda texts: texts, "captions and references"),
    ):
        with pytest.raises(ValueError, match=named):
            metric_function(metric)(["a", "b"], [["b"], ["c"]], [])


def test_the_command(folder, capsys):
    options = ["--benchmark", "flickr8k-expert", "--data_root", str(folder), "--num_bootstrap", "50"]
    metrics = ["--metrics", "bleu_1", "clip_score", "ref_clip_score", "--scorer", "scenes:clip-reward"]
    assert main(["agreement", *options, *metrics, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rated = load_ratings("flickr8k-expert", folder)
    scores = bleu(rated.candidates, rated.references)["per_sample"]["bleu_1"]
    tau = kendalltau(np.repeat(scores, 3), rated.ratings.ravel(), variant="c").statistic
    assert found["metrics"]["bleu_1"]["tau"] == pytest.approx(tau)
    assert len(found["differences"]) == 3
    published = published_agreement("flickr8k-expert")
    assert found["metrics"]["clip_score"]["published"] == published["clip_score"]["mean"]
    assert found["metrics"]["clip_score"]["verdict"] == "CLIP ViT-B/32"  # another scorer: no verdict
    assert found["metrics"]["bleu_1"]["verdict"].startswith("differs by")
    assert main(["agreement", *options, "--output", str(folder / "a.json")]) == 0
    assert "differs by" in capsys.readouterr().out
    assert set(json.loads((folder / "a.json").read_text())["metrics"]) == {"bleu_4", "rouge_l", "cider_d"}


def test_judge_by_an_endpoint_is_asked_once(folder, capsys):
    def rates(messages):
        """A number between 0 and 100 from the length of the caption."""
        caption = texts_of(messages)[0].split("Caption: ")[1].split("\n")[0]
        return json.dumps({"score": min(len(caption), 100), "reason": ""})

    options = f"--benchmark flickr8k-expert --data_root {folder} --num_bootstrap 0 --metrics clair".split()
    with ChatServer(rates) as server:
        judge = ["--judge", "openai:m", "--judge_url", server.url, "--judge_answers", str(folder / "kept.jsonl")]
        assert main(["agreement", *options, *judge, "--max_requests", "9"]) != 0
        assert "max_requests" in capsys.readouterr().err
        assert len(server.requests) == 9
        for _ in range(2):
            assert main(["agreement", *options, *judge, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
        rated = load_ratings("flickr8k-expert", folder)
        assert len(server.requests) == len(set(zip(rated.candidates, map(tuple, rated.references), strict=True)))
    lengths = [min(len(text), 100) for text in rated.candidates]
    tau = kendalltau(np.repeat(lengths, 3), rated.ratings.ravel(), variant="c").statistic
    assert found["metrics"]["clair"]["tau"] == pytest.approx(tau)


def test_a_judge_that_always_fails_ends_the_command(folder, capsys):
    options = ["--benchmark", "flickr8k-cf", "--data_root", str(folder), "--metrics", "clair", "--judge", "openai:m"]
    with ChatServer(str, lambda number, messages: 400) as server:
        assert main(["agreement", *options, "--judge_url", server.url]) == 1
        assert "failed 20 times in a row" in capsys.readouterr().err
        assert len(server.requests) < 30 < IMAGES**2


@pytest.mark.parametrize("name", ["flickr8k-expert", "flickr8k-cf"])
def test_damaged_lines(folder, name):
    file = folder / ("ExpertAnnotations.txt" if name == "flickr8k-expert" else "CrowdFlowerAnnotations.txt")
    good, whole = file.read_text(), load_ratings(name, folder)
    file.write_bytes(good.encode() * 4 + b"0.jpg\t\xff\xfe broken\n")
    assert load_ratings(name, folder).num_bad_lines == 1
    assert len(load_ratings(name, folder).candidates) == 4 * len(whole.candidates)
    file.write_text(good.replace(".jpg#", ".jpeg#"))
    with pytest.raises(ValueError, match="line 1"):
        load_ratings(name, folder)
