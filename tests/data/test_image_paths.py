"""Addresses and files: only files must be below the folder of the data."""

import json

import pytest

from hf_captionrl.data import ImageError, load_captions, open_image
from hf_captionrl.data.images import is_address
from tests.data.photos import make_folder, png


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("http://a.example/1.png", True),
        ("zip://1.png::/a.zip", True),
        ("simplecache::http://a.example/1.png", True),
        ("x://../1.png", False),  # a single letter is a drive
        ("a/b://1.png", False),
        ("../ab://1.png", False),
        ("1.png", False),
    ],
)
def test_paths_that_are_not_addresses_are_files(tmp_path, path, expected):
    assert is_address(path) is expected
    with pytest.raises(ImageError) as error:
        open_image(path)
    assert error.value.reason == ("image_remote" if expected else "image_not_found")


@pytest.mark.parametrize("name", ["x://../../../secret.png", "a/b://../../../secret.png"])
def test_a_file_that_looks_like_an_address_stays_below_the_folder(tmp_path, name):
    (tmp_path / "secret.png").write_bytes(png(0))
    folder = make_folder(tmp_path / "data", 1)
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": name, "caption": "a"}))
    with pytest.raises(ValueError, match=r"row 0 names the file .*secret.png', which is not below image_root"):
        load_captions("imagefolder", data_dir=folder)
