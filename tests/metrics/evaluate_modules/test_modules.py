"""Modules equal the pure functions, in every way that `evaluate` can be called."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules import MODULES
from hf_captionrl.metrics.evaluate_modules.emscore import caption_tokens, token_weights
from hf_captionrl.retrieval.feature_cache import FeatureCache
from hf_captionrl.scenes import check
from hf_captionrl.utils.model_files import model_path
from tests.metrics.evaluate_modules.evaluators import SCORER
from tests.metrics.evaluate_modules.test_spaces import two_rows
from tests.tolerances import assert_close, close


def first_captions(scenes):
    return [row[0] for row in scenes["captions"]]


def agree(found, expected, leave=("signature",)):
    """The module has every key of the pure function, with the same numbers as plain Python."""
    for key, value in expected.items():
        if key not in leave:
            mine = found[key]
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
    cache = FeatureCache.for_scorer(held_out_scorer, tmp_path / "cache", namespace="scenes")
    cache.put(ids, features[1])
    vectors = [row.numpy() for row in features[1]]
    calls = {
        "images": {"references": images, "scorer": SCORER},
        "arrays": {"references": [np.array(image) for image in images], "scorer": held_out_scorer},
        "bytes": {
            "references": [{"bytes": Path(p).read_bytes(), "path": None} for p in paths],
            "scorer": held_out_scorer,
        },
        "paths": {"references": paths, "scorer": held_out_scorer},
        "vectors": {"references": vectors, "text_features": features[0]},
        "tensor": {"references": features[1], "text_features": features[0]},
        "ids of a matrix": {
            "references": ids,
            "image_ids": ids,
            "image_features": features[1],
            "scorer": held_out_scorer,
        },
        "mapping": {
            "references": ids,
            "image_features": dict(zip(ids, vectors, strict=True)),
            "scorer": held_out_scorer,
        },
        "mapping of images": {
            "references": ids,
            "images": dict(zip(ids, images, strict=True)),
            "scorer": held_out_scorer,
        },
        "store": {"references": ids, "image_features": cache, "scorer": held_out_scorer},
        "whole store": {"references": ids, "image_ids": ids, "image_features": cache, "scorer": held_out_scorer},
        "rows": {"references": list(range(15)), "image_features": features[1], "scorer": held_out_scorer},
        "targets": {"targets": list(range(15)), "image_features": features[1].numpy(), "scorer": held_out_scorer},
        "left out": {"images": paths, "scorer": held_out_scorer},
        "texts of a sibling": {"references": scenes["captions"], "images": images, "scorer": held_out_scorer},
    }
    for name, arguments in calls.items():
        found = metric.compute(predictions=captions, **arguments)
        try:
            agree(found, expected)
        except AssertionError as error:
            raise AssertionError(name) from error
        assert ("clip-reward@" in found["signature"]) == ("scorer" in arguments), name
        assert (found.get("truncated_share") == 0.0) == ("scorer" in arguments), name
    found = metric.compute(predictions=features[0], references=features[1])
    agree(found, expected)
    for arguments, where in (
        ({"references": [*ids[:-1], "nobody"]}, r"references\[14\]: 'nobody' is not among"),
        ({"references": ids, "image_ids": [*ids, "nobody"]}, r"image_ids\[15\]: 'nobody' is not among"),
    ):
        with pytest.raises(ValueError, match=where):
            metric.compute(predictions=captions, image_features=cache, scorer=held_out_scorer, **arguments)


def test_self_retrieval_modes_are_those_of_the_function(evaluate, features):
    text, images = features
    metric = evaluate.load("self_retrieval")
    # Several captions per image, in another order.
    rows = [3, 0, 0, 14, 7]
    modes = [
        {"num_distractors": 9},
        {"num_distractors": 3, "protocol": "sampled", "repeats": 2, "seed": 5},
        {"bags": [[0, 3], [7, 14, 0]]},
        {"sets": [[3, 1], [0, 5], [0, 6], [14, 2], [7, 8]]},
        {"ks": [2, 3], "num_bootstrap": 0, "duplicates": "merge", "block_size": 2},
    ]
    for mode in modes:
        arguments = {"text_features": text[rows], "image_features": images, **mode}
        found = metric.compute(predictions=["a"] * 5, references=rows, **arguments)
        agree(found, metrics.self_retrieval(targets=rows, **arguments))
    blocks = metric.compute(
        predictions=["a"] * 15, text_features=text, image_features=images, num_distractors=4, protocol="blocks"
    )
    agree(blocks, metrics.self_retrieval(text, images, num_distractors=4, protocol="blocks"))
    assert "rd5-blocks" in blocks["signature"]


def test_repeated_path_is_one_image_and_equal_images_are_reported(evaluate, scenes, held_out_scorer, tmp_path):
    image, other = scenes[0]["image"], scenes[7]["image"]
    image.save(tmp_path / "a.png")
    other.save(tmp_path / "b.png")
    captions = [scenes[0]["full_caption"], scenes[0]["captions"][0], scenes[7]["full_caption"]]
    metric = evaluate.load("self_retrieval")
    a, b = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    by_path = metric.compute(predictions=captions, references=[a, a, b], scorer=held_out_scorer)
    assert (by_path["pool_size"], by_path["num_duplicate_images"]) == (2, 0)
    equal = metric.compute(predictions=captions, references=[image, image, other], scorer=held_out_scorer)
    assert (equal["pool_size"], equal["num_duplicate_images"]) == (3, 1)
    assert equal["ranks"][0] == 2, "a tie counts against the caption"
    merged = metric.compute(
        predictions=captions, references=[image, image, other], scorer=held_out_scorer, duplicates="merge"
    )
    assert merged["ranks"] == by_path["ranks"]


def test_copies_of_an_image_are_reported_despite_rounding(evaluate, scenes):
    class Noisy:
        """A scorer whose features depend on the position in the batch, like a large model on a GPU."""

        logit_scale, max_text_tokens, signature = 1.0, 10, "noisy@0"

        def text_features(self, captions):
            return torch.eye(4)[: len(captions)]

        def image_features(self, images):
            found = torch.eye(4)[: len(images)]
            return torch.nn.functional.normalize(found + 1e-6 * torch.arange(len(images))[:, None], dim=1)

        def count_truncated(self, captions):
            return 0

    first, other = scenes[0]["image"], scenes[1]["image"]
    images = [first, other, first.copy()]
    assert not torch.equal(*Noisy().image_features(images)[[0, 2]])
    found = evaluate.load("self_retrieval").compute(predictions=["a", "b", "c"], references=images, scorer=Noisy())
    assert (found["pool_size"], found["num_duplicate_images"]) == (3, 1)
    assert found["ranks"][0] == 2, "its copy is a tie, which counts against the caption"


def test_truncated_captions_are_counted(evaluate, scenes, held_out_scorer):
    long = " ".join(["a pig"] * 40)
    found = evaluate.load("self_retrieval").compute(
        predictions=[long, "a pig"], references=list(scenes["image"])[:2], scorer=held_out_scorer
    )
    assert (found["num_truncated"], found["truncated_share"]) == (1, 0.5)


def test_clip_score_is_the_function_with_prefix_and_references(evaluate, scenes, held_out_scorer, features):
    captions, images, references = first_captions(scenes), list(scenes["image"]), scenes["captions"]
    metric = evaluate.load("clip_score")
    prefix = "A photo depicts "
    text = held_out_scorer.text_features([prefix + caption for caption in captions])
    for preset in ("hessel", "smile"):
        found = metric.compute(predictions=captions, references=images, scorer=held_out_scorer, preset=preset)
        agree(found, metrics.clip_score(text, features[1], preset=preset))
        assert f"preset:{preset}" in found["signature"]
    bare = metric.compute(predictions=captions, references=images, scorer=held_out_scorer, preset="ndlb")
    agree(bare, metrics.clip_score(features[0], features[1], preset="ndlb"))
    groups = [held_out_scorer.text_features([prefix + text for text in group]) for group in references]
    expected = metrics.ref_clip_score(text, features[1], groups)
    for arguments in (
        {"references": images, "reference_captions": references},
        {"references": references, "images": images},
    ):
        found = metric.compute(predictions=captions, scorer=held_out_scorer, **arguments)
        assert found["ref_clip_score"] == close(expected["ref_clip_score"], dtype="float32")
        assert_close(found["ref_per_sample"], expected["per_sample"], dtype="float32")
    several = metric.compute(
        predictions=captions[:3], references=[4, 4, 0], images=images, scorer=held_out_scorer, prefix=""
    )
    agree(several, metrics.clip_score(features[0][:3], features[1][[4, 4, 0]]))
    with pytest.raises(ValueError, match="caption 1 belongs to image 99"):
        metric.compute(
            predictions=captions[:2], references=[0, 99], image_features=features[1], scorer=held_out_scorer
        )
    with pytest.raises(ValueError, match="preset must be one of"):
        metric.compute(predictions=captions, references=images, scorer=held_out_scorer, preset="clip")


def test_diversity_nlg_and_perplexity_are_the_functions(evaluate, scenes):
    groups, captions = scenes["captions"], first_captions(scenes)
    train = ["a pig", "a plant"]
    found = evaluate.load("caption_diversity").compute(predictions=groups, training_captions=train, min_frequency=2)
    expected = metrics.caption_diversity(groups, training_captions=train, min_frequency=2)
    agree(found, expected, leave=("signature", "per_image"))
    assert found["per_image"]["mbleu_4"] == pytest.approx(expected["per_image"]["mbleu_4"].tolist())
    flat = [caption for group in groups for caption in group]
    ids = [i for i, group in enumerate(groups) for _ in group]
    assert evaluate.load("caption_diversity").compute(predictions=flat, image_ids=ids) == evaluate.load(
        "caption_diversity"
    ).compute(predictions=groups)

    others = [group[1:] for group in groups]
    found = evaluate.load("caption_nlg").compute(predictions=captions, references=others)
    for name in ("bleu", "rouge_l", "cider", "cider_d"):
        single = getattr(metrics, name)(captions, others)
        assert found["per_sample"][name] == pytest.approx(single.pop("per_sample"), rel=1e-9)
        assert single.pop("signature") in found["signature"].split(" + ")
        for key, value in single.items():
            assert found[key] == pytest.approx(value, rel=1e-12)
    training = [group[:2] for group in groups] * 2
    found = evaluate.load("caption_nlg").compute(
        predictions=captions, references=others, which="cider_d", frequencies=training
    )
    assert "df:given|documents:30" in found["signature"]
    assert "bleu_1" not in found

    found = evaluate.load("caption_perplexity").compute(predictions=[*captions, "pig"], model="scenes:gpt2-perplexity")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_path("scenes:gpt2-perplexity")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    expected = metrics.caption_perplexity([*captions, "pig"], model, tokenizer)
    agree(found, expected, leave=("signature", "per_sample"))
    for mine, theirs in zip(found["per_sample"], expected["per_sample"], strict=True):
        assert mine is None if math.isnan(theirs) else mine == pytest.approx(theirs, rel=1e-5)
    again = evaluate.load("caption_perplexity").compute(predictions=captions, model=model, tokenizer=tokenizer)
    assert again["perplexity"] == pytest.approx(metrics.caption_perplexity(captions, model, tokenizer)["perplexity"])


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
    with pytest.raises(ValueError, match="not the name of an object"):
        metric.compute(predictions=["a dog"], references=[["a dog runs over the green meadow"]])
    with pytest.raises(ValueError, match="nothing to compare"):
        metric.compute(predictions=["a dog"])
    with pytest.raises(ValueError, match=r"references\[0\] is the string 'dog'"):
        metric.compute(predictions=["a dog"], references=["dog"])


def test_emscore_by_a_scorer(evaluate, scenes, held_out_scorer):
    captions = first_captions(scenes)[:3]
    videos = [list(scenes["image"])[i : i + 4] for i in range(3)]
    tokens, none = caption_tokens(captions, None, held_out_scorer, None, None)
    assert none is None
    for caption, rows in zip(captions, tokens, strict=True):
        # The last token is the end of text, which the scorer pools.
        own = held_out_scorer.text_features([caption])[0]
        assert_close(torch.nn.functional.normalize(rows[-1], dim=0), own)
    expected = metrics.emscore(tokens, [held_out_scorer.image_features(video) for video in videos])
    metric = evaluate.load("emscore")
    found = metric.compute(predictions=captions, references=videos, scorer=SCORER)
    for key in ("precision", "recall", "f", "fine_f", "coarse"):
        assert found[key] == close(expected[key], dtype="float32", magnitude=1)
    assert metric.compute(predictions=captions, frames=videos, scorer=held_out_scorer)["f"] == pytest.approx(
        found["f"]
    )
    weighted = metric.compute(
        predictions=captions, references=videos, scorer=held_out_scorer, idf=True, idf_captions=first_captions(scenes)
    )
    assert weighted["fine_recall"] == close(found["fine_recall"], dtype="float32")
    assert weighted["fine_precision"] != close(found["fine_precision"], dtype="float32")
    with pytest.raises(ValueError, match="there are no frames"):
        metric.compute(predictions=captions, scorer=held_out_scorer)
    with pytest.raises(ValueError, match="features of captions, not of their tokens"):
        caption_tokens(captions, None, Blind(), None, None)


class Blind:
    """A scorer without token features."""

    logit_scale, max_text_tokens, signature = 1.0, 10, "blind@0"

    def text_features(self, captions):
        return torch.eye(len(captions))

    image_features = text_features

    def count_truncated(self, captions):
        return 0


def test_token_weights_by_hand():
    # Three captions; 9 ends each, 1 begins each; 5 occurs in two, 6 and 7 in one.
    rows = [[1, 5, 9], [1, 5, 6, 9], [1, 7, 9]]
    weights = token_weights([[1, 5, 8, 9]], rows)[0]
    idf = {1: 0.0, 9: 0.0, 5: math.log(4 / 3), 6: math.log(2), 7: math.log(2)}
    assert weights == pytest.approx([0.0, idf[5], math.log(4), sum(idf.values()) / 6])


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
    groups = evaluate.load("caption_diversity")
    for row in scenes["captions"]:
        groups.add(prediction=row)
    assert groups.compute() == evaluate.load("caption_diversity").compute(predictions=scenes["captions"])
    metric.add_batch(predictions=captions[:2], references=images[:2])
    with pytest.raises(ValueError, match="references are a string each in this batch, but were an image each before"):
        metric.add_batch(predictions=captions[:2])


@pytest.mark.parametrize("name", sorted(MODULES))
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
    with pytest.raises(ValueError, match="predictions are missing"):
        metric.add_batch()


def test_combine_gives_every_module_every_argument(evaluate, scenes, held_out_scorer):
    captions, references, images = first_captions(scenes), scenes["captions"], list(scenes["image"])
    arguments = {
        "images": images,
        "scorer": held_out_scorer,
        "facts": list(scenes["facts"]),
        "model": "scenes:gpt2-perplexity",
        "image_ids": [i // 3 for i in range(15)],
        "ks": [1],
        "eos": True,
    }
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
