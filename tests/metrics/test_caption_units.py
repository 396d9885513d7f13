"""CAPTURE equals a plain loop; the rules that read a parse, on trees written by hand and by spaCy."""

import math
from types import SimpleNamespace
from unittest import mock

import evaluate
import numpy as np
import pytest

from hf_captionrl.metrics import capture
from hf_captionrl.metrics.caption_units import units_of
from tests.tolerances import close

UNITS = {
    "own": {"objects": {("dog",), ("sofa",)}, "attributes": {("dog", "brown")}, "relations": {("dog", "on", "sofa")}},
    "human": {"objects": {("dog",), ("couch",), ("man",)}, "attributes": set(), "relations": {("dog", "on", "couch")}},
    "more": {"objects": {("dog",)}, "attributes": {("dog", "dark brown")}, "relations": set()},
    "nothing": {"objects": set(), "attributes": set(), "relations": set()},
}


def extractor(texts):
    return [UNITS[text] for text in texts]


def encoder(texts):
    """Cosines by hand: "brown dog" and "dark brown dog" 0.8, everything else 0."""
    axes = {"brown dog": [1.0, 0.0], "dark brown dog": [0.8, 0.6]}
    found = np.zeros((len(texts), 2 + len(texts)))
    for row, text in enumerate(texts):
        found[row, :2] = axes.get(text, [0, 0])
        found[row, 2 + row] = text not in axes
    return 3 * found


def test_the_module_of_evaluate_calls_the_function():
    metric = evaluate.load("caption_nlg")
    rows = {"predictions": ["own"], "references": [["human", "more"]]}
    found = metric.compute(**rows, which=["capture"], extractor=extractor, encoder=encoder)
    assert found["capture"] == capture(["own"], [["human", "more"]], extractor=extractor, encoder=encoder)["capture"]
    absent = ModuleNotFoundError("Install it with: pip install 'hf-captionrl[analysis]'")
    with mock.patch("hf_captionrl.metrics.caption_units.load_spacy", side_effect=absent):
        missing = metric.compute(**rows, which="capture")
    assert missing["capture"] is None
    assert "[analysis]" in missing["capture_reason"]


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("synonyms", [None, {"couch": ["sofa"]}])
def test_capture_equals_numbers_by_hand(soft, synonyms):
    options = {"extractor": extractor, "synonyms": synonyms, "encoder": encoder if soft else None}
    found = capture(["own", "own"], [["human", "more"], ["nothing"]], **options)
    same = 2 if synonyms else 1  # "dog", and with synonyms "sofa"
    related = 1 if synonyms else 0
    attribute = 0.8 if soft else 0
    f = {"objects": 2 * same / (2 + 3), "attributes": attribute, "relations": related}
    values = found["per_sample"]
    assert values["objects_precision"][0] == close(same / 2)
    assert values["objects_recall"][0] == close(same / 3)
    for kind, value in f.items():
        assert values[f"{kind}_f"][0] == close(value)
    assert values["capture"][0] == close((5 * f["objects"] + 5 * f["attributes"] + 2 * f["relations"]) / 12)
    # References without a unit: nothing that is said is found, and recall is not defined.
    assert (values["objects_precision"][1], values["capture"][1]) == (0, 0)
    assert math.isnan(values["objects_recall"][1])
    assert found["objects_recall"] == close(same / 3)
    assert f"soft:{str(soft).lower()}" in found["signature"]


def test_kind_that_neither_text_has_is_left_out():
    found = capture(["own"], [["own"]], extractor=lambda texts: [UNITS["more"] for _ in texts])
    assert (found["capture"], found["relations_f"]) == (1.0, None)
    assert capture(["nothing"], [["nothing"]], extractor=extractor)["capture"] is None


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((["own"], [["own"], ["own"]]), {"extractor": extractor}, "1 captions and 2 lists"),
        ((["own"], [["own"]]), {"extractor": lambda texts: []}, "extractor"),
        ((["own"], [["more"]]), {"extractor": extractor, "encoder": lambda texts: np.zeros(3)}, "encoder"),
    ],
)
def test_bad_input(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        capture(*arguments, **options)


def tree(written):
    """A parse from lines `word lemma pos dep head`, as spaCy has it."""
    rows = [line.split() for line in written.strip().splitlines()]
    tokens = [SimpleNamespace(lemma_=lemma, pos_=pos, dep_=dep, children=[]) for _, lemma, pos, dep, _ in rows]
    place = {row[0]: number for number, row in enumerate(rows)}
    for token, row in zip(tokens, rows, strict=True):
        token.head = tokens[place[row[4]]]
        if row[0] != row[4]:
            token.head.children.append(token)
    return tokens


def test_units_of_a_parse():
    """Two small black and white dogs that are wet sit in front of the old clock tower, wearing hats."""
    tokens = tree("""
        two two NUM nummod dogs
        small small ADJ amod dogs
        black black ADJ amod dogs
        and and CCONJ cc black
        white white ADJ conj black
        dogs dog NOUN nsubj sit
        are be AUX relcl dogs
        wet wet ADJ acomp are
        sit sit VERB ROOT sit
        in in ADP prep sit
        front front NOUN pobj in
        of of ADP prep front
        old old ADJ amod tower
        clock clock NOUN compound tower
        tower tower NOUN pobj of
        wearing wear VERB acl dogs
        hats hat NOUN dobj wearing
    """)
    assert units_of(tokens) == {
        "objects": {("dog",), ("clock tower",), ("hat",)},
        "attributes": {*(("dog", word) for word in ("two", "small", "black", "white", "wet")), ("clock tower", "old")},
        "relations": {("dog", "sit in front of", "clock tower"), ("dog", "wear", "hat")},
    }


def test_units_by_spacy():
    pytest.importorskip("spacy", reason="spaCy (extra [analysis]) parses the text")
    found = capture(["a brown dog sits next to a cat"], [["A cat and a brown dog."]])
    assert (found["objects_f"], found["attributes_f"], found["relations_precision"]) == (1, 1, 0)
