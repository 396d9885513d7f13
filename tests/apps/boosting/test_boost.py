"""Boosting of rows: questions, resuming, faulty rows, and the file of captions."""

import datasets
import pytest

from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.apps.boosting.boost import boost_rows, write_captions
from hf_captionrl.apps.boosting.prompts import blend_prompt, holistic_prompt, visual_prompt
from hf_captionrl.captioners.language_model_clients import BackendError, Failure, Truncated
from hf_captionrl.data import check_captions, load_captions
from hf_captionrl.data.columns import replace_column, undecoded
from tests.apps.boosting.doubles import content, facts_of, pair, scenes


def boost(rows, folder, backends, **options):
    """The finished rows and the skipped ones; each prompt is counted by the backends."""
    boosted = list(boost_rows(rows, folder, **backends, **options))
    return [row for row in boosted if row["skipped"] is None], [row for row in boosted if row["skipped"]]


def asked(backends):
    return len(backends["text"].asked) + len(backends["vision"].asked)


def test_three_captions_per_row_and_one_parquet_row(tmp_path):
    rows, backends = scenes(), pair(scenes())
    done, skipped = boost(rows, tmp_path, backends)
    write_captions(rows, tmp_path, done, images=True, embed=False)
    assert (len(done), skipped, len(backends["text"].asked), len(backends["vision"].asked)) == (12, [], 24, 12)
    path = str(tmp_path / "captions.parquet")
    loaded = datasets.load_dataset("parquet", data_files=path, cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded["image_id"][:] == rows["image_id"][:]
    assert loaded["references"][:] == rows["captions"][:]

    def by(backend, prompt):  # an oracle without the loop: the backends called by hand
        return next(iter(backend.complete([prompt])))[1]

    describer = SceneDescriber(facts_of(rows))
    for row in loaded:
        blend = by(SceneWriter(), blend_prompt(row["image_id"], row["references"]))
        visual = by(describer, visual_prompt(row["image_id"], None))
        assert (row["blend_caption"], row["visual_caption"]) == (blend, visual)
        holistic = by(SceneWriter(), holistic_prompt(row["image_id"], blend, visual))
        assert row["captions"] == [row["holistic_caption"]] == [holistic]
    # The file is a data set of captions, as training reads it.
    options = {"split": "train", "split_fractions": (1, 0, 0)}
    good, entries = check_captions(load_captions(path, **options))
    assert (len(good), len(entries)) == (12, 0)
    assert good[3]["image"].size == scenes()[3]["image"].size
    blends = load_captions(path, caption_column="blend_caption", **options)
    assert blends["captions"][0] == [good["blend_caption"][0]]


def test_images_in_the_file(tmp_path):
    photo = tmp_path / "photo.png"
    scenes()[0]["image"].save(photo)
    rows = replace_column(scenes().select([0]), "image", [{"bytes": None, "path": str(photo)}], datasets.Image())
    done, _ = boost(rows, tmp_path, pair(rows))
    expected = {(True, False): (None, str(photo)), (True, True): (photo.read_bytes(), "photo.png")}
    for (images, embed), (data, path) in expected.items():
        write_captions(rows, tmp_path, done, images=images, embed=embed)
        assert content(tmp_path / "captions.parquet")[0]["image"] == {"bytes": data, "path": path}
    write_captions(rows, tmp_path, done, images=False, embed=False)
    assert "image" not in content(tmp_path / "captions.parquet")[0]


def test_an_answer_that_is_lost_is_asked_for_again_and_no_other_one(tmp_path):
    rows = scenes()
    first = boost(rows, tmp_path, pair(rows))
    journal = tmp_path / "journal-text.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:10] + lines[11:]) + b'{"key": "torn')
    again = pair(rows)
    assert boost(rows, tmp_path, again) == first
    assert asked(again) == 1


def test_bad_answers_are_retried_and_then_skipped(tmp_path):
    rows = scenes()
    bad = rows["image_id"][2]
    for times in (3, 0):  # the next run does not ask again
        backends = pair(rows, vision=lambda prompt, text: "" if prompt.image_id == bad else text)
        done, (row,) = boost(rows, tmp_path, backends, attempts=3)
        attempts = [attempt for _, image_id, attempt in backends["vision"].asked if image_id == bad]
        assert (len(done), attempts) == (11, list(range(times)))
        assert (row["row"], row["image_id"]) == (2, bad)
        assert (row["skipped"]["stage"], row["skipped"]["reason"]) == ("visual", "answer_empty")
    more = pair(rows)
    assert len(boost(rows, tmp_path, more, attempts=4)[0]) == 12
    assert [attempt for _, _, attempt in more["vision"].asked] == [3]


def test_truncated_answer_is_retried_and_never_published(tmp_path):
    rows = scenes()
    backends = pair(rows, text=lambda prompt, text: text if prompt.attempt else Truncated(text[: len(text) // 2]))
    done, _ = boost(rows, tmp_path / "again", backends)
    assert (len(done), asked(backends)) == (12, 12 + 2 * 24)
    last = rows["image_id"][3]
    always = pair(rows, vision=lambda prompt, text: Truncated(text) if prompt.image_id == last else text)
    _, (row,) = boost(rows, tmp_path / "never", always, attempts=2)
    assert row["skipped"]["reason"] == "answer_truncated"
    # The model started another turn before the limit: the caption is complete.
    chatty = pair(rows, text=lambda prompt, text: Truncated(text + "\n\nUser : Reference"))
    boost(rows, tmp_path / "chatty", chatty)
    assert asked(chatty) == 36


def test_unreachable_backend_stops_the_run_without_loss(tmp_path):
    rows = scenes(40)
    dead = pair(rows, vision=lambda prompt, text: Failure("backend_failed", "connection refused"))
    with pytest.raises(BackendError, match="20 times in a row"):
        boost(rows, tmp_path, dead)
    assert len(dead["text"].asked) == 40
    again = pair(rows)
    assert len(boost(rows, tmp_path, again)[0]) == 40
    assert [stage for stage, *_ in again["text"].asked] == ["holistic"] * 40


def test_broken_image_is_skipped_and_asked_about_when_repaired(tmp_path):
    rows = scenes()
    images = undecoded(rows)["image"][:]
    images[7] = {"path": None, "bytes": images[7]["bytes"][:100]}
    broken, backends = replace_column(rows, "image", images, datasets.Image()), pair(rows)
    for _ in range(2):
        done, (row,) = boost(broken, tmp_path, backends)
        assert (len(done), row["row"], row["skipped"]["stage"]) == (11, 7, "visual")
        assert row["skipped"]["reason"].startswith("image_")
    assert asked(backends) == 33
    assert len(boost(rows, tmp_path, backends)[0]) == 12
    assert asked(backends) == 36
