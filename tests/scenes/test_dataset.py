"""The embedded data set: deterministic, unique, generic in its references, true in all of them."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest

from hf_captionrl.scenes import bags, check, load_scenes, render_scene, sample_scene, vary_scene
from hf_captionrl.scenes.dataset import _kept
from hf_captionrl.scenes.render import IMAGE_SIZE, SPRITES_DIR
from hf_captionrl.scenes.world import (
    CATEGORIES,
    EMOJI_KINDS,
    NATURAL_COLOURS,
    SHAPE_KINDS,
    Facts,
    names_of,
    plural,
    preferences,
    sample_look_alikes,
)
from scripts import export_scenes


@pytest.fixture(scope="module")
def scenes():
    return load_scenes()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Nothing was made before."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    _kept.cache_clear()
    yield tmp_path / "hf_captionrl_scenes"
    _kept.cache_clear()


def facts_of(split):
    return [Facts(**f) for f in split["facts"]]


SMALL = {"num_train": 40, "num_validation": 10, "num_test": 21}


@pytest.mark.parametrize("sizes", [SMALL, {**SMALL, "num_train": 0}])
def test_made_once_and_kept_on_disk(empty_cache, monkeypatch, sizes):
    made = load_scenes(**sizes)
    [folder] = empty_cache.iterdir()
    # The version and a digest of the rules.
    assert re.fullmatch(f"2-[0-9a-f]{{12}}-emoji-captions-0-{sizes['num_train']}-10-21", folder.name)
    monkeypatch.setattr("hf_captionrl.scenes.dataset.compose_splits", None)  # nothing is made again
    again = load_scenes(**sizes)
    # What somebody does to one is not done to the next.
    again["test"].set_format("numpy")
    again.pop("train")
    assert load_scenes(**sizes).keys() == made.keys()
    _kept.cache_clear()  # as in the next process
    loaded = load_scenes(**sizes)
    assert loaded["train"].features == made["train"].features
    assert all(loaded[name].to_dict() == made[name].to_dict() for name in made)


def test_deterministic_in_the_seed(empty_cache):
    def digest(seed):
        shutil.rmtree(empty_cache, ignore_errors=True)
        _kept.cache_clear()
        small = load_scenes(seed=seed, num_train=50, num_validation=20, num_test=30)
        return [export_scenes.digest_split(split) for split in small.values()]

    assert digest(0) == digest(0)
    assert digest(0) != digest(1)


def test_no_two_scenes_share_their_facts(scenes):
    facts = [f for split in scenes.values() for f in facts_of(split)]
    assert len(set(facts)) == len(facts) == 6500
    images = list(scenes["test"]["image"])
    assert len({image.tobytes() for image in images}) == 1000
    assert {image.size for image in images} == {(IMAGE_SIZE, IMAGE_SIZE)}
    assert {name: split.num_rows for name, split in scenes.items()} == {"train": 5000, "validation": 500, "test": 1000}


def test_full_captions_are_true_and_complete(scenes):
    for row in scenes["test"].remove_columns("image"):
        result = check(row["full_caption"], row["facts"])
        assert not result.wrong
        assert not result.missed
        assert not result.unknown_words
    assert len(set(scenes["test"]["full_caption"])) == 1000
    words = [len(caption.split()) for caption in scenes["test"]["full_caption"]]
    assert 14 < np.mean(words) < 20


def test_references_are_short_and_seldom_wrong(scenes):
    words, wrong, claims = [], 0, 0
    for facts, captions in zip(scenes["train"]["facts"], scenes["train"]["captions"], strict=True):
        for caption in captions:
            result = check(caption, facts)
            assert not result.unknown_words
            wrong += len(result.wrong)
            claims += len(result.wrong) + len(result.right)
            words.append(len(caption.split()))
    assert 5 < np.mean(words) < 7
    assert 0.02 < wrong / claims < 0.04


def test_every_kind_has_a_category_a_sprite_in_the_notice_and_a_name_of_its_own():
    notice = (SPRITES_DIR / "NOTICE").read_text()
    for kind in EMOJI_KINDS:
        assert (SPRITES_DIR / f"{kind}.png").exists()
        assert f"{kind}.png" in notice
    assert sum(len(kinds) for kinds in CATEGORIES.values()) == len(EMOJI_KINDS) + len(SHAPE_KINDS)
    names = [form for kind in EMOJI_KINDS for name in names_of(kind) for form in {name, plural(name)}]
    assert len(set(names)) == len(names)  # no name of two kinds


def test_facts_follow_preferences_but_for_a_quarter_of_the_test_split(scenes):
    train = facts_of(scenes["train"])
    for name in ("background", "position"):
        usual = np.mean([getattr(f, name) == getattr(preferences(f.kind), name) for f in train])
        assert 0.6 < usual < 0.7
    partners = [f.second == preferences(f.kind).partner for f in train if f.second]
    assert 0.6 < np.mean(partners) < 0.7
    test = scenes["test"]
    in_bags = [against for against, bag in zip(test["against_preferences"], test["bag_id"], strict=True) if bag]
    assert 0.25 <= np.mean(in_bags) < 0.4
    assert np.mean(scenes["train"]["against_preferences"]) < 0.15
    for facts, against in zip(facts_of(test), test["against_preferences"], strict=True):
        wanted = preferences(facts.kind)
        differs = (facts.background, facts.position, facts.second) != tuple(wanted)
        assert against <= differs
        # Nothing is painted in its own colour or in that of the background.
        assert not facts.colour or facts.colour != NATURAL_COLOURS.get(facts.kind)
        assert facts.background not in (facts.colour, facts.second_colour)


def test_bags_are_cliques(scenes):
    """Each image of a bag differs from each other in one or two facts; smaller bags are parts of larger ones."""
    facts = facts_of(scenes["test"])
    found = {size: bags(scenes["test"]["bag_id"], size) for size in (3, 5, 7)}
    assert {size: len(rows) for size, rows in found.items()} == {3: 142, 5: 142, 7: 142}
    for rows in found[7]:
        differing = [differences(facts[a], facts[b]) for a, b in itertools.combinations(rows, 2)]
        assert {len(names) for names in differing} <= {1, 2}
        assert len(set().union(*differing)) == 2
    for size in (3, 5):
        assert all(small == large[:size] for small, large in zip(found[size], found[7], strict=True))


def differences(one, other):
    return {name for name, value in one.to_dict().items() if value != other.to_dict()[name]}


def test_an_incomplete_bag_is_not_used(scenes):
    ids = scenes["test"]["bag_id"][: 7 + 6]
    assert [len(bags(ids, size)) for size in (3, 5, 7)] == [1, 1, 1]
    for rows, size in ((ids[:6], 7), (scenes["test"]["bag_id"], 4)):
        with pytest.raises(ValueError, match=f"No bag of {size}"):
            bags(rows, size)


def test_variation_changes_one_fact():
    rng = np.random.default_rng(0)
    for scene in (sample_scene(rng) for _ in range(100)):
        assert len(differences(scene.facts, vary_scene(rng, scene).facts)) == 1


def test_pictures_differ_in_light_place_and_noise():
    scene = sample_look_alikes(np.random.default_rng(0), 2)[0]
    pictures = [np.asarray(render_scene(replace(scene, nuisance=seed))).astype(int) for seed in range(20)]
    means = [picture.mean() for picture in pictures]
    assert max(means) - min(means) > 20
    assert all((picture != pictures[0]).mean() > 0.9 for picture in pictures[1:])
    assert (np.asarray(render_scene(scene)) == np.asarray(render_scene(scene))).all()


def test_alt_text_is_another_domain():
    one, other = (load_scenes(annotators=domain, **SMALL)["train"] for domain in ("captions", "alt_text"))
    assert one["facts"][:] == other["facts"][:]
    assert all(caption.startswith("image of ") for captions in other["captions"] for caption in captions)
    for facts, captions in zip(other["facts"], other["captions"], strict=True):
        assert not any(check(caption, facts).unknown_words for caption in captions)


def test_shapes_need_no_asset(monkeypatch, empty_cache):
    monkeypatch.setattr("hf_captionrl.scenes.render.SPRITES_DIR", SPRITES_DIR / "nowhere")
    shapes = load_scenes("shapes", num_train=10, num_validation=5, num_test=15)
    for row in shapes["test"]:
        result = check(row["full_caption"], row["facts"])
        assert not result.wrong
        assert not result.missed
        assert row["facts"]["kind"] in SHAPE_KINDS


# --- The world as a data set for the Hub ---


def test_exported_data_set_is_read_by_load_dataset(tmp_path, monkeypatch):
    small = partial(load_scenes, num_train=6, num_validation=3, num_test=7)
    monkeypatch.setattr(export_scenes, "load_scenes", small)
    exported = tmp_path / "scenes"
    assert export_scenes.main(["--dataset_id", "me/scenes", "--output_dir", str(exported)]) == 0
    for name, arguments in export_scenes.CONFIGURATIONS.items():
        rows = datasets.load_dataset(str(exported), name, cache_dir=str(tmp_path / "cache"))
        made = export_scenes.load_scenes(**arguments)
        assert {split: len(rows[split]) for split in rows} == {"train": 6, "validation": 3, "test": 7}
        for split in made:
            assert rows[split].features == made[split].features
            assert export_scenes.digest_split(rows[split]) == export_scenes.digest_split(made[split])


def test_digest_changes_with_a_word_and_with_a_pixel():
    rows = load_scenes(num_train=0, num_validation=0, num_test=7)["test"]
    before = export_scenes.digest_split(rows)
    said = export_scenes.digest_split(rows.map(lambda row: {"full_caption": row["full_caption"] + " indeed"}))
    assert said["texts"] != before["texts"]
    assert said["pixels"] == before["pixels"]
    drawn = rows.map(lambda row: {"image": row["image"].point(lambda value: value ^ 1)})
    assert export_scenes.digest_split(drawn)["pixels"] != before["pixels"]


def test_committed_digests_are_those_of_the_test_split():
    """The world is frozen: whoever changes its rules gives it another version and makes the results again."""
    path = Path(__file__).parents[2] / "reproduction" / "results" / "scenes_digests.json"
    committed = json.loads(path.read_text())
    entry = next(e for e in committed["splits"] if (e["configuration"], e["split"]) == ("captions", "test"))
    assert committed["world_version"] == export_scenes.WORLD_VERSION
    assert export_scenes.digest_split(load_scenes()["test"])["texts"] == entry["texts"]
