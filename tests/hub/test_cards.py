"""Model cards: they contain the numbers of the run, their code examples run, and unfinished cards raise."""

import contextlib
import io
import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from hf_captionrl.hub import ModelCardFacts, render_model_card, write_model_card

FACTS = ModelCardFacts(
    model_id="someone/blip-smile",
    base_model="Salesforce/blip-image-captioning-base",
    family="blip",
    dataset="scenes",
    dataset_description="5,000 training, 500 validation and 1,000 test images.",
    objective="smile",
    scorer="siglip-held-out @ 1f2e (float32)",
    scorer_max_text_tokens=77,
    generation={"num_beams": 3, "max_new_tokens": 12},
    row="SMILE",
    license="bsd-3-clause",
    truncated_fraction=0.0125,
)


def make_row(name, **changes):
    row = {
        "name": name,
        "length": 11.0,
        "lexical_diversity": 0.11,
        "pool_recall_at_1": 0.2,
        "pool_recall_at_5": 0.4,
        "rd100_recall_at_1": 0.658,
        "rd100_recall_at_1_ci": [0.637, 0.679],
        "rd100_recall_at_5": 0.9,
        "clip_score": 0.75,
        "perplexity": 12.0,
        "cider_d": 1.48,
        "hallucination": 0.325,
        "fact_recall": 0.76,
    }
    return {**row, **changes}


def make_results(**changes):
    before = make_row("MLE", rd100_recall_at_1=0.528, rd100_recall_at_1_ci=None, hallucination=0.065)
    return {"rows": [before, make_row("SMILE", **changes)], "seed": 3, "config": {}, "versions": {"torch": "2.15"}}


def section(card, heading):
    return card.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_metadata_is_read_back_by_the_hub_client():
    data = ModelCard(render_model_card(make_results(), FACTS)).data
    assert data.license == "bsd-3-clause"
    assert data.base_model == "Salesforce/blip-image-captioning-base"
    assert data.pipeline_tag == "image-to-text"
    values = {result.metric_type: result for result in data.eval_results}
    row = make_row("SMILE")
    assert {key: value.metric_value for key, value in values.items()} == {
        key: value for key, value in row.items() if key != "name" and not key.endswith("_ci")
    }
    assert values["rd100_recall_at_1"].metric_args == {"interval_95": [0.637, 0.679]}
    assert values["length"].dataset_split == "test"


def test_hallucination_is_shown_with_retrieval():
    limitations = section(render_model_card(make_results(), FACTS), "Limitations")
    assert "| SMILE | 0.658 ±0.021 | 0.325 | 0.760 |" in limitations
    assert "| MLE | 0.528 | 0.065 | 0.760 |" in limitations
    assert "a share of 0.325 is wrong" in limitations


def test_card_has_all_required_parts():
    card = render_model_card(make_results(), FACTS)
    assert re.findall(r"^## (.*)$", card, re.MULTILINE) == [
        "How to use it",
        "Data",
        "Objective",
        "Results",
        "Decoding",
        "Scorer",
        "Limitations",
        "Licence",
        "Citation",
    ]
    assert "siglip-held-out @ 1f2e (float32)" in section(card, "Scorer")
    assert "at most 77 tokens" in section(card, "Scorer")
    assert "0.013" in section(card, "Scorer")
    assert "`num_beams=3`, `max_new_tokens=12`" in section(card, "Decoding")
    assert "seed 3" in section(card, "Results")
    assert "torch 2.15" in card
    assert not re.search(r"\{\{|\{%|Undefined|None\b", card)


@pytest.mark.parametrize(
    ("changes", "there", "not_there"),
    [
        ({}, ["V_D", "whole vocabulary, so"], ["lambda"]),
        ({"mle_weight": 0.01}, ["V_D", r"\lambda = 0.01"], []),
        ({"first_token": "smile"}, ["The first word, too"], ["whole vocabulary, so"]),
        ({"mle_weight": 1.0}, ["Maximum likelihood"], ["V_D", "lambda"]),
        ({"objective": "mle"}, ["Maximum likelihood"], ["V_D", "lambda"]),
        (
            {"objective": "self_retrieval", "reward": "Found by *X*."},
            ["REINFORCE", r"Found by \*X"],
            ["V_D", "lambda"],
        ),
        ({"objective": "sle", "reward": "CIDEr-D and distance."}, ["REINFORCE", "CIDEr-D and distance"], ["V_D"]),
    ],
)
def test_formula_matches_the_objective(changes, there, not_there):
    objective = section(render_model_card(make_results(), replace(FACTS, **changes)), "Objective")
    assert all(text in objective for text in there)
    assert not any(text in objective for text in not_there)


def test_missing_measurements_are_listed():
    reason = "photographs have no known truth"
    changes = dict.fromkeys(("hallucination", "fact_recall")) | {
        "hallucination_reason": reason,
        "fact_recall_reason": reason,
    }
    card = render_model_card(make_results(**changes), FACTS)
    assert f"not run: {reason}" in section(card, "Limitations")
    assert "was not measured" in section(card, "Limitations")
    assert "hallucination" not in {result.metric_type for result in ModelCard(card).data.eval_results}


def test_malicious_texts_are_escaped():
    facts = replace(
        FACTS,
        dataset_description="a | b <script>alert(1)</script> `x`\n# heading",
        prompt='"); import os #\n```\n',
        row="<b>S|M",
    )
    results = make_results()
    results["rows"][1]["name"] = "<b>S|M"
    card = render_model_card(results, facts)
    assert "<script>" not in card
    assert "\n# heading" not in card
    assert r"\<b\>S\|M" in card
    for code in re.findall(r"```python\n(.*?)\n```", card, re.DOTALL):
        compile(code, "card", "exec")
    assert card.count("```") == 6


@pytest.mark.parametrize("prompt", ["", "a picture of "])
def test_printed_code_runs(tmp_path, monkeypatch, prompt):
    """Both code blocks run in a folder with a photo and generate the same caption."""
    from tests.tiny import tiny_captioner, tiny_images

    captioner = tiny_captioner("blip", prompt=prompt)
    captioner.save_pretrained(tmp_path / "model")
    tiny_images(1)[0].save(tmp_path / "photo.jpg")
    write_model_card(tmp_path / "model", make_results(), replace(FACTS, model_id="model", prompt=prompt))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)\n```", (tmp_path / "model" / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(blocks) == 2
    said = []
    for code in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "card", "exec"), {})
        said.append(out.getvalue().strip())
    assert said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_description": "TODO: describe"}, "a placeholder"),
        ({"dataset_description": " "}, "a placeholder"),
        ({"dataset_description": "[More Information Needed]"}, "a placeholder"),
        ({"scorer": "{{ scorer }}"}, "a placeholder"),
        ({"model_id": "your-name/model"}, "a placeholder"),
        ({"base_model": "/home" + "/me/model"}, "a local path"),
        ({"dataset": "../data"}, "a local path"),
        ({"model_id": "a/b/c"}, "not a name that the Hub accepts"),
        ({"model_id": "a b"}, "not a name that the Hub accepts"),
        ({"objective": "magic"}, "objective"),
        ({"objective": "sle"}, "must describe the reward"),
        ({"mle_weight": 1.5}, "mle_weight"),
    ],
)
def test_unfinished_facts_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(FACTS, **changes)


def test_token_raises_and_is_not_printed():
    token = "hf_" + "a1B2" * 8
    with pytest.raises(ValueError, match="access token") as error:
        replace(FACTS, dataset_description=f"loaded with {token}")
    assert token not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "facts", "message"),
    [
        ({"hallucination": None}, {}, "hallucination of 'SMILE' is missing"),
        ({"cider_d": None, "cider_d_reason": "TODO"}, {}, "a placeholder"),
        ({"rd100_recall_at_1": 65.8}, {}, "fractions are in"),
        ({}, {"row": "SLE"}, "no row 'SLE'"),
        ({}, {"baseline_row": "base"}, "no row 'base'"),
        (
            {
                k: v
                for key in ("rd100", "pool")
                for k, v in ((f"{key}_recall_at_1", None), (f"{key}_recall_at_1_reason", "no"))
            },
            {},
            "no retrieval number",
        ),
    ],
)
def test_results_that_must_not_be_published_raise(tmp_path, changes, facts, message):
    with pytest.raises(ValueError, match=message):
        write_model_card(tmp_path / "model", make_results(**changes), replace(FACTS, **facts))
    assert not (tmp_path / "model").exists()


def test_row_without_a_column_raises():
    results = make_results()
    del results["rows"][1]["fact_recall"]
    with pytest.raises(ValueError, match="has no fact_recall"):
        render_model_card(results, FACTS)
