"""Modules equal the pure functions, in every way that `evaluate` can be called, and refuse invalid input."""

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules.descriptions import DESCRIPTIONS
from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model
from hf_captionrl.retrieval.feature_cache import FeatureCache
from hf_captionrl.scenes import check
from tests.metrics.evaluate_modules.conftest import SCORER
from tests.metrics.evaluate_modules.test_spaces import two_rows
from tests.tolerances import assert_close, close


def first_captions(scenes):
    return [row[0] for row in scenes["captions"]]


def agree(found, expected, leave=("signature",)):
    """The module has every key of the pure function, with the same numbers as plain Python."""
    numbers = {key: (found[key], value) for key, value in expected.items() if key not in (*leave, "per_sample")}
    if "per_sample" in expected and "per_sample" not in leave:
        (single, *_), values = expected, expected["per_sample"]
        values = values if isinstance(values, dict) else {single: values}
        assert set(found["per_sample"]) == set(values)
        numbers |= {f"{key} per sample": (found["per_sample"][key], value) for key, value in values.items()}
    for key, (mine, value) in numbers.items():
        if isinstance(value, str):
            assert mine == value, key
            continue
        assert_close(np.asarray(mine, dtype=float), value, dtype="float32", magnitude=1, msg=key, equal_nan=True)
    assert json.loads(json.dumps(found, allow_nan=False)) == found, "not plain JSON"
    assert "hf_captionrl:" in found["signature"]


def test_self_retrieval_accepts_the_pool_in_every_form(evaluate, scenes, held_out_scorer, features, tmp_path):
    captions, images, ids = first_captions(scenes), list(scenes["image"]), scenes["image_id"]
    expected = metrics.self_retrieval(*features)
    metric = evaluate.load("self_retrieval")
    paths = []
    for i, image in enumerate(images):
        image.save(tmp_path / f"{i}.png")
        paths.append(str(tmp_path / f"{i}.png"))
    cache = FeatureCache.for_scorer(held_out_scorer, tmp_path / "cache")
    cache.put(ids, features[1])
    vectors = [row.numpy() for row in features[1]]
    encoded = [{"bytes": Path(path).read_bytes(), "path": None} for path in paths]
    all_rows = list(range(15))
    calls = {
        "images": {"references": images},
        "arrays": {"references": [np.array(image) for image in images]},
        "bytes": {"references": encoded},
        "paths": {"references": paths},
        "vectors": {"references": vectors, "text_features": features[0]},
        "tensor": {"references": features[1], "text_features": features[0]},
        "ids of a matrix": {"references": ids, "image_ids": ids, "image_features": features[1]},
        "mapping": {"references": ids, "image_features": dict(zip(ids, vectors, strict=True))},
        "mapping of images": {"references": ids, "images": dict(zip(ids, images, strict=True))},
        "store": {"references": ids, "image_features": cache},
        "whole store": {"references": ids, "image_ids": ids, "image_features": cache},
        "rows": {"references": all_rows, "image_features": features[1]},
        "targets": {"targets": all_rows, "image_features": features[1].numpy()},
        "left out": {"images": paths},
        "texts of a sibling": {"references": scenes["captions"], "images": images},
    }
    for name, arguments in calls.items():
        scorer = {} if "text_features" in arguments else {"scorer": SCORER if name == "images" else held_out_scorer}
        found = metric.compute(predictions=captions, **arguments, **scorer)
        agree(found, expected)
        assert ("clip-reward@" in found["signature"]) == bool(scorer), name
        assert (found.get("truncated_share") == 0.0) == bool(scorer), name
    found = metric.compute(predictions=features[0], references=features[1])
    agree(found, expected)
    arguments = {"references": ids, "image_ids": [*ids, "missing"], "image_features": cache}
    with pytest.raises(ValueError, match="'missing' is not among"):
        metric.compute(predictions=captions, scorer=held_out_scorer, **arguments)
    long = [" ".join(["a pig"] * 40), "a pig"]
    found = metric.compute(predictions=long, references=images[:2], scorer=held_out_scorer)
    assert (found["num_truncated"], found["truncated_share"]) == (1, 0.5)


class Noisy:
    """A scorer whose features depend on the position in the batch, like a large model on a GPU; without token features."""

    logit_scale, max_text_tokens, signature = 1.0, 10, "noisy@0"

    def text_features(self, captions):
        return torch.eye(4)[: len(captions)]

    def image_features(self, images):
        found = torch.eye(4)[: len(images)]
        return torch.nn.functional.normalize(found + 1e-6 * torch.arange(len(images))[:, None], dim=1)

    def count_truncated(self, captions):
        return 0


def test_repeated_path_is_one_image_and_equal_images_are_reported_despite_rounding(evaluate, scenes, tmp_path):
    first, other = scenes[0]["image"], scenes[1]["image"]
    images = [first, other, first.copy()]
    assert not torch.equal(*Noisy().image_features(images)[[0, 2]])
    a, b = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    first.save(a)
    other.save(b)
    metric, common = evaluate.load("self_retrieval"), {"predictions": ["a", "b", "c"], "scorer": Noisy()}
    by_path = metric.compute(references=[a, b, a], **common)
    assert (by_path["pool_size"], by_path["num_duplicate_images"]) == (2, 0)
    found = metric.compute(references=images, **common)
    assert (found["pool_size"], found["num_duplicate_images"]) == (3, 1)
    assert found["ranks"][0] == 2, "its copy is a tie, which counts against the caption"
    assert metric.compute(references=images, duplicates="merge", **common)["ranks"] == by_path["ranks"]


def test_clip_score_is_the_function_with_prefix_and_references(evaluate, scenes, held_out_scorer, features):
    captions, images, references = first_captions(scenes), list(scenes["image"]), scenes["captions"]
    metric = evaluate.load("clip_score")
    prefix = "A photo depicts "
    text = held_out_scorer.text_features([prefix + caption for caption in captions])
    for preset in ("hessel", "smile", "pac_s"):
        found = metric.compute(predictions=captions, references=images, scorer=held_out_scorer, preset=preset)
        agree(found, metrics.clip_score(text, features[1], preset=preset))
        assert f"preset:{preset}" in found["signature"]
    bare = metric.compute(predictions=captions, references=images, scorer=held_out_scorer, preset="ndlb")
    agree(bare, metrics.clip_score(features[0], features[1], preset="ndlb"))
    groups = [held_out_scorer.text_features([prefix + text for text in group]) for group in references]
    expected = metrics.ref_clip_score(text, features[1], groups)
    forms = {"references": images, "reference_captions": references}, {"references": references, "images": images}
    for arguments in forms:
        found = metric.compute(predictions=captions, scorer=held_out_scorer, **arguments)
        assert found["ref_clip_score"] == close(expected["ref_clip_score"], dtype="float32")
        assert_close(found["per_sample"]["ref_clip_score"], expected["per_sample"], dtype="float32")
        assert len(found["per_sample"]["clip_score"]) == len(captions)
    found = metric.compute(predictions=captions, scorer=held_out_scorer, preset="pac_s", **arguments)
    expected = metrics.ref_clip_score(text, features[1], groups, scale=2.0)
    assert found["ref_clip_score"] == close(expected["ref_clip_score"], dtype="float32")
    rows = {"references": [4, 4, 0], "images": images, "prefix": ""}
    several = metric.compute(predictions=captions[:3], scorer=held_out_scorer, **rows)
    agree(several, metrics.clip_score(features[0][:3], features[1][[4, 4, 0]]))


def test_diversity_nlg_and_perplexity_are_the_functions(evaluate, scenes):
    groups, captions = scenes["captions"], first_captions(scenes)
    train = ["a pig", "a plant"]
    diversity, options = evaluate.load("caption_diversity"), {"training_captions": train, "min_frequency": 2}
    agree(diversity.compute(predictions=groups, **options), metrics.caption_diversity(groups, **options))
    flat = [caption for group in groups for caption in group]
    ids = [i for i, group in enumerate(groups) for _ in group]
    assert diversity.compute(predictions=flat, image_ids=ids) == diversity.compute(predictions=groups)

    others, nlg = [group[1:] for group in groups], evaluate.load("caption_nlg")
    found = nlg.compute(predictions=captions, references=others)
    for name in ("bleu", "rouge_l", "cider", "cider_d"):
        single = getattr(metrics, name)(captions, others)
        values = single.pop("per_sample")
        for key, scores in (values if isinstance(values, dict) else {name: values}).items():
            assert found["per_sample"][key] == pytest.approx(scores, rel=1e-9)
        assert single.pop("signature") in found["signature"].split(" + ")
        for key, value in single.items():
            assert found[key] == pytest.approx(value, rel=1e-12)
    training = [group[:2] for group in groups] * 2
    found = nlg.compute(predictions=captions, references=others, which="cider_d", frequencies=training)
    assert "df:given|documents:30" in found["signature"]
    assert "bleu_1" not in found

    model, tokenizer = load_language_model("scenes:gpt2-perplexity")
    expected = metrics.caption_perplexity([*captions, "pig"], model, tokenizer)
    for given in ({"model": "scenes:gpt2-perplexity"}, {"model": model, "tokenizer": tokenizer}):
        found = evaluate.load("caption_perplexity").compute(predictions=[*captions, "pig"], **given)
        agree(found, expected, leave=("signature", "per_sample"))
        for mine, theirs in zip(found["per_sample"]["perplexity"], expected["per_sample"], strict=True):
            assert mine is None if math.isnan(theirs) else mine == pytest.approx(theirs, rel=1e-5)


def test_faithfulness_accepts_objects_and_facts_in_every_argument(evaluate, scenes):
    captions, facts = first_captions(scenes), scenes["facts"]
    objects = [[row["kind"], *([row["second"]] if row["second"] else [])] for row in facts]
    metric = evaluate.load("caption_faithfulness")
    exact, chair = metrics.faithfulness(captions, facts, check), metrics.chair(captions, objects)
    by_column = metric.compute(predictions=captions, references=facts)
    agree(by_column, {key: exact[key] for key in ("hallucination", "fact_recall", "wrong_captions")})
    agree(metric.compute(predictions=captions, references=objects), {k: chair[k] for k in ("chair_i", "chair_s")})
    both = metric.compute(predictions=captions, references=scenes["captions"], objects=objects, facts=list(facts))
    assert both["hallucination"] == by_column["hallucination"]
    assert both["chair_i"] == chair["chair_i"]
    assert both["per_sample"]["wrong"] == exact["per_sample"]["wrong"]
    assert both["per_sample"]["chair_wrong"] == chair["per_sample"]["wrong"]


def test_batches_and_single_rows_add_up(evaluate, scenes, held_out_scorer):
    captions, images = first_captions(scenes), list(scenes["image"])
    whole = evaluate.load("self_retrieval").compute(predictions=captions, references=images, scorer=held_out_scorer)
    metric = evaluate.load("self_retrieval", keep_in_memory=True)
    metric.add_batch(predictions=captions[:7], references=images[:7])
    for caption, image in zip(captions[7:12], images[7:12], strict=True):
        metric.add(prediction=caption, reference=image)
    metric.add(predictions=captions[12], references=images[12])
    metric.add_batch(predictions=captions[13:], references=images[13:])
    assert metric.compute(scorer=held_out_scorer) == whole
    # The same object again, with input of another kind.
    assert metric.compute(predictions=captions, images=images, scorer=held_out_scorer) == whole
    metric.add_batch(predictions=captions[:2], references=images[:2])
    with pytest.raises(ValueError, match="references are a string each in this batch, but were an image each before"):
        metric.add_batch(predictions=captions[:2])


@pytest.mark.parametrize("name", sorted(DESCRIPTIONS))
def test_batches_give_every_module_what_compute_gives(evaluate, name):
    case = two_rows(name)
    columns = {key: case.pop(key) for key in ("predictions", "references") if key in case}
    whole = evaluate.load(name).compute(**columns, **case)
    metric = evaluate.load(name)
    for i in range(len(columns["predictions"])):
        metric.add_batch(**{key: rows[i : i + 1] for key, rows in columns.items()})
    assert metric.compute(**case) == whole
    together = evaluate.combine([evaluate.load(name)])
    together.add_batch(**columns)
    assert together.compute(**case) == whole


def test_combine_gives_every_module_every_argument(evaluate, scenes, held_out_scorer):
    captions, references, images = first_captions(scenes), scenes["captions"], list(scenes["image"])
    arguments = {"images": images, "scorer": held_out_scorer, "facts": list(scenes["facts"]), "eos": True, "ks": [1]}
    arguments |= {"model": "scenes:gpt2-perplexity", "image_ids": [i // 3 for i in range(15)]}
    names = ["caption_nlg", "caption_faithfulness", "caption_perplexity", "clip_score"]
    together = evaluate.combine([*names, "caption_diversity"])
    found = together.compute(predictions=captions, references=references, **arguments)
    for name in names:
        own = evaluate.load(name).compute(predictions=captions, references=references, **arguments)
        for key, value in own.items():
            assert value in (found.get(key), found.get(f"{name}_{key}")), (name, key)
        assert found[f"{name}_signature"] == own["signature"]
    pair = evaluate.combine(["self_retrieval", "clip_score"])
    for caption, image in zip(captions, images, strict=True):
        pair.add(prediction=caption, reference=image)
    single = evaluate.load("self_retrieval").compute(predictions=captions, references=images, scorer=held_out_scorer)
    assert pair.compute(scorer=held_out_scorer)["recall_at_1"] == single["recall_at_1"]


PATHS, EYE = ["a.png", "b.png"], np.eye(2)


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("self_retrieval", {"predictions": "a dog"}, "predictions"),
        ("self_retrieval", {"predictions": ["a", 3]}, r"predictions\[1\]"),
        ("self_retrieval", {"references": [[1.0, 0.0]]}, "1 references"),
        ("self_retrieval", {"references": [[1.0, 0.0], "b.png"]}, r"references\[1\]"),
        ("self_retrieval", {"references": [[1.0, 0.0], [0.0]]}, r"references is not a matrix"),
        ("self_retrieval", {"references": PATHS, "scorer": SCORER}, r"references\[0\]: .*'a.png' is not a file"),
        ("self_retrieval", {"references": [{"bytes": b"no image", "path": None}] * 2}, r"references\[0\]: .*8 bytes"),
        ("self_retrieval", {"references": ["x", "y"], "image_features": {"x": [1.0, 0.0]}}, r"references\[1\]"),
        ("self_retrieval", {"references": ["x", "y"], "image_features": EYE}, "image_ids"),
        ("self_retrieval", {"references": ["x"] * 2, "image_ids": ["x"] * 2, "image_features": EYE}, "image_ids"),
        ("self_retrieval", {"references": [0, 1], "targets": [0], "image_features": EYE}, "targets and references"),
        ("self_retrieval", {"references": [0, 1]}, "there are no images"),
        ("self_retrieval", {"images": ["a.png"], "image_features": EYE}, "images and image_features"),
        ("self_retrieval", {"image_ids": ["x", "z"], "image_features": {"x": [1.0, 0.0]}}, r"image_ids\[1\]"),
        ("caption_faithfulness", {"references": ["{}", "5"]}, r"facts\[0\]"),
        ("caption_faithfulness", {"references": [["a dog runs over the green meadow"], ["a"]]}, r"references\[0\]"),
        ("caption_faithfulness", {"references": ["dog", "cat"]}, r"references\[0\]"),
        ("caption_faithfulness", {}, "references, objects= or facts="),
        ("caption_nlg", {"references": [["a"], "bc"]}, r"references\[1\] must be a list of strings.*Write \['bc'\]"),
        ("caption_nlg", {"references": [["a"], ["b"]], "which": ["blue"]}, "which"),
        ("caption_diversity", {}, "image_ids"),
        ("caption_perplexity", {}, "model is missing"),
        ("clip_score", {"references": [0, 9], "image_features": EYE, "text_features": EYE}, "image 9|is 9"),
    ],
)
def test_bad_input_is_refused_with_its_index(evaluate, name, arguments, match):
    given = {"predictions": ["a", "b"], **arguments}
    if name == "self_retrieval":
        given = {"text_features": np.eye(2, dtype=np.float32)} | given
    # In memory, because after an error evaluate keeps the lock of its file, and the next call would wait a second.
    metric = evaluate.load(name, keep_in_memory=True)
    with pytest.raises(ValueError, match=match):
        metric.compute(**given)


def test_missing_java_is_a_reason_and_not_an_error(evaluate, monkeypatch):
    monkeypatch.setattr("hf_captionrl.metrics.meteor_spice.shutil.which", lambda *_, **__: None)
    metric, arguments = evaluate.load("caption_nlg"), {"predictions": ["a dog"], "references": [["a dog"]]}
    found = metric.compute(**arguments, which="all")
    assert found["bleu_1"] == pytest.approx(1)
    assert found["meteor"] is found["spice"] is None
    assert found["meteor_reason"] == found["spice_reason"]
    assert found["meteor_reason"].startswith("not run: ")
    assert "meteor" not in found["signature"]
    none = metric.compute(**arguments, which="meteor")
    assert none["signature"].startswith("metric:caption_nlg|ran:none|")


class Elsewhere(torch.Tensor):
    """A tensor that cannot be combined with plain tensors, as if it were on another device."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.cpu, torch.Tensor.numpy):
            assert function is torch.Tensor.cpu, "only what lies on the CPU becomes an array"
            return torch.Tensor.as_subclass(args[0], torch.Tensor)
        if any(type(leaf) is torch.Tensor and leaf.ndim for leaf in tree_leaves((args, kwargs))):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, kwargs or {})


def away(features):
    return features.as_subclass(Elsewhere)


@pytest.fixture
def remote(held_out_scorer, monkeypatch):
    def elsewhere(rows, made):
        return away(made(rows))

    for name in ("text_features", "image_features"):
        changed = functools.partial(elsewhere, made=getattr(held_out_scorer, name))
        monkeypatch.setattr(held_out_scorer, name, changed)
    return held_out_scorer


def test_tensors_of_two_devices_cannot_be_combined():
    with pytest.raises(RuntimeError, match="same device"):
        away(torch.eye(2)) @ torch.eye(2)
    with pytest.raises(AssertionError, match="on the CPU"):
        away(torch.eye(2)).numpy()


def test_modules_accept_features_on_any_device(evaluate, scenes, features, remote):
    captions, images, ids = first_captions(scenes), list(scenes["image"]), scenes["image_id"]
    text, pool = features
    retrieval, score = (evaluate.load(name, keep_in_memory=True) for name in ("self_retrieval", "clip_score"))
    ranks = metrics.self_retrieval(text, pool, num_bootstrap=0)["ranks"].tolist()
    vectors = [row.tolist() for row in pool]
    for given in (
        {"references": images},
        {"references": vectors},
        {"references": ids, "image_features": dict(zip(ids, pool, strict=True))},
        {"references": ids, "image_ids": ids, "image_features": away(pool)},
        {"references": images, "text_features": away(text)},
    ):
        found = retrieval.compute(predictions=captions, scorer=remote, num_bootstrap=0, **given)
        assert found["ranks"] == ranks
    expected = metrics.ref_clip_score(text, pool, text[:, None])["ref_clip_score"]
    for given in ({"reference_captions": [[caption] for caption in captions]}, {"reference_features": text[:, None]}):
        found = score.compute(predictions=captions, references=vectors, scorer=remote, prefix="", **given)
        assert found["ref_clip_score"] == close(expected, dtype="float32")
