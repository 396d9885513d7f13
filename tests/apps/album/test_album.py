"""Candidates, copies, constraints and diagnosis of an album, with the embedded captioners."""

import csv

import pytest
import torch

from hf_captionrl.apps.album.album import Album, AlbumImage, describe_album, generate_candidates
from hf_captionrl.apps.album.options import AlbumSettings
from hf_captionrl.apps.album.phrases import meets_constraints
from hf_captionrl.apps.album.sources import AlbumSource, read_captions_for
from hf_captionrl.data import ImageError
from tests.apps.album.conftest import Axes, picture, rows_of
from tests.tolerances import assert_close


def test_candidates_are_beams_and_samples(captioner, images):
    ids = ["a", "b", "c"]

    def generated(rows=range(3), **changes):
        settings = AlbumSettings(num_beams=2, num_samples=3, **changes)
        return generate_candidates(captioner, images, rows, ids, settings)

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = generated(seed=1)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers"
    assert all(2 <= len(mine) <= 5 and len(set(mine)) == len(mine) for mine in first)
    assert first == generated(seed=1)
    assert first != generated(seed=2)
    # A batch does not depend on earlier ones.
    assert generated([2], seed=1) == generated([2], seed=1) != generated([2], seed=2)
    beams = captioner.generate(**captioner.encode_images(images), do_sample=False, num_beams=2, num_return_sequences=2)
    assert [mine[:2] for mine in first] == [beams.captions[2 * i : 2 * i + 2] for i in range(3)]


def test_copies_share_a_caption_and_are_not_confusions(captioner, scorer, images, tmp_path):
    images[1].save(tmp_path / "file.png")
    found = describe_album([*images, tmp_path / "file.png", images[0]], captioner, scorer, num_samples=6)
    assert [image.copy_of for image in found.images] == [None, None, None, 1, 0]
    assert found.captions[3] == found.captions[1]
    assert all(not {0, 1, 3, 4} & set(found.images[row].confused_with) & {row, 3, 4} for row in range(5))
    assert found.images[1].is_distinct
    assert found.images[3].is_distinct
    alone = describe_album(images, captioner, scorer, num_samples=6)
    assert found.captions[:3] == alone.captions, "copies do not change the choice"


def test_existing_captions_are_candidates(captioner, scorer, images):
    own = "two pigs that no model would mention"
    found = describe_album(images, captioner, scorer, captions=[own, [], own], num_beams=1, num_samples=0)
    assert [image.old for image in found.images] == [own, None, own]
    alone = describe_album(images, None, scorer, captions=[["a", "b"], ["b"], ["c d", "e"]])
    assert len(set(alone.captions)) == 3
    assert alone.captions[:2] == ["a", "b"]


def test_unreadable_images_are_listed(captioner, scorer, images, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    album = [images[0], tmp_path / "bad.png", images[1]]
    settings = {"num_beams": 1, "num_samples": 1, "max_new_tokens": 5}
    found = describe_album(album, captioner, scorer, skip_unreadable=True, **settings)
    assert "bad.png" in found.images[1].unreadable
    assert found.captions[1] == ""
    assert found.summary()["unreadable"] == 1
    with pytest.raises(ImageError, match="bad"):
        describe_album(album, captioner, scorer, **settings)
    with pytest.raises(ValueError, match="No image of the album can be read"):
        describe_album([tmp_path / "bad.png"], captioner, scorer, skip_unreadable=True)


def test_album_of_one_image_and_of_copies_only(captioner, scorer, images):
    one = describe_album(images[:1], captioner, scorer, num_beams=2, num_samples=0)
    assert (one.images[0].rank, one.images[0].margin, one.images[0].is_distinct) == (1, None, True)
    same = describe_album(images[:1] * 3, captioner, scorer, num_beams=2, num_samples=0)
    assert [image.copy_of for image in same.images] == [None, 0, 0]
    assert len(set(same.captions)) == 1
    assert same.summary()["distinct"] == 1


def test_bad_input(captioner, scorer, images):
    for settings, name in (({"shared_share": 0}, "shared_share"), ({"trigger": " "}, "trigger")):
        with pytest.raises(ValueError, match=name):
            describe_album(images, captioner, scorer, num_beams=1, **settings)
    with pytest.raises(ValueError, match="0 images"):
        describe_album([], captioner, scorer)
    with pytest.raises(ValueError, match="captions"):
        describe_album(images, None, scorer)


def test_every_image_has_a_row():
    pictures = [picture(n) for n in (0, 1, 2, 3, 4, 0)]  # the last one is a copy of the first
    texts = [["image 0", "all"], ["image 1"], ["image 2"], [], ["IMAGE 1."], ["all"]]
    album = describe_album(pictures, None, Axes(), captions=texts, prefer_existing=True, do_not_mention=["2"])
    names = ("image_id", "caption", "rank", "distinct", "confused_with", "copy_of", "meets_constraints")
    assert [tuple(row[name] for name in names) for row in album.rows()] == [
        ("0", "image 0", 1, True, [], None, True),
        ("1", "image 1", 1, False, [], None, True),
        ("2", "image 2", 1, True, [], None, False),
        ("3", "", None, False, [], None, True),
        ("4", "IMAGE 1.", 5, False, ["0", "1", "2", "3"], None, True),
        ("5", "all", 5, True, ["1", "2", "3", "4"], "0", True),
    ]
    summary = album.summary()
    assert (summary["images"], summary["captions"], summary["copies"]) == (6, 5, 1)
    # Four captions of images that are not copies: two are distinct, three have rank 1.
    assert (summary["distinct"], summary["rank_1"], summary["against_constraints"]) == (2 / 4, 3 / 4, 1)


def test_every_text_survives_a_file(tmp_path):
    texts = ["=1+1", "'=1", "''-x", "\tindented", "\rx", "-5 degrees", "'tis", 'plain, "quoted"']
    ids = ["a.png", "@b", *map(str, range(2, len(texts)))]
    images = [AlbumImage(name, text, rank=1, margin=0.123456) for name, text in zip(ids, texts, strict=True)]
    found = Album(images, 2)
    path = found.to_csv(tmp_path / "o.csv")
    with open(path, encoding="utf-8-sig", newline="") as file:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for row in csv.reader(file) for cell in row)
    assert read_captions_for(AlbumSource(ids, ids), path) == [[text] for text in texts]
    rows = rows_of(found.to_jsonl(tmp_path / "o.jsonl"))
    assert rows == found.rows()
    assert [(r["image_id"], r["caption"], r["margin"]) for r in rows] == [
        (name, text, 0.1235) for name, text in zip(ids, texts, strict=True)
    ]


def test_captions_meet_length_and_words_in_every_script(scorer, images):
    texts = [["a red pig", "a very small pig in the corner"], ["a red cow", "a cow"], ["a dog, sitting on a red sofa"]]
    settings = {"captions": texts}
    album = describe_album(images, None, scorer, **settings, do_not_mention=["Red"])
    assert album.captions[:2] == ["a very small pig in the corner", "a cow"]
    assert [image.meets_constraints for image in album.images] == [True, True, False]
    album = describe_album(images, None, scorer, **settings, max_characters=17)
    assert all(0 < len(caption) <= 17 for caption in album.captions)
    assert album.captions[2] == "a dog, sitting"
    for word, mentions, others in (
        ("猫", "一只猫坐着", "一只狗"),
        ("кот", "чёрный кот", "который"),
        ("cat", "a Cat.", "cats"),
    ):
        fits = meets_constraints([mentions, others], AlbumSettings(do_not_mention=[word]))
        assert fits.tolist() == [False, True]


PHOTOS = [
    ["a photo of a dog on a red sofa, sleeping", "a photo of a dog beside a red wall"],
    ["a photo of a dog near a small blue house, running"],
    ["a photo of a dog with a ball, barking at people"],
]


def test_constraints_and_ranks_are_those_of_the_edited_captions(scorer, images):
    settings = {"drop_shared": True, "trigger": "ohwx dog", "max_characters": 40}
    found = describe_album(images, None, scorer, captions=PHOTOS, **settings)
    assert all(text.startswith("ohwx dog") and len(text) <= 40 for text in found.captions)
    assert found.shared == {"": ("a photo of a dog",)}
    assert all(image.meets_constraints for image in found.images)
    # What is measured is what is written: the texts alone have the same ranks and margins.
    again = describe_album(images, None, scorer, captions=found.captions)
    for first, second in zip(found.images, again.images, strict=True):
        assert (first.rank, first.confused_with, first.is_distinct) == (
            second.rank,
            second.confused_with,
            second.is_distinct,
        )
        assert_close(first.margin, second.margin, dtype=torch.float32, magnitude=1)
