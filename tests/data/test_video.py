"""Frames come from where the clock says, whatever the container, and what is broken says so."""

import io
import json
import pickle
import sys

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_captionrl.data import (
    CaptionDataset,
    ImageError,
    VideoError,
    cached_features,
    check_captions,
    frames_of,
    is_video,
    load_caption_splits,
    load_captions,
    open_still,
    sample_frames,
    verify_video,
    video_hash,
)
from hf_captionrl.retrieval import FeatureCache
from tests.data.films import COLOURS, SIZE, colour_of, film, gif, plain, sound
from tests.data.photos import png

ALL = (1, 0, 0)


def on_screen(durations, moment):
    """The frame on screen at a moment, by walking along the clock."""
    passed = 0
    for number, duration in enumerate(durations):
        passed += duration
        if moment < passed:
            return number
    return len(durations) - 1


def middles(durations, number):
    total = sum(durations)
    return [on_screen(durations, total * (2 * i + 1) / (2 * number)) for i in range(number)]


def colours_of(frames):
    return [colour_of(frame) for frame in frames]


def animation(kind, durations):
    frames = [plain(COLOURS[k]) for k in range(len(durations))]
    buffer = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=durations, loop=0, **options)
    return buffer.getvalue()


# --- which frames ---


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 20])
def test_frames_are_taken_evenly_over_time_not_over_frames(kind, number):
    durations = [100, 700, 40, 40, 400, 120]
    frames = sample_frames(animation(kind, durations), number)
    assert len(frames) == number
    assert colours_of(frames) == middles(durations, number)
    assert {(frame.mode, frame.size) for frame in frames} == {("RGB", SIZE)}


def test_ends_are_first_and_last():
    data = gif([plain(c) for c in COLOURS], [100] * 7)
    assert colours_of(sample_frames(data, 2, how="ends")) == [0, 6]
    assert colours_of(sample_frames(data, 4, how="ends")) == [0, 2, 4, 6]
    assert colours_of(sample_frames(data, 1, how="ends")) == [0]
    assert colours_of(sample_frames(data, 7, how="ends")) == list(range(7))


def test_all_frames_of_an_even_video_and_repeats_beyond():
    data = gif([plain(c) for c in COLOURS[:3]], [50] * 3)
    assert colours_of(sample_frames(data, 3)) == [0, 1, 2]
    assert colours_of(sample_frames(data, 6)) == [0, 0, 1, 1, 2, 2]
    assert colours_of(sample_frames(gif([plain(COLOURS[4])], 0), 3)) == [4, 4, 4]


def test_too_short_delays_count_as_browsers_play_them():
    data = gif([plain(c) for c in COLOURS[:3]], [10, 300, 0])
    assert colours_of(sample_frames(data, 5)) == middles([100, 300, 100], 5) == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("disposal", [0, 1, 2])
def test_partial_frames_are_drawn_over_what_stays(disposal):
    """Frames of a GIF hold what changed; the oracle draws whole pictures."""
    whole = []
    for k in range(6):
        picture = plain((40, 90, 160), (40, 30))
        picture.paste((250, 200, 20), (5 * k, 10, 5 * k + 8, 18))
        whole.append(picture)
    data = gif(whole, [60] * 6, disposal=disposal)
    with Image.open(io.BytesIO(data)) as image:
        image.seek(3)
        assert disposal == 2 or image.dispose_extent != (0, 0, 40, 30)  # it is a part
    for got, expected in zip(sample_frames(data, 6), whole, strict=True):
        assert np.abs(np.asarray(got).astype(int) - np.asarray(expected)).max() <= 2
    got = sample_frames(data, 2)
    assert [frame.tobytes() for frame in got] == [sample_frames(data, 6)[k].tobytes() for k in (1, 4)]


def test_transparency_lies_over_white():
    frames = []
    for k in range(3):
        picture = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
        picture.paste((*COLOURS[k], 255), (6 * k, 0, 6 * k + 6, 20))
        frames.append(picture)
    for k, got in enumerate(sample_frames(gif(frames, [50] * 3, disposal=2), 3)):
        assert got.getpixel((6 * k + 2, 5)) == COLOURS[k]
        assert got.getpixel((6 * ((k + 1) % 3) + 2, 5)) == (255, 255, 255)


# --- films ---

KINDS = {
    "mp4": {},
    "mov": {"kind": "mov"},
    "avi": {"kind": "avi"},
    "mkv": {"kind": "matroska"},
    "webm": {"kind": "webm", "codec": "libvpx"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_films(kind, tmp_path):
    data = film(14, **KINDS[kind])
    assert is_video(data)
    assert colours_of(sample_frames(data, 14)) == [k % 7 for k in range(14)]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(data)
    frames = sample_frames(path, 4)
    assert colours_of(frames) == [k % 7 for k in middles([1] * 14, 4)]
    assert [frame.size for frame in frames] == [(64, 48)] * 4
    assert colours_of(sample_frames({"bytes": None, "path": str(path)}, 2, how="ends")) == [0, 6]
    verify_video(path)


def test_films_with_frames_of_different_length_and_a_late_start():
    times = [5, 6, 16, 17, 18, 21]
    durations = [1, 10, 1, 1, 3, 1]  # the last as long as the film's rate says
    data = film(6, times=times)
    for number in (1, 2, 3, 6):
        assert colours_of(sample_frames(data, number)) == middles(durations, number)


def test_b_frames_come_in_the_order_of_time():
    data = film(12, codec="libx264", index_first=True)
    assert colours_of(sample_frames(data, 12)) == [k % 7 for k in range(12)]


def test_without_pyav_films_say_what_to_install_and_gifs_do_not_need_it(monkeypatch):
    data = film(3)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"video of \d+ bytes is a film.*hf-captionrl\[video\]"):
        sample_frames(data, 2)
    assert len(sample_frames(gif([plain(c) for c in COLOURS], 50), 2)) == 2


# --- what is wrong ---


def refused(value, message, reason, number=2, **options):
    with pytest.raises(ImageError, match=message) as caught:
        sample_frames(value, number, **options)
    assert caught.value.reason == reason
    assert caught.value.way_out in str(caught.value)
    return caught.value


def test_a_gif_cut_anywhere_is_truncated(tmp_path):
    rng = np.random.default_rng(0)
    frames = [Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)) for _ in range(4)]
    data = gif(frames, [50] * 4)
    path = tmp_path / "cut.gif"
    for size in [*range(20, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        refused(path, rf"cut.gif' ends after {size} bytes and \d whole frames", "video_truncated")
    error = refused(data[: len(data) // 2], "and 1 whole frames", "video_truncated")
    assert isinstance(pickle.loads(pickle.dumps(error)), VideoError)


@pytest.mark.parametrize("kind", ["mp4", "avi", "mkv", "webm"])
def test_a_film_cut_short_is_refused(kind, tmp_path):
    data = film(40, **KINDS[kind], index_first=kind == "mp4")
    path = tmp_path / f"cut.{kind}"
    path.write_bytes(data[: int(len(data) * 0.6)])
    refused(path, rf"cut.{kind}' ends early: \d+ of \d+ frames", "video_truncated")


def test_a_film_without_its_index_is_refused():
    data = film(20)  # the index of an MP4 stands at the end
    refused(data[: len(data) // 2], "does not decode beyond its header", "video_truncated")


def test_no_frames(tmp_path):
    empty = b"GIF89a" + (4).to_bytes(2, "little") * 2 + b"\x00\x00\x00;"
    refused(empty, "GIF without a frame", "video_no_frames")
    refused(sound(), "1 streams and none of pictures", "video_no_frames")


@pytest.mark.parametrize("kind", ["gif", "mp4", "mkv"])
def test_damage_is_survived_or_refused(kind):
    data = gif([plain(c) for c in COLOURS], 50) if kind == "gif" else film(10, **KINDS[kind])
    rng = np.random.default_rng(1)
    refusals = 0
    for _ in range(40):
        damaged = bytearray(data)
        for place in rng.integers(8, len(data), 12):
            damaged[place] = rng.integers(256)
        try:
            frames = sample_frames(bytes(damaged), 3, max_pixels=10**6)
            assert [frame.mode for frame in frames] == ["RGB"] * 3
        except ImageError:
            refusals += 1
    assert refusals


@pytest.mark.parametrize("number", [0, -3])
def test_at_least_one_frame(number):
    with pytest.raises(ValueError, match=f"num_frames is {number}"):
        sample_frames(gif([plain(c) for c in COLOURS], 50), number)
    with pytest.raises(ValueError, match="how is 'middle'"):
        sample_frames(gif([plain(c) for c in COLOURS], 50), 2, how="middle")
    with pytest.raises(ValueError, match="mode"):
        verify_video(film(2), mode="half")


def test_what_is_no_video(tmp_path):
    (tmp_path / "a.gif").write_text("<html>404</html>")
    refused(tmp_path / "a.gif", "a.gif' begins like none of", "video_unreadable")
    refused(png(0), "begins like none of", "video_unreadable")
    refused(Image.new("RGB", (4, 4)), "is a picture", "video_unreadable")
    refused(tmp_path / "none.mp4", "video '.*none.mp4' is not a file", "image_not_found")
    refused("https://a.b/c.gif", "is an address", "image_remote")
    refused(None, "there is no video", "image_missing")
    refused(b"", "0 bytes", "image_unreadable")
    refused(b"GIF89a" + bytes(range(200)), "has a block 0x07 at byte 13", "video_unreadable")


def test_frames_have_a_largest_size():
    refused(gif([plain(c) for c in COLOURS], 50), "max_pixels allows 700", "image_too_large", max_pixels=700)
    refused(film(3), "64 x 48 pixels", "image_too_large", max_pixels=3000)
    assert len(sample_frames(film(3), 1, max_pixels=3072)) == 1


def test_is_video(tmp_path):
    assert is_video(gif([plain(COLOURS[0])], 0))
    assert is_video(animation("WEBP", [50, 60]))
    assert is_video(animation("PNG", [50, 60]))
    assert is_video("not/there.mp4")
    assert is_video("not/there.gif")
    (tmp_path / "lies.mp4").write_bytes(png(1))
    still = io.BytesIO()
    plain(COLOURS[0]).save(still, "WEBP")
    for value in (tmp_path / "lies.mp4", png(0), still.getvalue(), "a.jpg", None, 3, Image.new("RGB", (3, 3))):
        assert not is_video(value)


# --- data sets ---


def write_gifs(folder, count, first=0):
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(first, first + count):
        frames = [plain(COLOURS[(n + k) % 7]) for k in range(3)]
        (folder / f"t{n}.gif").write_bytes(gif(frames, [50, 50, 100 + 10 * n]))


def make_tgif(folder, count=6):
    """TGIF's layout: the last but one is validation, the last test; two captions for the first."""
    write_gifs(folder / "gifs", count)
    address = [f"https://media.example/{n:x}/t{n}.gif" for n in range(count)]
    rows = [f"{address[n]}\ta {n} moves" for n in range(count)] + [f"{address[0]}\tit is a 0"]
    (folder / "tgif-v1.0.tsv").write_text("\n".join(rows) + "\n")
    (folder / "splits").mkdir()
    parts = {"train": address[:-2], "val": address[-2:-1], "test": address[-1:]}
    for name, lines in parts.items():
        (folder / "splits" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_tgif(tmp_path):
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


def test_tgif_without_splits_and_what_is_wrong_with_it(tmp_path, caplog):
    folder = make_tgif(tmp_path, 10)
    with pytest.raises(ValueError, match=r"'tgif' holds videos\. Set num_frames"):
        load_caption_splits("tgif", data_dir=folder)
    with pytest.raises(ValueError, match="needs a folder"):
        load_caption_splits("tgif", num_frames=2)
    (folder / "splits" / "val.txt").unlink()
    assert len(load_caption_splits("tgif", data_dir=folder, num_frames=2, split_fractions=ALL)) == 2
    assert "1 videos are in no split" in caplog.text
    for name in ("train", "test"):
        (folder / "splits" / f"{name}.txt").unlink()
    assert len(load_captions("tgif", data_dir=folder, num_frames=2)) == 8
    table = folder / "tgif-v1.0.tsv"
    table.write_text(table.read_text() + "https://other.example/t0.gif\tsomething else\n")
    with pytest.raises(ValueError, match="have one file name"):
        load_caption_splits("tgif", data_dir=folder, num_frames=2)
    table.write_text("https://other.example/t0.gif something else\n")
    with pytest.raises(ValueError, match=r"Line 1 of .* has no tab"):
        load_caption_splits("tgif", data_dir=folder, num_frames=2)
    table.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no tgif\*.tsv"):
        load_caption_splits("tgif", data_dir=folder, num_frames=2)


def test_msr_vtt(tmp_path):
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


# --- features ---


class Encoder:
    """Mean colour of an image, at two positions, with a count of the images seen."""

    def __init__(self):
        self.seen = 0

    def __call__(self, images):
        self.seen += len(images)
        means = torch.stack([torch.tensor(np.asarray(image).reshape(-1, 3).mean(0)) for image in images]).float()
        return torch.stack([means, 255 - means], 1)  # (B, 2, 3)


def test_features_of_a_video_are_the_mean_over_its_frames(tmp_path):
    ds = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=4)
    encode = Encoder()

    def cache():
        return FeatureCache(tmp_path / "cache", model_id="m", revision="r", what="image_tower")

    features = cached_features(cache(), ds, encode, batch_size=9, progress=False)
    assert features.shape == (4, 2, 3)
    assert encode.seen == 4 * 4
    for n in range(4):
        shown = np.mean([COLOURS[(n + k) % 7] for k in middles([50, 50, 100 + 10 * n], 4)], axis=0)
        np.testing.assert_allclose(np.asarray(features[n][0]), shown, atol=2)
        np.testing.assert_allclose(np.asarray(features[n][1]), 255 - shown, atol=2)
    # Known by content and number of frames: a copy is not encoded again, another number is.
    cached_features(cache(), ds, encode, progress=False)
    assert encode.seen == 16
    other = load_captions("tgif", data_dir=tmp_path, num_frames=1)
    single = cached_features(cache(), other, encode, progress=False)
    assert encode.seen == 20
    assert not np.allclose(np.asarray(single[0]), np.asarray(features[0]))
    assert video_hash(tmp_path / "gifs" / "t0.gif") == video_hash((tmp_path / "gifs" / "t0.gif").read_bytes())
    assert video_hash(tmp_path / "gifs" / "t0.gif") != video_hash(tmp_path / "gifs" / "t1.gif")


def test_scorers_see_the_mean_at_unit_length(tmp_path):
    ds = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=3)

    def encode(images):
        return torch.nn.functional.normalize(Encoder()(images)[:, 0], dim=-1)

    cache = FeatureCache(tmp_path / "cache", model_id="m", revision="r")
    found = cached_features(cache, ds, encode, progress=False, unit_length=True).tensor()
    for n in range(4):
        mean = encode(sample_frames(ds[n]["image"], 3)).mean(0)
        assert mean.norm() < 0.999
        torch.testing.assert_close(found[n], mean / mean.norm())


def test_videos_without_features_are_refused(tmp_path):
    ds = load_captions("tgif", data_dir=make_tgif(tmp_path), num_frames=4)
    with pytest.raises(ValueError, match=r"holds videos.*cache_image_features=True"):
        CaptionDataset(ds)
    item = CaptionDataset(ds, image_features=torch.ones(4, 2, 3))[0]
    assert item["image"] is None
    assert item["image_features"].shape == (2, 3)
    mixed = datasets.concatenate_datasets([ds, load_captions("tgif", data_dir=tmp_path, num_frames=2)])
    with pytest.raises(ValueError, match="one number of frames"):
        frames_of(mixed)
