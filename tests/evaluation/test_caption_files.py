"""Reading and writing files of captions, and errors of broken files."""

import json

import pytest

from hf_captionrl.cli.caption import CaptionWriter
from hf_captionrl.evaluation.caption_files import read_caption_file

GOOD = '{"image_id": "a", "caption": "a dog"}\n{"image_id": 7, "captions": ["a cat", "", "x\u2028y"]}\n'


def test_reads_several_captions_numeric_ids_and_empty_captions(tmp_path):
    path = tmp_path / "mle.jsonl"
    path.write_text(GOOD + "\n", encoding="utf-8")
    file = read_caption_file(path)
    assert file.name == "mle"
    assert file.captions == {"a": ["a dog"], "7": ["a cat", "", "x\u2028y"]}
    assert list(file.aligned(["7", "a"], {"7", "a", "z"})) == [["a cat", "", "x\u2028y"], ["a dog"]]
    assert list(file.aligned(["a"], {"7", "a"})) == [["a dog"]]  # --max_images: the rest of the file is left out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "{broken}\n", "line 3, is not JSON"),
        (GOOD + '{"image_id": "b", "capt', r"the last line \(3\) is incomplete"),
        (GOOD + '["b", "a bird"]\n', "line 3, holds a list"),
        (GOOD + '{"caption": "a bird"}\n', "image_id is None"),
        (GOOD + '{"image_id": true, "caption": "a bird"}\n', "image_id is True"),
        (GOOD + '{"image_id": "b", "caption": null}\n', r"image 'b' is \[None\], not text"),
        (GOOD + '{"image_id": "b", "captions": []}\n', r"is \[\], not text"),
        (GOOD + '{"image_id": "b", "captions": "a bird"}\n', "is 'a bird', not text"),
        (GOOD + '{"image_id": "7", "caption": "again"}\n', "line 3: image '7' is already in line 2"),
        ("\n\n", "holds no captions"),
    ],
)
def test_invalid_lines_are_refused_with_their_number(tmp_path, text, said):
    path = tmp_path / "x.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_caption_file(path)


def test_captions_of_other_images_are_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(GOOD, encoding="utf-8")
    file = read_caption_file(path)
    with pytest.raises(ValueError, match=r"1 of 2 image ids are not in the data set, such as '7'"):
        file.aligned(["a", "b"], {"a", "b"})
    with pytest.raises(ValueError, match=r"2 of the data set's 4 images; 2 are missing, such as 'b', 'c'"):
        file.aligned(["a", "b", "7", "c"], {"a", "b", "7", "c"})


def test_writer_resumes_after_an_incomplete_last_line(tmp_path):
    path = tmp_path / "deep" / "x.jsonl"
    with CaptionWriter(path) as writer:
        writer.start()
        writer.append(["a", "b"], [["\ud83d half a smile"], ["ein Hündchen", "zwei"]])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"image_id": "c", "cap')
    with CaptionWriter(path) as writer:
        assert len(writer.torn) == 22
        assert set(writer.done) == {"a", "b"}
        assert path.read_bytes() != whole  # nothing is touched before start
        writer.start()
        assert path.read_bytes() == whole
        writer.append(["c"], [[""]])
    assert read_caption_file(path).captions == {"a": ["\ud83d half a smile"], "b": ["ein Hündchen", "zwei"], "c": [""]}
    assert json.loads(path.read_bytes().splitlines()[1]) == {
        "image_id": "b",
        "caption": "ein Hündchen",
        "captions": ["ein Hündchen", "zwei"],
    }


def test_writer_refuses_a_broken_line_in_the_middle(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("garbage\n" + GOOD, encoding="utf-8")
    with pytest.raises(ValueError, match="line 1, is not JSON"):
        CaptionWriter(path)
    with CaptionWriter(path, overwrite=True) as writer:
        assert not writer.done
        assert path.read_text(encoding="utf-8").startswith("garbage")
        writer.start()
    assert not path.exists()


def test_second_writer_of_a_file_is_refused(tmp_path):
    with CaptionWriter(tmp_path / "x.jsonl"), pytest.raises(ValueError, match="Another process"):
        CaptionWriter(tmp_path / "x.jsonl")
    CaptionWriter(tmp_path / "x.jsonl").close()
