"""Videos with captions in the published layouts."""

import json

import pytest

from hf_captionrl.data import check_captions, frames_of, load_caption_splits, load_captions, open_still, sample_frames
from tests.data.films import (
    colour_of,
    colours_of,
    film,
    make_tgif,
    write_gifs,
)

ALL = (1, 0, 0)


def test_tgif_is_loaded_in_its_own_layout(tmp_path):
    splits = load_caption_splits("tgif", data_dir=make_tgif(tmp_path), num_frames=4)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 4, "validation": 1, "test": 1}
    row = splits["train"][0]
    assert (row["image_id"], row["captions"]) == ("t0", ["a 0 moves", "it is a 0"])
    assert row["image"] == {"bytes": None, "path": str(tmp_path / "gifs" / "t0.gif")}
    assert [frames_of(rows) for rows in splits.values()] == [4, 4, 4]
    assert colour_of(open_still(row)) == 2
    checked, report = check_captions(splits)
    assert not report.entries
    assert checked["test"]["image_id"][:] == ["t5"]
    by_file = load_caption_splits(str(tmp_path / "tgif-v1.0.tsv"), image_root=tmp_path / "gifs", num_frames=4)
    assert by_file["validation"][0] == splits["validation"][0]


def test_tgif_without_splits_and_invalid_tables(tmp_path, caplog):
    folder = make_tgif(tmp_path, 10)
    with pytest.raises(ValueError, match=r"'tgif' holds videos\. Set num_frames"):
        load_caption_splits("tgif", data_dir=folder)
    with pytest.raises(ValueError, match="needs a folder"):
        load_caption_splits("tgif", num_frames=2)
    (folder / "splits" / "val.txt").unlink()
    assert len(load_caption_splits("tgif", data_dir=folder, num_frames=2, split_fractions=ALL)) == 2
    assert "1 videos are not in any split" in caplog.text
    for name in ("train", "test"):
        (folder / "splits" / f"{name}.txt").unlink()
    assert len(load_captions("tgif", data_dir=folder, num_frames=2)) == 8
    table = folder / "tgif-v1.0.tsv"
    table.write_text(table.read_text() + "https://other.example/t0.gif\tsomething else\n")
    with pytest.raises(ValueError, match="have the same file name"):
        load_caption_splits("tgif", data_dir=folder, num_frames=2)
    table.write_text("https://other.example/t0.gif something else\n")
    with pytest.raises(ValueError, match=r"Line 1 of .* has no tab"):
        load_caption_splits("tgif", data_dir=folder, num_frames=2)
    table.write_text("a.gif\ta cat\n\ta dog\n")
    with pytest.raises(ValueError, match=r"Line 2 of .* does not name a file"):
        load_caption_splits("tgif", data_dir=folder, num_frames=2)
    table.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no tgif\*.tsv"):
        load_caption_splits("tgif", data_dir=folder, num_frames=2)


def test_msr_vtt_is_loaded_in_its_own_layout(tmp_path):
    (tmp_path / "videos").mkdir()
    for n in range(3):
        (tmp_path / "videos" / f"video{n}.mp4").write_bytes(film(4 + n))
    content = {
        "info": {"year": "2016"},
        "videos": [
            {"video_id": f"video{n}", "split": split, "category": n}
            for n, split in enumerate(["train", "validate", "test"])
        ],
        "sentences": [{"video_id": f"video{n % 3}", "caption": f"text {n}", "sen_id": n} for n in range(6)],
    }
    (tmp_path / "videodatainfo.json").write_text(json.dumps(content))
    splits = load_caption_splits("msr-vtt", data_dir=tmp_path, num_frames=3)
    assert {name: rows["image_id"][:] for name, rows in splits.items()} == {
        "train": ["video0"],
        "validation": ["video1"],
        "test": ["video2"],
    }
    assert splits["validation"][0]["captions"] == ["text 1", "text 4"]
    assert check_captions(splits)[1].bad_rows() == 0
    # As first published: in two files, with separate folders.
    parts = {"train_val": ("TrainValVideo", (0, 1)), "test": ("TestVideo", (2,))}
    for name, (folder, numbers) in parts.items():
        (tmp_path / "two" / folder).mkdir(parents=True)
        ids = [f"video{n}" for n in numbers]
        for video in ids:
            (tmp_path / "videos" / f"{video}.mp4").rename(tmp_path / "two" / folder / f"{video}.mp4")
        some = {key: [r for r in content[key] if r["video_id"] in ids] for key in ("videos", "sentences")}
        (tmp_path / "two" / f"{name}_videodatainfo.json").write_text(json.dumps(some))
    apart = load_caption_splits("msr-vtt", data_dir=tmp_path / "two", num_frames=3)
    for name, rows in splits.items():
        assert [apart[name][key][:] for key in ("image_id", "captions")] == [
            rows[key][:] for key in ("image_id", "captions")
        ]
    assert apart["test"][0]["image"]["path"] == str(tmp_path / "two" / "TestVideo" / "video2.mp4")
    assert check_captions(apart)[1].bad_rows() == 0
    one = load_caption_splits(str(tmp_path / "two" / "test_videodatainfo.json"), num_frames=3)
    assert one["test"][:] == apart["test"][:]
    (tmp_path / "two" / "TrainValVideo" / "video2.mp4").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds TestVideo/video2.mp4 and TrainValVideo/video2.mp4"):
        load_caption_splits("msr-vtt", data_dir=tmp_path / "two", num_frames=3)
    (tmp_path / "two" / "old_videodatainfo.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"video\d is in .* and in .* as dataset_name"):
        load_caption_splits("msr-vtt", data_dir=tmp_path / "two", num_frames=3)
    twice = content | {"videos": [*content["videos"], content["videos"][0]]}
    (tmp_path / "videodatainfo.json").write_text(json.dumps(twice))
    with pytest.raises(ValueError, match=r"video0 is twice in .*videodatainfo.json"):
        load_caption_splits("msr-vtt", data_dir=tmp_path, num_frames=3)
    (tmp_path / "videodatainfo.json").write_text(json.dumps({"videos": [1]}))
    with pytest.raises(ValueError, match="no lists 'videos' and 'sentences'"):
        load_caption_splits("msr-vtt", data_dir=tmp_path, num_frames=3)


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
    with pytest.raises(ValueError, match="num_frames is -1"):
        load_captions(name, num_frames=-1)
    with pytest.raises(ValueError, match="'scenes' are images"):
        load_captions(num_frames=2)


def test_bad_videos_go_to_the_quarantine(tmp_path):
    folder = make_tgif(tmp_path, 8)
    data = (folder / "gifs" / "t1.gif").read_bytes()
    (folder / "gifs" / "t1.gif").write_bytes(data[:-9])
    (folder / "gifs" / "t2.gif").write_bytes(b"GIF89a" + (4).to_bytes(2, "little") * 2 + b"\x00\x00\x00;")
    (folder / "gifs" / "t3.gif").unlink()
    checked, report = check_captions(load_caption_splits("tgif", data_dir=folder, num_frames=2), max_bad_fraction=0.6)
    assert checked["train"]["image_id"][:] == ["t0", "t4", "t5"]
    assert report.counts() == {"video_truncated": 1, "video_no_frames": 1, "image_not_found": 1}
