"""Published benchmarks, read from small files in their layout and from invalid ones."""

import json
import pickle

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.data import (
    check_captions,
    frames_of,
    load_caption_splits,
    load_captions,
    open_image,
    open_still,
    sample_frames,
)
from hf_captionrl.data.benchmarks import (
    coco_id,
    load_hard_pool,
    load_imagecode,
    load_published_bags,
    match_coco_ids,
)
from hf_captionrl.metrics import self_retrieval
from tests.data.films import colour_of, colours_of, film, make_tgif, write_gifs

ALL = (1, 0, 0)  # no split is divided off train


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def picture(path, colour=(1, 2, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)


# --- the paper's bags ---------------------------------------------------------------------------------------------


def test_a_coco_image_has_one_number():
    for name in (3310, "3310", "000000003310.jpg", "val2014/COCO_val2014_000000003310.jpg", "a\\3310"):
        assert coco_id(name) == "3310"
    for name in ("", None, True, "cat.jpg", 3.5, "12a", "-4"):
        with pytest.raises(ValueError, match="is not a COCO image"):
            coco_id(name)


def test_published_bags_are_matched_by_number(tmp_path):
    put(tmp_path / "benchmark/3.json", [[3310, 42, 7], [9, "10", 11]])
    put(tmp_path / "benchmark/5.json", [[1, 2, 3, 4, 5]])
    put(tmp_path / "benchmark/1.json", "nobody reads this")
    bags = load_published_bags(tmp_path, [3, 5])
    assert bags == {3: [["3310", "42", "7"], ["9", "10", "11"]], 5: [["1", "2", "3", "4", "5"]]}
    assert load_published_bags(tmp_path / "benchmark", [5]) == {5: bags[5]}
    ids = [f"COCO_val2014_{number:012d}.jpg" for number in (11, 10, 9, 7, 42, 3310)]
    assert match_coco_ids({3: bags[3]}, ids)[3] == [[ids[5], ids[4], ids[3]], [ids[2], ids[1], ids[0]]]
    with pytest.raises(ValueError, match=r"bags are missing \(5\), such as COCO image 1"):
        match_coco_ids(bags, ids)


# --- ImageCoDe ----------------------------------------------------------------------------------------------------

SETS = {
    "open-images-12_ab": {"5": "a deer", "0": "a bird"},
    "MSR-VTT-videoTestVideo_video7-shot1_0": {"9": "two girls"},
}


def imagecode(tmp_path, numbers=range(10)):
    for shade, name in enumerate(SETS):
        for number in numbers:
            picture(tmp_path / "sets" / name / f"img{number}.jpg", (20 * shade, 20 * number % 255, 0))
    return put(tmp_path / "valid_data.json", SETS), tmp_path / "sets"


def test_imagecode_rows_feed_the_metric(tmp_path):
    path, root = imagecode(tmp_path, numbers=range(3, 13))  # with other numbers: only their order matters
    found = load_imagecode(path, root)
    assert len(found.image_ids) == len(found.paths) == 20
    assert found.descriptions == ["a deer", "a bird", "two girls"]
    assert found.targets == [5, 0, 19]
    assert found.is_video == [False, False, True]
    assert [p.name for p in found.paths[:10]] == [f"img{n}.jpg" for n in range(3, 13)]
    assert found.image_ids[found.targets[2]] == "MSR-VTT-videoTestVideo_video7-shot1_0/9"
    images = np.eye(20)
    text = images[[5, 1, 19]]  # the second description retrieves its neighbour
    result = self_retrieval(text, images, targets=found.targets, sets=found.sets, ks=(1,), num_bootstrap=0)
    assert result["per_sample"]["recall_at_1"].tolist() == [1, 0, 1]


def test_imagecode_sets_need_ten_images_below_their_folder(tmp_path):
    path, root = imagecode(tmp_path, numbers=range(9))
    with pytest.raises(ValueError, match="holds 9 images"):
        load_imagecode(path, root)
    outside = put(tmp_path / "out.json", {"../sets": {"1": "b"}})
    with pytest.raises(ValueError, match="not a valid name of a set"):
        load_imagecode(outside, root)
    # Complete, but for an image that leads elsewhere.
    for name in SETS:
        picture(tmp_path / "elsewhere.jpg")
        (root / name / "img9.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    with pytest.raises(ValueError, match="not below image_root"):
        load_imagecode(path, root)


# --- the hard pool ------------------------------------------------------------------------------------------------

NAMES = ["val2014/COCO_val2014_000000391895.jpg", "COCO_val2014_000000060623", "522418"]


def test_hard_pool_is_a_list_of_names_and_never_a_pickle(tmp_path):
    assert load_hard_pool(put(tmp_path / "a.json", NAMES)) == ["391895", "60623", "522418"]
    (tmp_path / "test_imgs_feats_3w.pkl").write_bytes(pickle.dumps({"imgids": NAMES}))
    with pytest.raises(ValueError, match="pickles are never opened"):
        load_hard_pool(tmp_path / "test_imgs_feats_3w.pkl")


# --- nocaps and Concadia ------------------------------------------------------------------------------------------


def nocaps(**changes):
    value = {
        "images": [
            {"id": i, "file_name": f"{i}.jpg", "domain": domain, "width": 8, "height": 8}
            for i, domain in enumerate(["near-domain", "in-domain", "out-domain", "out-domain"])
        ],
        # Captions neither in the order of the images nor adjacent.
        "annotations": [
            {"id": n, "image_id": i, "caption": f"caption {n} of  {i}"} for n, i in enumerate([3, 2, 1, 0, 3, 2, 1, 0])
        ],
    }
    return value | changes


def test_nocaps_by_domain(tmp_path):
    for i in range(4):
        picture(tmp_path / "images" / f"{i}.jpg", (i, 0, 0))
    put(tmp_path / "nocaps_val_4500_captions.json", nocaps())
    splits = load_caption_splits("nocaps", data_dir=tmp_path)
    ids = {name: rows["image_id"][:] for name, rows in splits.items()}
    assert list(ids.items()) == [("in_domain", ["1"]), ("near_domain", ["0"]), ("out_domain", ["2", "3"])]
    assert splits["near_domain"]["captions"][0] == ["caption 3 of 0", "caption 7 of 0"]
    assert splits["out_domain"]["domain"][:] == ["out-domain"] * 2
    assert open_image(splits["out_domain"][1]["image"]).size == (8, 8)


def concadia(number, split, **changes):
    texts = {name: {"raw": f"{name} of {number}", "tokens": [name]} for name in ("caption", "description", "context")}
    return {"article_id": "A", "filename": f"{number}.jpg", "split": split, **texts, **changes}


def test_concadia_by_split_and_text(tmp_path):
    for i in range(1, 5):
        picture(tmp_path / "images" / f"{i}.jpg")
    images = [concadia(1, "train"), concadia(2, "test"), concadia(3, "val"), concadia(4, "test")]
    put(tmp_path / "wiki_split.json", {"images": images})
    rows = load_captions("concadia", data_dir=tmp_path, split="test")
    assert rows["image_id"][:] == ["2.jpg", "4.jpg"]
    assert rows["captions"][:] == [["caption of 2"], ["caption of 4"]]
    assert rows["context"][0] == "context of 2"
    described = load_captions("concadia", data_dir=tmp_path, split="validation", caption_column="description")
    assert described["captions"][:] == [["description of 3"]]


# --- files that are refused ---------------------------------------------------------------------------------------

ONE = {"id": 0, "file_name": "0.jpg", "domain": "in-domain"}
NOTE = {"image_id": 0, "caption": "a"}
NOCAPS, CONCADIA = "nocaps_val_4500_captions.json", "wiki_split.json"


@pytest.mark.parametrize(
    ("load", "name", "content", "message"),
    [
        (load_published_bags, "3.json", "[[1, 2, 3], [4, 5", "JSON"),
        (load_published_bags, "3.json", [[1, 2, 3], [3, 4, 5]], "disjoint bags"),
        (load_imagecode, "i.json", {"a": ["b"]}, "with labels"),
        (load_imagecode, "i.json", {"a": {"10": "b"}}, "position '10'"),
        (load_hard_pool, "p.json", ["7", "COCO_val2014_000000000007"], "occurs twice"),
        ("nocaps", NOCAPS, nocaps(annotations=[{"image_id": 9, "caption": "a"}]), "does not have the form"),
        (
            "nocaps",
            NOCAPS,
            nocaps(images=[ONE | {"file_name": "../s.jpg"}], annotations=[NOTE]),
            "not below image_root",
        ),
        ("concadia", CONCADIA, {"images": [concadia(1, "half")]}, "does not have the form"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, load, name, content, message):
    path = put(tmp_path / name, content)

    def read():
        if isinstance(load, str):
            return load_captions(load, data_dir=tmp_path, split="all")
        return load(tmp_path, [3]) if load is load_published_bags else load(path)

    with pytest.raises(ValueError, match=message):
        read()
    path.unlink()
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read()


# --- TGIF and MSR-VTT ---------------------------------------------------------------------------------------------


def test_tgif_is_loaded_in_its_own_layout(tmp_path):
    splits = load_caption_splits("tgif", data_dir=make_tgif(tmp_path), num_frames=4)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 4, "validation": 1, "test": 1}
    row = splits["train"][0]
    assert (row["image_id"], row["captions"]) == ("t0", ["a 0 moves", "it is a 0"])
    assert row["image"] == {"bytes": None, "path": str(tmp_path / "gifs" / "t0.gif")}
    assert [frames_of(rows) for rows in splits.values()] == [4, 4, 4]
    assert colour_of(open_still(row)) == 2
    checked, entries = check_captions(splits)
    assert not entries
    assert checked["test"]["image_id"][:] == ["t5"]


def test_tgif_without_splits_and_invalid_tables(tmp_path, caplog):
    folder = make_tgif(tmp_path, 10)
    (folder / "splits" / "val.txt").unlink()
    assert len(load_caption_splits("tgif", data_dir=folder, num_frames=2, split_fractions=ALL)) == 2
    assert "videos that are in no split are skipped: 1" in caplog.text
    with pytest.raises(ValueError, match="num_frames"):
        load_caption_splits("tgif", data_dir=folder)
    (folder / "tgif-v1.0.tsv").write_text("a.gif\ta cat\n\ta dog\n")
    with pytest.raises(ValueError, match="Line 2"):
        load_caption_splits("tgif", data_dir=folder, num_frames=2)


def test_msr_vtt_is_loaded_in_its_own_layout(tmp_path):
    (tmp_path / "videos").mkdir()
    for n in range(3):
        (tmp_path / "videos" / f"video{n}.mp4").write_bytes(film(4 + n))
    parts = enumerate(["train", "validate", "test"])
    content = {
        "videos": [{"video_id": f"video{n}", "split": split, "category": n} for n, split in parts],
        "sentences": [{"video_id": f"video{n % 3}", "caption": f"text {n}", "sen_id": n} for n in range(6)],
    }
    (tmp_path / "videodatainfo.json").write_text(json.dumps(content))
    splits = load_caption_splits("msr-vtt", data_dir=tmp_path, num_frames=3)
    assert [splits[name]["image_id"][:] for name in splits] == [["video0"], ["video1"], ["video2"]]
    assert splits["validation"][0]["captions"] == ["text 1", "text 4"]
    assert check_captions(splits)[1] == []
    # As first published: in two files, with films in subfolders.
    (tmp_path / "videodatainfo.json").unlink()
    (tmp_path / "videos" / "TestVideo").mkdir()
    (tmp_path / "videos" / "video2.mp4").rename(tmp_path / "videos" / "TestVideo" / "video2.mp4")
    for name, ids in (("train_val", ("video0", "video1")), ("test", ("video2",))):
        some = {key: [row for row in rows if row["video_id"] in ids] for key, rows in content.items()}
        put(tmp_path / f"{name}_videodatainfo.json", some)
    apart = load_caption_splits("msr-vtt", data_dir=tmp_path, num_frames=3)
    for name, rows in splits.items():
        assert (apart[name]["image_id"][:], apart[name]["captions"][:]) == (rows["image_id"][:], rows["captions"][:])
    assert check_captions(apart)[1] == []


def test_a_column_of_paths(tmp_path):
    write_gifs(tmp_path, 3)
    (tmp_path / "c.mp4").write_bytes(film(3))
    rows = [{"video": f"t{n}.gif", "caption": f"text {n}"} for n in range(3)] + [{"video": "c.mp4", "caption": "film"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = str(tmp_path / "rows.jsonl")
    ds = load_captions(name, num_frames=2, split_fractions=ALL)
    assert colours_of(sample_frames(ds[3]["image"], 3)) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"holds videos \('.*c.mp4'\). Set num_frames"):
        load_captions(name, split_fractions=ALL)


def test_bad_videos_go_to_the_quarantine(tmp_path):
    folder = make_tgif(tmp_path, 8)
    data = (folder / "gifs" / "t1.gif").read_bytes()
    (folder / "gifs" / "t1.gif").write_bytes(data[:-9])
    (folder / "gifs" / "t2.gif").write_bytes(b"GIF89a" + (4).to_bytes(2, "little") * 2 + b"\x00\x00\x00;")
    (folder / "gifs" / "t3.gif").unlink()
    checked, entries = check_captions(load_caption_splits("tgif", data_dir=folder, num_frames=2), max_bad_fraction=0.6)
    assert checked["train"]["image_id"][:] == ["t0", "t4", "t5"]
    assert {entry.reason for entry in entries} == {"video_truncated", "video_no_frames", "image_not_found"}
