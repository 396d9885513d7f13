"""Similarity to references equals pycocoevalcap's; METEOR is the real one, and other programs replace Java for errors."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge, my_lcs

from hf_captionrl.metrics import bleu, cider, cider_d, meteor_spice, rouge_l
from hf_captionrl.metrics.meteor_spice import JavaError, meteor, spice
from hf_captionrl.metrics.nlg import _common
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize
from tests.tolerances import assert_close, close

VECTORS = Path(__file__).parents[1] / "vectors"
ROWS = [json.loads(line) for line in (VECTORS / "coco_sample.jsonl").read_text().splitlines()]
REFERENCES = [row["references"] for row in ROWS]


@pytest.mark.parametrize("captioner", ["clipcap_coco", "clipcap_conceptual"])
def test_scores_equal_pycocoevalcap_on_coco(captioner, capsys):
    captions = [row[captioner] for row in ROWS]
    truth = {i: [" ".join(ptb_tokenize(r)) for r in references] for i, references in enumerate(REFERENCES)}
    ours = {i: [" ".join(ptb_tokenize(caption))] for i, caption in enumerate(captions)}
    found = bleu(captions, REFERENCES)
    corpus, sentences = Bleu(4).compute_score(truth, ours, verbose=0)
    assert_close([found[f"bleu_{n}"] for n in range(1, 5)], corpus)
    assert_close(list(found["per_sample"].values()), sentences)
    for name, metric, oracle in (("cider_d", cider_d, Cider()), ("rouge_l", rouge_l, Rouge())):
        mean, scores = oracle.compute_score(truth, ours)
        result = metric(captions, REFERENCES)
        assert result[name] == close(mean)
        assert_close(result["per_sample"], scores)


def test_given_frequencies_are_used_and_stated():
    captions = [row["clipcap_coco"] for row in ROWS]
    words = [[ptb_tokenize(r) for r in references] for references in REFERENCES]
    given_ = cider_d(captions[:10], REFERENCES[:10], frequencies=DocumentFrequencies.from_references(words))
    whole = cider_d(captions, REFERENCES)
    assert given_["cider_d"] != cider_d(captions[:10], REFERENCES[:10])["cider_d"]
    assert_close(given_["per_sample"], whole["per_sample"][:10])
    assert "df:given|documents:100" in given_["signature"]
    assert "df:corpus|documents:100" in whole["signature"]
    plain = cider(captions, REFERENCES)
    assert plain["cider"] != whole["cider_d"]
    assert plain["signature"].startswith("metric:cider|")


def test_eos_lowers_the_score_of_truncated_captions():
    references = [["a man riding a horse"], ["two dogs on a bed"], ["a red bus"]]
    captions = ["a man riding a", "two dogs on a bed", "a red bus"]
    without, with_eos = (cider_d(captions, references, eos=eos)["per_sample"][0] for eos in (False, True))
    assert with_eos < without


def test_several_captions_per_image_are_averaged():
    references = REFERENCES[:20]
    pairs = [[row["clipcap_coco"], row["clipcap_conceptual"]] for row in ROWS[:20]]
    both = cider_d(pairs, references)
    single = [cider_d([pair[k] for pair in pairs], references)["cider_d"] for k in (0, 1)]
    assert both["cider_d"] == pytest.approx(sum(single) / 2)
    assert len(rouge_l(pairs, references)["per_sample"]) == 40


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_common_subsequence_equals_the_table_of_pycocoevalcap(a, b):
    assert _common(a, b) == my_lcs(a, b)


@pytest.mark.parametrize("metric", [bleu, cider, cider_d, rouge_l])
def test_captions_without_any_word_have_a_number(metric):
    found = metric(["...", "!"], [["..."], ["?", "."]])
    assert all(0 <= value <= 1 for key, value in found.items() if key.startswith(metric.__name__))
    each = metric([".", "a cat"], [["a dog"], ["a cat"]])["per_sample"]
    assert max(values[0] for values in (each.values() if metric is bleu else [each])) < 1e-3


# Scores of pycocoevalcap's Meteor with Stanford's tokenizer: the first five captions.
METEOR = [0.285785267876605, 0.3516586468876016, 0.37091819134719917, 0.41748990699048116, 0.40275249221688064]


def test_meteor_equals_pycocoevalcap_and_its_process_is_reused():
    found = meteor([row["clipcap_coco"] for row in ROWS], REFERENCES)
    assert found["meteor"] == close(0.27072733070921595)
    assert found["per_sample"][:5] == close(METEOR)
    assert len(found["per_sample"]) == 100
    assert "meteor:1.5" in found["signature"]
    process = meteor_spice._meteor_of(os.getpid()).meteor_p
    # Punctuation alone scores 0, the separator in a caption does not split it, several captions per image are rows.
    odd = meteor([["...", "a dog ||| runs"], ["a cat"]], [["a dog runs"], ["a cat"]])["per_sample"]
    assert odd[0] == 0
    assert 0.3 < odd[1] < odd[2]
    assert meteor_spice._meteor_of(os.getpid()).meteor_p is process
    assert process.poll() is None


SPICE = """
rows = json.load(open(sys.argv[4]))
scores = []
for row in rows:
    shared = [len(set(row["test"].split()) & set(ref.split())) for ref in row["refs"]]
    f = max(shared) / len(row["test"].split())
    color = dict(f=None) if row["image_id"] else dict(f=0.5)
    scores.append(dict(image_id=row["image_id"], scores=dict(All=dict(f=f), Object=dict(f=f), Color=color)))
json.dump(scores[::-1], open(sys.argv[sys.argv.index("-out") + 1], "w"))
"""


@pytest.fixture
def java(tmp_path, monkeypatch):
    """Set the program that replaces Java; SPICE's jars seem to be there."""
    from pycocoevalcap.spice import spice as program

    folder = tmp_path / "pycocoevalcap"
    (folder / "lib").mkdir(parents=True)
    for name in ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"):
        (folder / "lib" / name).touch()
    monkeypatch.setattr(program, "__file__", str(folder / "spice.py"))
    monkeypatch.setattr(program, "get_stanford_models", lambda: None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    meteor_spice._meteor_of.cache_clear()

    def install(text):
        file = tmp_path / "bin" / "java"
        file.write_text(f"#!{sys.executable}\nimport sys, json\n{text}\n")
        file.chmod(0o755)
        return folder

    yield install
    meteor_spice._meteor_of.cache_clear()


def test_a_failed_meteor_is_ended_and_the_next_call_starts_another(java, monkeypatch):
    for text in ("sys.exit('out of memory')", "for line in sys.stdin: print('Error: what?', flush=True)"):
        java(text)
        with pytest.raises(JavaError, match=r"^not run: the Java program of METEOR failed"):
            meteor(["a dog"], [["a dog"]])
    monkeypatch.delenv("JAVA_HOME")
    assert meteor([ROWS[0]["clipcap_coco"]], REFERENCES[:1])["per_sample"] == close(METEOR[:1])


def test_spice_runs_pycocoevalcaps_program_and_reads_its_numbers(java):
    folder = java(SPICE)
    found = spice(["A dog runs.", "a cat"], [["a dog"], ["one", "a cat"]])
    assert found["per_sample"] == pytest.approx([2 / 3, 1.0])
    assert found["spice"] == pytest.approx(5 / 6)
    assert found["subsets"] == pytest.approx({"object": 5 / 6, "color": 0.5})
    java("sys.exit(1)")
    with pytest.raises(JavaError, match=r"SPICE failed .*Java 8 to 14"):
        spice(["a"], [["a"]])
    (folder / "lib" / "stanford-corenlp-3.6.0-models.jar").unlink()
    with pytest.raises(JavaError, match="get_stanford_models") as caught:
        spice(["a"], [["a"]])
    assert str(folder.parent) not in str(caught.value)  # reasons are written to tables


def test_missing_java_is_named(monkeypatch):
    monkeypatch.setattr(meteor_spice.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JavaError, match=r"hf-captionrl\[java\]"):
        meteor(["a"], [["a"]])
