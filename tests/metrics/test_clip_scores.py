import json
import math
from pathlib import Path

import numpy as np
import torch

from hf_captionrl.metrics import clip_score, ref_clip_score
from hf_captionrl.metrics.clip_scores import CLIP_SCORE_PRESETS, score_prefix
from tests.tolerances import assert_close, close

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "retrieval.json").read_text())["clipscore"]


def test_score_equals_the_authors_numbers():
    result = clip_score(VECTORS["text_unit"], VECTORS["image_unit"])
    assert_close(result["per_sample"], VECTORS["per_w2.5_clip0"], dtype="float32")
    assert result["clip_score"] == close(np.mean(VECTORS["per_w2.5_clip0"]), dtype="float32")


def test_presets_are_the_papers_conventions():
    text, image = torch.tensor([[3.0, 0.0], [0.0, -2.0]]), torch.tensor([[1.0, 1.0], [0.0, 5.0]])
    cosines = np.array([math.sqrt(0.5), -1.0])
    assert_close(clip_score(text, image)["per_sample"], 2.5 * cosines.clip(0))
    assert_close(clip_score(text, image, preset="smile")["per_sample"], 250 * cosines.clip(0))
    assert_close(clip_score(text, image, preset="ndlb")["per_sample"], 100 * cosines)
    assert_close(clip_score(text, image, scale=1.0, clamp=False)["per_sample"], cosines)
    assert CLIP_SCORE_PRESETS["smile"].prefix == CLIP_SCORE_PRESETS["hessel"].prefix == "A photo depicts "
    assert CLIP_SCORE_PRESETS["ndlb"].prefix == ""
    assert "prefix:none" in clip_score(text, image, preset="ndlb")["signature"]
    assert "prefix:A photo depicts|" in clip_score(text, image)["signature"]
    assert "prefix:none|" in clip_score(text, image, prefix="")["signature"]
    assert "prefix:none|" in ref_clip_score(text, image, [text, text], prefix=" ")["signature"]


def test_prefix_and_caption_are_separated_by_a_space():
    assert score_prefix("hessel") == score_prefix("ndlb", "A photo depicts") == "A photo depicts "
    assert [score_prefix("hessel", prefix) for prefix in ("A photo", "A photo ", "A\n", "")] == [
        "A photo ", "A photo ", "A\n", ""]  # fmt: skip


def test_ref_clip_score_equals_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    text, image = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    references = [torch.randn(n, 6, generator=generator) for n in (1, 3, 2, 5)]
    expected = []
    for i in range(4):
        cosine = torch.nn.functional.cosine_similarity
        seen = 2.5 * max(float(cosine(text[i], image[i], dim=0)), 0)
        told = max(max(float(cosine(text[i], r, dim=0)) for r in references[i]), 0)
        expected.append(2 * seen * told / (seen + told) if seen + told else 0.0)
    assert_close(ref_clip_score(text, image, references)["per_sample"], expected, dtype="float32")
