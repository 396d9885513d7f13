"""Modules refuse invalid input, with its index and the remedy."""

import numpy as np
import pytest
from PIL import Image

from tests.metrics.evaluate_modules.evaluators import SCORER


def test_misspelt_argument_is_named(evaluate):
    metric = evaluate.load("self_retrieval")
    arguments = {"predictions": ["a"], "references": [[1.0]], "text_features": [[1.0]]}
    with pytest.warns(UserWarning, match="'num_distractor' is unknown.*'num_distractors'"):
        metric.compute(**arguments, num_distractor=99)


BAD = [
    ("self_retrieval", {"predictions": "a dog"}, "predictions is one str, 'a dog'"),
    ("self_retrieval", {"predictions": ["a", 3]}, r"predictions\[1\] must be a string or a vector of floats, got 3"),
    ("self_retrieval", {"predictions": []}, "predictions is empty"),
    ("self_retrieval", {"references": [[1.0, 0.0]]}, "2 predictions and 1 references"),
    ("self_retrieval", {"predictions": ["a", " "]}, r"predictions\[1\] is empty"),
    ("self_retrieval", {"references": [[1.0, 0.0], "b.png"]}, r"references\[1\] is a string, but the rows before it"),
    ("self_retrieval", {"references": [[1.0, 0.0], [0.0, 0.0]]}, r"image_features\[1\] is zero"),
    ("self_retrieval", {"references": [[1.0, 0.0], [0.0, float("nan")]]}, r"image_features\[1\] is NaN"),
    ("self_retrieval", {"references": [[1.0, 0.0], [0.0]]}, r"image 1 has features of shape \(1,\)"),
    ("self_retrieval", {"references": ["a.png", "b.png"]}, "scorer is missing"),
    ("self_retrieval", {"references": [[], []]}, r"references\[0\] is an empty list"),
    ("clip_score", {"references": [[1.0, 0.0], []], "text_features": np.eye(2)}, r"references\[1\] is"),
    (
        "self_retrieval",
        {"references": ["a.png", "b.png"], "scorer": SCORER},
        r"references\[0\]: .*'a.png' is not a file",
    ),
    ("self_retrieval", {"references": ["x", "y"], "image_features": {"x": [1.0, 0.0]}}, r"references\[1\] is 'y'"),
    ("self_retrieval", {"references": ["x", "y"], "image_features": np.eye(2)}, "the pool has no ids"),
    ("self_retrieval", {"references": ["x", "x"], "image_ids": ["x", "x"], "image_features": np.eye(2)}, "unique"),
    ("self_retrieval", {"references": [0, 2], "image_features": np.eye(2, dtype=np.float32)}, "2"),
    ("self_retrieval", {"references": [0, 1], "targets": [0, 1], "image_features": np.eye(2)}, "Pass one of them"),
    ("self_retrieval", {"references": [0, 1]}, "there are no images"),
    ("self_retrieval", {"image_features": np.eye(2, dtype=np.float16)}, "Convert one of them"),
    ("self_retrieval", {"text_features": np.eye(3)}, "2 predictions and 3 rows of text_features"),
    ("self_retrieval", {"references": np.eye(2), "text_features": None}, "scorer is missing"),
    (
        "self_retrieval",
        {"references": np.eye(2), "text_features": [[1.0, 0.0], [1.0]]},
        r"text_features\[1\] has shape",
    ),
    (
        "self_retrieval",
        {"references": ["x", "x"], "image_ids": ["x", "z"], "image_features": {"x": [1.0, 0.0]}},
        r"image_ids\[1\] is 'z', which the mapping lacks",
    ),
    ("self_retrieval", {"references": np.eye(2), "num_distractors": -1, "protocol": "blocks"}, "at least 1, got -1"),
    ("caption_faithfulness", {"references": ["{}", "5"]}, r"facts\[0\] cannot be checked"),
    ("caption_faithfulness", {"objects": [["dog"], [3]]}, r"objects\[1\]\[0\] is 3"),
    ("caption_nlg", {"references": ["a", "b"]}, r"references\[0\] must be a list of strings.*Write \['a'\]"),
    ("caption_nlg", {"references": [["a"], "bc"]}, r"references\[1\] must be a list of strings.*Write \['bc'\]"),
    ("caption_nlg", {"references": [["a"], []]}, r"references\[1\] is empty"),
    ("caption_nlg", {}, "references are missing"),
    ("caption_nlg", {"references": [["a"], ["b"]], "which": ["blue"]}, "which must be some of"),
    ("caption_diversity", {}, "predictions are single captions"),
    ("caption_diversity", {"predictions": [["a", "b"], ["c"]]}, r"\[1\] has 1 caption"),
    ("caption_diversity", {"predictions": [["a", "b"]], "image_ids": [1]}, "lists of captions already"),
    ("caption_diversity", {"predictions": [["a", "b"], "cd"]}, r"predictions\[1\] is a string, but the rows before"),
    ("caption_perplexity", {}, "model is missing"),
    ("clip_score", {"references": [[1.0, 0.0]] * 2, "text_features": np.eye(3)}, "3 rows of text_features"),
    ("emscore", {"references": [[[1.0, 0.0]]] * 2, "token_features": [[[1.0, 0.0]]]}, "1 token_features"),
    ("emscore", {"references": [[[1.0, 0.0]], [[1.0]]], "token_features": [[[1.0, 0.0]]] * 2}, r"frame_features\[1\]"),
]


@pytest.mark.parametrize(("name", "arguments", "match"), BAD)
def test_bad_input_is_refused_with_its_index(evaluate, name, arguments, match):
    given = {"predictions": ["a", "b"], **arguments}
    if name == "self_retrieval":
        given = {"text_features": np.eye(2, dtype=np.float32)} | given
    # In memory, because after an error evaluate keeps the lock of its file, and the next call would wait a second.
    metric = evaluate.load(name, keep_in_memory=True)
    with pytest.raises(ValueError, match=match):
        metric.compute(**given)


def test_an_image_that_does_not_open_is_named(evaluate, held_out_scorer, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    metric = evaluate.load("self_retrieval")
    with pytest.raises(ValueError, match=r"images\[1\]: .*a.png.* is not in a known format"):
        metric.compute(predictions=["a", "b"], images=[tmp_path / "b.png", tmp_path / "a.png"], scorer=held_out_scorer)
    with pytest.raises(ValueError, match=r"references\[0\]: .*8 bytes"):
        metric.compute(predictions=["a"], references=[{"bytes": b"no image", "path": None}], scorer=held_out_scorer)


def test_missing_java_is_a_reason_and_not_an_error(evaluate, tmp_path):
    found = evaluate.load("caption_nlg").compute(
        predictions=["a dog"], references=[["a dog"]], which="all", java=str(tmp_path / "java")
    )
    assert found["bleu_1"] == pytest.approx(1)
    assert found["meteor"] is None
    assert found["spice"] is None
    assert found["meteor_reason"].startswith("not run: ")
    assert "is not a program" in found["spice_reason"]
    assert str(tmp_path) not in str(found)
    assert "meteor" not in found["signature"]
    none = evaluate.load("caption_nlg").compute(
        predictions=["a dog"], references=[["a dog"]], which="meteor", java=str(tmp_path / "java")
    )
    assert none["signature"].startswith("metric:caption_nlg|ran:none|")
