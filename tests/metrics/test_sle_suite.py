"""Both decoding methods of Table 4, and the points of the trade-off."""

import pytest

from hf_captionrl.metrics.suites import decoding_suite, diversity_at_cider_d, sle_suite, tradeoff_points
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize

REFERENCES = [["a red dog in the grass", "a dog sits in the grass"], ["two cats on a bed", "some cats sleep on a bed"]]
VARIED = [["a red dog", "a dog in the grass", "the animal sits"], ["two cats", "cats on a bed", ""]]
SAME = [["a dog in the grass"] * 3, ["two cats on a bed"] * 3]
COUNTS = DocumentFrequencies.from_references(
    [[ptb_tokenize(text) for text in texts] for texts in [*REFERENCES, ["a tree"], ["a bus in the street"]]]
)


def test_each_decoding_method_has_the_numbers_of_the_suite():
    found = decoding_suite({"rs": VARIED, "bs": SAME}, references=REFERENCES, frequencies=COUNTS)
    for how, captions in (("rs", VARIED), ("bs", SAME)):
        alone = sle_suite(captions, references=REFERENCES, frequencies=COUNTS)
        assert {key.removeprefix(f"{how}_"): v for key, v in found.items() if key.startswith(f"{how}_")} == alone
    assert {"cider_d", "div_1", "div_2", "mbleu_4_per_image"} <= alone.keys()
    assert found["rs_div_2"] > found["bs_div_2"]
    assert found["rs_mbleu_4_per_image"] < found["bs_mbleu_4_per_image"]
    assert found["bs_mbleu_4_per_image"] == pytest.approx(1.0)
    assert found["rs_cider_d"] < found["bs_cider_d"]
    assert found["rs_empty_captions"] == 1


def test_missing_references_are_the_reason_for_missing_cider():
    found = decoding_suite({"rs": VARIED})
    assert found["rs_cider_d"] is None
    assert found["rs_cider_d_reason"] == "no references"


def test_points_are_sorted_by_temperature():
    points = tradeoff_points({1.0: VARIED, 0.5: SAME}, references=REFERENCES, frequencies=COUNTS)
    assert [point["temperature"] for point in points] == [0.5, 1.0]
    assert points[0]["div_2"] == sle_suite(SAME)["div_2"]


def point(temperature, cider_d, div_2, mbleu=0.5):
    return {"temperature": temperature, "cider_d": cider_d, "div_2": div_2, "mbleu_4_per_image": mbleu}


def test_diversity_at_a_cider_d_is_interpolated_between_temperatures():
    points = [point(0.5, 1.4, 0.2, 0.8), point(1.0, 1.0, 0.4, 0.4), point(1.25, 0.5, 0.9, 0.1)]
    for order in (points, points[::-1]):
        assert diversity_at_cider_d(order, 1.1) == pytest.approx(
            {"temperature": 0.875, "div_2": 0.35, "mbleu_4_per_image": 0.5}
        )
        assert diversity_at_cider_d(order, 0.6)["div_2"] == pytest.approx(0.8)
        assert diversity_at_cider_d(order, 1.0) == {"temperature": 1.0, "div_2": 0.4, "mbleu_4_per_image": 0.4}
        assert diversity_at_cider_d(order, 1.4)["temperature"] == 0.5
        assert diversity_at_cider_d(order, 1.5) is None
        assert diversity_at_cider_d(order, 0.4) is None


def test_of_several_temperatures_with_a_cider_d_the_highest_counts():
    points = [point(0.5, 0.8, 0.2), point(0.75, 1.2, 0.3), point(1.0, 0.8, 0.6)]
    assert diversity_at_cider_d(points, 0.8)["temperature"] == 1.0
    assert diversity_at_cider_d(points, 1.0)["div_2"] == pytest.approx(0.45)


def test_a_single_temperature_has_its_own_cider_d_only():
    assert diversity_at_cider_d([point(1.0, 1.0, 0.4)], 1.0)["div_2"] == 0.4
    assert diversity_at_cider_d([point(1.0, 1.0, 0.4)], 0.9) is None
    assert diversity_at_cider_d([], 0.9) is None


def test_missing_captions_are_refused():
    with pytest.raises(ValueError, match="2 captions but 1 references"):
        decoding_suite({"rs": VARIED}, references=REFERENCES[:1])
