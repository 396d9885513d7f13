"""Rows that name files elsewhere: refused, whatever they are called, in every kind of source."""

import json
import os
import zipfile

import datasets
import pyarrow.parquet as pq
import pytest

from hf_captionrl.data import check_captions, load_captions, open_image
from hf_captionrl.data.columns import undecoded
from hf_captionrl.data.images import paths_without_bytes, refuse_outside
from tests.data.photos import make_folder, png

ALL = (1, 0, 0)


@pytest.fixture
def world(tmp_path):
    """The data, a private picture beside it, and links from one to the other."""
    folder = make_folder(tmp_path / "data", 3)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "me.png").write_bytes(png(9))
    (tmp_path / "data-of-others").mkdir()  # its name begins alike
    (tmp_path / "data-of-others" / "me.png").write_bytes(png(9))
    (folder / "link.png").symlink_to(tmp_path / "private" / "me.png")
    (folder / "folder").symlink_to(tmp_path / "private")
    (folder / "inner.png").symlink_to(folder / "1.png")
    (folder / "sub").mkdir()
    (folder / "sub" / "back").symlink_to(folder)
    return tmp_path


OUTSIDE = {
    "absolute": "{world}/private/me.png",
    "parent": "../private/me.png",
    "deep parent": "sub/../../private/me.png",
    "absolute and parent": "{world}/data/../private/me.png",
    "a name that begins alike": "../data-of-others/me.png",
    "link": "link.png",
    "link of a folder": "folder/me.png",
    "through a link and back": "folder/../private/me.png",
    "link to the data and out": "sub/back/../private/me.png",
    "not there": "/nowhere/at/all.png",
    "the folder above": "..",
    "two slashes": "//{world}/private/me.png",
}
INSIDE = {
    "plain": "1.png",
    "absolute": "{world}/data/1.png",
    "dots": "./sub/../1.png",
    "link": "inner.png",
    "link of a folder": "sub/back/1.png",
    "not there": "sub/none.png",
}


def lines(path, name):
    row = {"file_name": name, "captions": ["a caption"]}
    good = {"file_name": "0.png", "captions": ["another"]}
    path.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")


def as_folder(world, name):
    lines(world / "data" / "metadata.jsonl", name)
    return {"dataset_name": "imagefolder", "data_dir": world / "data"}


def as_split_folder(world, name):
    root = world / "data"
    (root / "metadata.jsonl").unlink()
    (root / "train").mkdir()
    lines(root / "train" / "metadata.jsonl", name if os.path.isabs(name) else f"../{name}")
    return {"dataset_name": "imagefolder", "data_dir": root}


def as_lines(world, name):
    lines(world / "rows.jsonl", name)
    return {"dataset_name": str(world / "rows.jsonl"), "image_root": world / "data"}


def as_karpathy(world, name):
    folder, _, file = name.rpartition("/")
    images = [
        {
            "filepath": f"{folder}/" if folder else "",
            "filename": file,
            "cocoid": 7,
            "sentences": [{"raw": "a caption"}],
        },
        {"filepath": "", "filename": "0.png", "cocoid": 8, "sentences": [{"raw": "another"}]},
    ]
    (world / "k.json").write_text(json.dumps({"images": images}))
    return {"dataset_name": str(world / "k.json"), "image_root": world / "data"}


def as_parquet_of_text(world, name):
    rows = {"image": ["0.png", name], "captions": [["another"], ["a caption"]]}
    datasets.Dataset.from_dict(rows).to_parquet(world / "data" / "t.parquet")
    return {"dataset_name": str(world / "data" / "t.parquet")}


def as_parquet_of_images(world, name):
    # The type says "image"; what it holds is a name, which datasets would open wherever it leads.
    path = name if os.path.isabs(name) or "://" in name else str(world / "data" / name)
    rows = [{"bytes": png(0), "path": "/anything"}, {"bytes": None, "path": path}]
    kinds = datasets.Features(
        {"image": datasets.Image(decode=False), "captions": datasets.List(datasets.Value("string"))}
    )
    table = datasets.Dataset.from_dict({"image": rows, "captions": [["another"], ["a caption"]]}, features=kinds)
    pq.write_table(table.data.table, world / "data" / "i.parquet")  # to_parquet would open the files
    return {"dataset_name": str(world / "data" / "i.parquet")}


SOURCES = [as_folder, as_split_folder, as_lines, as_karpathy, as_parquet_of_text, as_parquet_of_images]


@pytest.mark.parametrize("source", SOURCES, ids=[s.__name__ for s in SOURCES])
@pytest.mark.parametrize("name", OUTSIDE.values(), ids=OUTSIDE)
def test_outside_is_refused(source, name, world):
    name = name.format(world=world)
    given = source(world, name)
    if source is as_split_folder and os.path.isabs(name):  # "train/" stands before it
        found = undecoded(load_captions(**given, split_fractions=ALL))
        assert all(image["path"].startswith(str(world / "data" / "train")) for image in found["image"][:])
        return
    with pytest.raises(ValueError, match=r"row [01] names the file .* not below image_root.*Set image_root"):
        load_captions(**given, split_fractions=ALL)


@pytest.mark.parametrize("source", [as_folder, as_lines, as_parquet_of_text, as_parquet_of_images])
@pytest.mark.parametrize("name", INSIDE.values(), ids=INSIDE)
def test_inside_is_not(source, name, world):
    found = load_captions(**source(world, name.format(world=world)), split_fractions=ALL)
    assert len(found) == 2
    if "none" not in name:
        assert open_image(undecoded(found)[1]["image"]).tobytes() == open_image(png(1)).tobytes()


def test_another_root_is_the_remedy(world):
    as_folder(world, "../private/me.png")
    # Behind the root itself there may be a link.
    (world / "whole").symlink_to(world)
    with pytest.raises(ValueError, match="not below"):
        load_captions("imagefolder", data_dir=world / "whole" / "data", split_fractions=ALL)
    lines(world / "rows.jsonl", "private/me.png")
    found = load_captions(str(world / "rows.jsonl"), image_root=world / "whole", split_fractions=ALL)
    assert open_image(undecoded(found)[1]["image"]).size == (12, 10)


ADDRESSES = [
    "http://a.example/1.png",
    "https://127.0.0.1:9/1.png",
    "ftp://a.example/1.png",
    "s3://bucket/1.png",
    "hf://datasets/o/d/1.png",
    "file:///etc/hosts",
    "zip://1.png::{world}/private/a.zip",
    "zip://../../private/me.png::{world}/data/a.zip",
    "tar://1.png::{world}/private/a.tar",
    "simplecache::http://a.example/1.png",
    "gzip://1.png::{world}/private/me.png.gz",
]


@pytest.mark.parametrize("source", [as_folder, as_parquet_of_text, as_parquet_of_images])
@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses_and_members_of_archives_are_never_opened(source, name, world):
    for folder in ("private", "data"):
        with zipfile.ZipFile(world / folder / "a.zip", "w") as archive:
            archive.writestr("1.png", png(1))
            archive.writestr("../../private/me.png", png(1))
    name = name.format(world=world)
    given = source(world, name)
    found = load_captions(**given, split_fractions=ALL)
    # Looking at the row fetches nothing, though datasets.Image would.
    assert found[1]["image"] == {"bytes": None, "path": name}
    good, report = check_captions(found, max_bad_fraction=0.5)
    assert [entry.reason for entry in report.entries] in (["image_remote"], ["image_not_found"])
    assert len(good) == 1


def test_datasets_alone_would_open_a_member_of_an_archive(world):
    with zipfile.ZipFile(world / "private" / "a.zip", "w") as archive:
        archive.writestr("1.png", png(1))
    image = datasets.Image().decode_example({"bytes": None, "path": f"zip://1.png::{world}/private/a.zip"})
    assert image.size == (12, 10)


def test_an_unknown_kind_of_file_is_not_looked_for_on_the_hub(tmp_path):
    for name in ("a.zip", "a.pandas", "squad"):
        (tmp_path / name).write_bytes(b"PK")
        with pytest.raises(ValueError, match="holds no table"):
            load_captions(str(tmp_path / name))


def test_without_a_folder_of_the_data_no_file_is_named():
    with pytest.raises(ValueError, match="there is none"):
        refuse_outside(["a.png"], None, "a data set of the Hub")
    refuse_outside([None, "", "http://a.example/x.png"], None, "a data set of the Hub")
    refuse_outside([os.path.join(datasets.config.HF_DATASETS_CACHE, "a.png")], None, "a data set of the Hub")
    assert paths_without_bytes(datasets.Dataset.from_dict({"image": [1, 2]}).data.column("image")).to_pylist() == []


def test_the_check_costs_little(tmp_path):
    import time

    (tmp_path / "a").mkdir()
    paths = [str(tmp_path / "a" / f"{n}.png") for n in range(20_000)]
    started = time.process_time()
    refuse_outside(paths, tmp_path, "test")
    assert time.process_time() - started < 1  # 0.15 s where it was written
