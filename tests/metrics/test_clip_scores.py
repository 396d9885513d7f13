import json
import math
from pathlib import Path

import numpy as np
import torch

from hf_captionrl.metrics import clip_score, emscore, ref_clip_score
from hf_captionrl.metrics.clip_scores import CLIP_SCORE_PRESETS, emscore_matrix, score_prefix
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
    assert_close(clip_score(text, image, preset="pac_s")["per_sample"], 2 * cosines.clip(0))
    assert_close(clip_score(text, image, scale=1.0, clamp=False)["per_sample"], cosines)
    for name in ("smile", "hessel", "pac_s"):
        assert CLIP_SCORE_PRESETS[name].prefix == "A photo depicts "
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


VIDEOS = json.loads((Path(__file__).parents[1] / "vectors" / "retrieval.json").read_text())["emscore"]


def parts():
    """Tokens, frames and weights without padding."""
    kept = (("text_tokens", "text_mask"), ("video_frames", "video_mask"), ("idf", "text_mask"))
    pairs = [zip(VIDEOS[name], VIDEOS[masks], strict=True) for name, masks in kept]
    return [[np.array(rows)[np.array(mask) > 0] for rows, mask in pair] for pair in pairs]


def test_scores_equal_the_authors_numbers():
    tokens, frames, idf = parts()
    found = emscore(tokens, frames, idf=idf)
    names = {"fine_precision": "figr_P", "fine_recall": "figr_R", "fine_f": "figr_F", "coarse": "cogr"}
    names |= {"precision": "full_P", "recall": "full_R", "f": "full_F"}
    for ours, theirs in names.items():
        assert_close(found["per_sample"][ours], VIDEOS[theirs], dtype="float32")
        assert found[ours] == close(np.mean(VIDEOS[theirs]), ulps=32, dtype="float32")


def test_tokens_have_equal_weights_without_idf():
    tokens, frames, idf = parts()
    alike, threes = (emscore(tokens, frames, idf=w) for w in (None, [np.full(len(t), 3.0) for t in tokens]))
    np.testing.assert_allclose(alike["per_sample"]["fine_precision"], threes["per_sample"]["fine_precision"])
    assert alike["fine_precision"] != emscore(tokens, frames, idf=idf)["fine_precision"]


def test_the_matrix_is_the_f_of_every_caption_with_every_video():
    generator = np.random.default_rng(4)
    tokens = [generator.normal(size=(n, 6)) for n in (3, 5, 1)]
    frames = [generator.normal(size=(n, 6)) for n in (2, 4, 3)]
    found = emscore_matrix(tokens, frames)
    for i, caption in enumerate(tokens):
        for j, video in enumerate(frames):
            assert found[i, j].item() == close(emscore([caption], [video])["f"], ulps=64, magnitude=1)


def oracle(tokens, others, whole):
    """Fine precision, recall, F and the coarse cosine, by loops."""

    def cosine(a, b):
        return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))

    precision = np.mean([max(cosine(t, o) for o in others) for t in tokens])
    recall = np.mean([max(cosine(o, t) for t in tokens) for o in others])
    return np.array([precision, recall, 2 * precision * recall / (precision + recall), cosine(whole, tokens[-1])])


def test_best_reference_counts_half():
    rng = np.random.default_rng(0)
    tokens = [rng.normal(size=(n, 8)) + 1 for n in (4, 6)]
    frames = [rng.normal(size=(n, 8)) + 1 for n in (3, 2)]
    references = [[rng.normal(size=(n, 8)) + 1 for n in lengths] for lengths in ((5, 3), (2, 7, 4))]
    found = emscore(tokens, frames, reference_features=references)
    for i in range(2):
        unit = frames[i] / np.linalg.norm(frames[i], axis=1, keepdims=True)
        video = oracle(tokens[i], frames[i], unit.mean(0))
        best = np.max([oracle(tokens[i], texts, texts[-1]) for texts in references[i]], axis=0)
        precision, recall, fine, coarse = (video + best) / 2
        assert found["per_sample"]["reference_f"][i] == close((fine + coarse) / 2)
        assert found["per_sample"]["reference_precision"][i] == close((precision + coarse) / 2)
        assert found["per_sample"]["reference_fine_recall"][i] == close(recall)
        assert found["per_sample"]["f"][i] == close((video[2] + video[3]) / 2)
    alone = emscore(tokens, frames)
    assert alone["f"] == found["f"]
    assert "reference_f" not in alone
    itself = emscore(tokens, frames, reference_features=[[t] for t in tokens])
    np.testing.assert_allclose(2 * itself["reference_f"] - itself["f"], 1.0)  # a caption matches itself completely
