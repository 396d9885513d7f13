"""Files on the Hub, named by `hf://`: which loader opens them, and which names are refused."""

import datasets
import pytest

from hf_captionrl.data import load_captions
from hf_captionrl.data.columns import undecoded
from hf_captionrl.scenes import load_scenes

NAME = "hf://datasets/me/photos@v1/data/train-*.parquet"


def test_hub_files_are_read_like_a_local_file(tmp_path, monkeypatch):
    rows = load_scenes(num_train=0, num_validation=0)["test"].select(range(3)).select_columns(["image", "captions"])
    rows.to_parquet(tmp_path / "a.parquet")
    asked = []

    def load_dataset(kind, *, data_files):
        asked.append((kind, data_files))
        return datasets.DatasetDict(train=datasets.Dataset.from_parquet(str(tmp_path / "a.parquet")))

    local = load_captions(str(tmp_path / "a.parquet"), split="all")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load_captions(NAME, split="all")
    assert asked == [("parquet", NAME)]
    assert found["captions"][:] == local["captions"][:] == rows["captions"][:]
    assert undecoded(found)["image"][:] == undecoded(local)["image"][:]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("hf://datasets/me/photos", {}, "hf:// needs files that end in .parquet"),
        (NAME, {"revision": "v2"}, "files on the Hub name their revision: hf://datasets/OWNER/NAME@v2/"),
    ],
)
def test_other_hub_names_are_refused(name, more, message):
    with pytest.raises(ValueError, match=message):
        load_captions(name, split="all", **more)
