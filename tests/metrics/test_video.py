import json
from pathlib import Path

import numpy as np
import pytest

from hf_captionrl.metrics import emscore

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "retrieval.json").read_text())["emscore"]


def parts():
    frames = [
        np.array(f)[np.array(m) > 0] for f, m in zip(VECTORS["video_frames"], VECTORS["video_mask"], strict=True)
    ]
    tokens = [np.array(t)[np.array(m) > 0] for t, m in zip(VECTORS["text_tokens"], VECTORS["text_mask"], strict=True)]
    idf = [np.array(w)[np.array(m) > 0] for w, m in zip(VECTORS["idf"], VECTORS["text_mask"], strict=True)]
    return tokens, frames, idf


def test_scores_equal_the_authors_numbers():
    tokens, frames, idf = parts()
    found = emscore(tokens, frames, idf=idf)
    names = {
        "fine_precision": "figr_P",
        "fine_recall": "figr_R",
        "fine_f": "figr_F",
        "coarse": "cogr",
        "precision": "full_P",
        "recall": "full_R",
        "f": "full_F",
    }
    for ours, theirs in names.items():
        np.testing.assert_allclose(found["per_sample"][ours], VECTORS[theirs], atol=1e-6)
        assert found[ours] == pytest.approx(np.mean(VECTORS[theirs]), abs=1e-6)


def test_without_idf_every_token_counts_alike():
    tokens, frames, idf = parts()
    alike = emscore(tokens, frames)
    np.testing.assert_allclose(
        alike["per_sample"]["fine_precision"],
        emscore(tokens, frames, idf=[np.full(len(t), 3.0) for t in tokens])["per_sample"]["fine_precision"],
    )
    assert alike["fine_precision"] != emscore(tokens, frames, idf=idf)["fine_precision"]


def test_bad_input_names_the_place():
    tokens, frames, idf = parts()
    with pytest.raises(ValueError, match="2 captions and 1 videos"):
        emscore(tokens, frames[:1])
    with pytest.raises(ValueError, match=r"frame_features\[1\]\[0\] is zero"):
        emscore(tokens, [frames[0], frames[1] * 0])
    with pytest.raises(ValueError, match=r"idf\[0\] must hold 5 weights"):
        emscore(tokens, frames, idf=[idf[0][:2], idf[1]])
    with pytest.raises(ValueError, match=r"token_features\[0\] have 15 features"):
        emscore([tokens[0][:, :15], tokens[1]], frames)
