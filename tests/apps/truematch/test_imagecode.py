"""Captions of ImageCoDe among ten images: a small folder in the published layout, recall against a loop."""

import json

import pytest
from PIL import Image

from hf_captionrl.cli import main
from hf_captionrl.data import choose_split
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.model_files import model_path
from tests.tiny import write_captions
from tests.tolerances import close

SCORER = "scenes:clip-reward"


@pytest.fixture
def imagecode(tmp_path):
    folder = tmp_path / "imagecode"
    sets = {"open-images-1_a": {"3": "a red cat", "5": "a dog"}, "video-2_b": {"0": "two birds"}}
    for number, name in enumerate(sets):
        (folder / "image-sets" / name).mkdir(parents=True)
        for i in range(10):
            colour = (40 * (10 * number + i) % 256, 90 * i % 256, 255 - i)
            Image.new("RGB", (32, 32), colour).save(folder / "image-sets" / name / f"img{i}.jpg")
    (folder / "valid_data.json").write_text(json.dumps(sets))
    return folder


def test_imagecode_is_a_data_set_and_a_benchmark(imagecode, tmp_path, capsys):
    rows = choose_split("imagecode", None, data_dir=str(imagecode)).dataset
    ids = list(rows["image_id"])
    assert ids == ["open-images-1_a/3", "open-images-1_a/5", "video-2_b/0"]
    assert list(rows["captions"]) == [["a red cat"], ["a dog"], ["two birds"]]
    files = {"a": ["a large red cat", "a small dog", "some birds"], "b": ["a pig", "a blue train", "a red bird"]}
    for name, texts in files.items():
        write_captions(tmp_path / f"{name}.jsonl", ids, texts)
    command = ["truematch", "evaluate", str(imagecode), "--scorer", SCORER, "--output_dir", str(tmp_path / "out")]
    captions = ["--captions", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main([*command, *captions, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == result
    scorer = load_scorer(model_path(SCORER))
    for row, (file, texts) in zip(result["rows"], files.items(), strict=True):
        wins = []
        for i, text in zip(ids, texts, strict=True):
            name, _, target = i.partition("/")
            images = [Image.open(imagecode / "image-sets" / name / f"img{n}.jpg").convert("RGB") for n in range(10)]
            s = (scorer.text_features([text]) @ scorer.image_features(images).T)[0]
            wins.append(all(s[int(target)] > s[n] for n in range(10) if n != int(target)))
        assert row["name"] == file
        assert row["recall_at_1_all"] == close(sum(wins) / 3)
        assert row["recall_at_1_static"] == close(sum(wins[:2]) / 2)
        assert row["recall_at_1_video"] == close(float(wins[2]))
        assert row["captions_truncated"] == 0
    assert main(command) == 2
    assert "--captions" in capsys.readouterr().err
