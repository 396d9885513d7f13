"""Frames are sampled by time, in every container format."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

from hf_captionrl.data import is_video, sample_frames, verify_video
from tests.data.films import (
    COLOURS,
    KINDS,
    SIZE,
    animation,
    colours_of,
    film,
    gif,
    middles,
    plain,
)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 20])
def test_frames_are_sampled_evenly_in_time(kind, number):
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


def test_short_delays_count_as_in_browsers():
    data = gif([plain(c) for c in COLOURS[:3]], [10, 300, 0])
    assert colours_of(sample_frames(data, 5)) == middles([100, 300, 100], 5) == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("disposal", [0, 1, 2])
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


def test_transparency_of_frames_becomes_white():
    frames = []
    for k in range(3):
        picture = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
        picture.paste((*COLOURS[k], 255), (6 * k, 0, 6 * k + 6, 20))
        frames.append(picture)
    for k, got in enumerate(sample_frames(gif(frames, [50] * 3, disposal=2), 3)):
        assert got.getpixel((6 * k + 2, 5)) == COLOURS[k]
        assert got.getpixel((6 * ((k + 1) % 3) + 2, 5)) == (255, 255, 255)


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
    assert colours_of(sample_frames({"bytes": None, "path": str(path)}, 2, how="ends")) == [0, 6]
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
