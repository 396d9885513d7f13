"""The measurement of docs/boosting.md, and the statistics of caption sources."""

import json
from pathlib import Path

import numpy as np
import pytest

from hf_captionrl.apps.boosting import source_statistics, write_source_histogram
from hf_captionrl.data import open_image
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import check
from hf_captionrl.utils.model_files import model_path
from scripts.boosting_quality import SOURCES, boosted, claim_numbers, main, to_markdown

DOCS = Path(__file__).resolve().parents[2] / "docs"


def statistics_to_markdown(result):
    """Table 9 of docs/boosting.md."""
    lines = ["| | Captions | Words/Cap | Toks/Cap | Longest, tokens | Different words |", "|:--|--:|--:|--:|--:|--:|"]
    for name in SOURCES:
        row = result["statistics"][name]
        means = [f"{row[f'mean_{unit}']:.1f} ±{row[f'std_{unit}']:.1f}" for unit in ("words", "tokens")]
        cells = [f"{row['captions']:,}", *means, str(row["max_tokens"]), str(row["vocabulary"])]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_published_table_equals_published_numbers():
    result = json.loads((DOCS / "results/boosting_quality.json").read_text())
    page = (DOCS / "boosting.md").read_text()
    assert to_markdown(result) in (DOCS / "full_tables.md").read_text()
    assert statistics_to_markdown(result) in page
    conflicts = result["conflicts_with_blend_cap"]["VisualCap"]
    found, flagged = (sum(part[key] for part in conflicts) for key in ("both", "by_words"))
    assert f"the word lists find {found}; they flag {flagged - found} others" in page
    claims = result["claims"]
    remaining = claims["holistic_wrong_over_visual_wrong"]
    assert (
        f"A share of {remaining['value']:.3f} [{remaining['interval'][0]:.3f}, {remaining['interval'][1]:.3f}]" in page
    )
    assert remaining["interval"][1] < 1
    assert claims["holistic_recall_minus_blend_recall"]["interval"][0] > 0
    assert all(gain["rd100"]["interval"][0] > 0 for gain in result["recall_at_1_gains"].values())


def test_claim_counts_equal_a_plain_loop():
    rows = boosted(3, 0.3, 30)
    numbers = claim_numbers([[text] for text in rows["visual_caption"]], rows["facts"][:])
    found = [check(text, facts) for text, facts in zip(rows["visual_caption"], rows["facts"], strict=True)]
    for name in ("right", "wrong", "recalled", "missed"):
        assert numbers[name].tolist() == [len(getattr(result, name)) for result in found]
    assert numbers["wrong"].sum() > 0


@pytest.mark.slow  # reads the whole test split
def test_a_small_measurement_runs(tmp_path):
    path = main(
        [
            "--output",
            str(tmp_path / "out.json"),
            "--seeds",
            "5",
            "--num_test",
            "120",
            "--picture",
            str(tmp_path / "l.png"),
        ]
    )
    result = json.loads(path.read_text())
    low, high = result["recall_at_1"]["HolisticCap"]["rd100"]["interval"]
    assert low <= result["recall_at_1"]["HolisticCap"]["rd100"]["value"] <= high
    assert (
        0 < result["claims"]["BlendCap"]["hallucination"]["value"] < 0.05
    )  # annotators are wrong in 3 % of their claims
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    assert result["statistics"]["references"]["captions"] == 600
    # ClipSc by a plain loop: 100 times the cosine of each caption and its image.
    rows = boosted(5, 0.15, 120)
    scorer = load_scorer(model_path("scenes:siglip-held-out"))
    images = scorer.image_features([open_image(image) for image in rows["image"]])
    texts = scorer.text_features(rows["visual_caption"][:])
    cosines = [
        float((text * image).sum() / (text.norm() * image.norm())) for text, image in zip(texts, images, strict=True)
    ]
    assert result["clip_score"]["VisualCap"]["value"] == pytest.approx(100 * sum(cosines) / 120, rel=1e-4)


def test_statistics_equal_word_counts(tmp_path):
    sources = {"a": ["a dog", "a big dog, running"], "b": ["one two three"]}
    found = source_statistics(sources, count_tokens=lambda texts: [len(text) for text in texts])
    assert found["a"]["mean_words"] == 3
    assert found["a"]["std_words"] == 1
    assert found["a"]["max_words"] == 4
    assert found["a"]["vocabulary"] == 4
    assert found["b"]["vocabulary"] == 3
    assert found["a"]["captions"] == 2
    assert found["a"]["percentiles_words"]["95"] == pytest.approx(np.percentile([2, 4], 95))
    assert found["b"]["mean_tokens"] == 13
    assert write_source_histogram(tmp_path / "x.png", sources).read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="empty"):
        source_statistics({"a": []})
