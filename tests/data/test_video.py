"""Frames are sampled by time, in every container format."""

import io
import pickle
import sys

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.data import ImageError, is_video, sample_frames, verify_video
from tests.data.films import COLOURS, KINDS, SIZE, colours_of, film, gif, middles, plain
from tests.data.photos import png


def test_frames_are_sampled_evenly_in_time():
    durations = [100, 700, 40, 40, 400, 120]
    data = gif([plain(COLOURS[k]) for k in range(6)], durations)
    for number in (1, 2, 3, 5, 8, 20):
        frames = sample_frames(data, number)
        assert colours_of(frames) == middles(durations, number)
        assert {(frame.mode, frame.size) for frame in frames} == {("RGB", SIZE)}


@pytest.mark.parametrize(
    ("durations", "expected"),
    [
        ([50] * 3, [0, 0, 1, 1, 2, 2]),
        ([0], [0, 0, 0]),
        ([10, 300, 0], [0, 1, 1, 1, 2]),  # short delays count as 100 ms, as in browsers
    ],
)
def test_frames_of_gifs(durations, expected):
    data = gif([plain(c) for c in COLOURS[: len(durations)]], durations)
    assert colours_of(sample_frames(data, len(expected))) == expected


@pytest.mark.parametrize("disposal", [1, 2])
def test_partial_frames_are_drawn_over_the_previous_ones(disposal):
    """Frames of a GIF hold only changes; the expected frames are complete."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_frames_of_every_container_are_sampled(kind, tmp_path):
    data = film(14, **KINDS[kind])
    assert is_video(data)
    assert colours_of(sample_frames(data, 14)) == [k % 7 for k in range(14)]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(data)
    frames = sample_frames(path, 4)
    assert colours_of(frames) == [k % 7 for k in middles([1] * 14, 4)]
    assert [frame.size for frame in frames] == [(64, 48)] * 4
    assert colours_of(sample_frames({"bytes": None, "path": str(path)}, 1)) == [0]
    verify_video(path)


def test_films_with_frames_of_different_length_and_a_late_start():
    times = [5, 6, 16, 17, 18, 21]
    durations = [1, 10, 1, 1, 3, 1]  # the last frame has the duration of the film's rate
    data = film(6, times=times)
    for number in (1, 2, 3, 6):
        assert colours_of(sample_frames(data, number)) == middles(durations, number)


def test_b_frames_are_in_temporal_order():
    data = film(12, codec="libx264", index_first=True)
    assert colours_of(sample_frames(data, 12)) == [k % 7 for k in range(12)]


def test_films_need_pyav_and_gifs_do_not(monkeypatch):
    data = film(3)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"video of \d+ bytes is a film.*hf-captionrl\[video\]"):
        sample_frames(data, 2)
    assert len(sample_frames(gif([plain(c) for c in COLOURS], 50), 2)) == 2


def refused(value, message, reason, number=2, **options):
    with pytest.raises(ImageError, match=message) as caught:
        sample_frames(value, number, **options)
    assert caught.value.reason == reason
    assert caught.value.remedy in str(caught.value)
    return caught.value


def test_truncated_gif_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    frames = [Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)) for _ in range(4)]
    data = gif(frames, [50] * 4)
    path = tmp_path / "cut.gif"
    for size in [*range(20, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        refused(path, rf"cut.gif' ends after {size} bytes and \d whole frames", "video_truncated")
    error = refused(data[: len(data) // 2], "and 1 whole frames", "video_truncated")
    assert pickle.loads(pickle.dumps(error)).reason == error.reason


@pytest.mark.parametrize("kind", ["mp4", "avi", "mkv"])
def test_truncated_film_is_refused(kind, tmp_path):
    data = film(40, **KINDS[kind], index_first=kind == "mp4")
    path = tmp_path / f"cut.{kind}"
    path.write_bytes(data[: int(len(data) * 0.6)])
    refused(path, rf"cut.{kind}' ends early: \d+ of \d+ frames", "video_truncated")


@pytest.mark.parametrize("kind", ["gif", "mp4", "mkv"])
def test_damaged_video_is_read_or_refused(kind):
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


def test_files_that_are_not_videos_are_refused(tmp_path):
    (tmp_path / "a.gif").write_text("<html>404</html>")
    refused(tmp_path / "a.gif", "a.gif' is not a GIF", "video_unreadable")
    refused(png(0), "is not a GIF", "video_unreadable")
    refused(Image.new("RGB", (4, 4)), "is a picture", "video_unreadable")
    refused(tmp_path / "none.mp4", "video '.*none.mp4' is not a file", "image_not_found")
    refused("https://a.b/c.gif", "is an address", "image_remote")
    refused(None, "there is no video", "image_missing")
    refused(b"", "0 bytes", "video_unreadable")
    refused(b"GIF89a" + bytes(range(200)), "has a block 0x07 at byte 13", "video_unreadable")


def test_large_frames_and_bad_arguments_are_refused():
    data = gif([plain(c) for c in COLOURS], 50)
    refused(data, "max_pixels allows 700", "image_too_large", max_pixels=700)
    refused(film(3), "64 x 48 pixels", "image_too_large", max_pixels=3000)
    assert len(sample_frames(film(3), 1, max_pixels=3072)) == 1
    with pytest.raises(ValueError, match="num_frames"):
        sample_frames(data, 0)


def test_videos_are_told_from_still_images(tmp_path):
    for value in (gif([plain(COLOURS[0])], 0), "not/there.mp4", "not/there.gif"):
        assert is_video(value)
    (tmp_path / "lies.mp4").write_bytes(png(1))
    still = io.BytesIO()
    plain(COLOURS[0]).save(still, "WEBP")
    for value in (tmp_path / "lies.mp4", png(0), still.getvalue(), "a.jpg", None, 3, Image.new("RGB", (3, 3))):
        assert not is_video(value)
