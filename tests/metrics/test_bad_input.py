"""Input that would give a wrong number, or none, is refused; the error names the argument and the index."""

import numpy as np
import pytest
import torch

import hf_captionrl.metrics as m
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.clip_scores import emscore_matrix, pair_matching, score_prefix
from hf_captionrl.scenes import check
from hf_captionrl.text.cider_d import DocumentFrequencies

EYE = torch.eye(4)
ZERO = EYE * torch.tensor([1.0, 1, 0, 1])[:, None]
VIDEO = np.ones((3, 4))
NAN = float("nan")
PAIR = (["a", "b"], [["a"], ["b"]])
WITH_EOS = DocumentFrequencies.from_references([[["a"]], [["b"]]], eos=True)


def retrieve(**options):
    return m.self_retrieval(EYE, EYE, **options)


def chair(captions, objects, **options):
    return m.chair(captions, objects, **options)


NLG = [
    (*case, name)
    for name in ("bleu", "cider", "cider_d", "rouge_l")
    for case in (
        (("a dog", [["a dog"]]), "candidates"),
        ((["a dog"], ["a dog"]), r"references\[0\]"),
        ((["a dog"], "a dog"), "references"),
        ((["a", ""], [["a"], ["a"]]), r"candidates\[1\]"),
        ((["a", "b"], [["a"], [" "]]), r"references\[1\]\[0\]"),
        ((["a"], [[]]), r"references\[0\]"),
        ((["a"], [["a"], ["b"]]), "2 lists of references"),
        (([[None]], [["a"]]), r"candidates\[0\]\[0\]"),
        (([], []), "candidates"),
    )
]


@pytest.mark.parametrize(("arguments", "named", "metric"), NLG)
def test_texts_of_every_nlg_metric(arguments, named, metric):
    with pytest.raises(ValueError, match=named):
        getattr(m, metric)(*arguments)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: m.cider_d(*PAIR, frequencies=WITH_EOS), "eos"),
        (lambda: m.cider_d(*PAIR, sigma=0), "sigma"),
        (lambda: m.rouge_l(*PAIR, beta=-1), "beta"),
        # intervals
        (lambda: m.bootstrap_interval([1.0, NAN]), r"values\[1\]"),
        (lambda: m.bootstrap_interval([]), "values"),
        (lambda: m.bootstrap_interval([1.0, 2.0], weights=[1.0]), "weights"),
        (lambda: m.bootstrap_interval([1.0], weights=[0.0]), "weights"),
        (lambda: m.bootstrap_interval([1.0, 2.0], groups=["a"]), "groups"),
        (lambda: m.bootstrap_interval([1.0], confidence=95), "confidence"),
        (lambda: m.bootstrap_interval([1.0], num_resamples=0), "num_resamples"),
        (lambda: m.paired_test([1.0, 2.0], [1.0]), "2 scores and b 1"),
        (lambda: signature(scorer="a\nb"), "scorer"),
        # words
        (lambda: m.caption_diversity([["a", "b"], ["a"]]), r"captions\[1\]"),
        (lambda: m.caption_diversity(["a dog"]), r"captions\[0\]"),
        (lambda: m.caption_diversity([["a dog", ""]]), r"captions\[0\]\[1\]"),
        (lambda: m.caption_diversity([["a", "b"]], min_frequency=0), "min_frequency"),
        (lambda: m.caption_diversity([["a", "b"]], training_captions="a b"), "training_captions"),
        (lambda: m.caption_statistics("a dog"), "captions"),
        (lambda: m.caption_statistics(["a dog", "\n"]), r"captions\[1\]"),
        (lambda: m.caption_statistics([]), "captions"),
        (lambda: m.length_statistics(["a", "b", "c"], count_tokens=lambda texts: [1]), "count_tokens"),
        (lambda: m.length_statistics([""]), r"captions\[0\]"),
        (lambda: m.local_mutual_information({"one": {"a": 1}}), "two"),
        (lambda: m.local_mutual_information({"one": {"a": 1}, "two": {"a": -1}}), r"counts\['two'\]\['a'\]"),
        (lambda: m.local_mutual_information({"one": {}, "two": {"a": 0}}), "word"),
        (lambda: m.characteristic_words({"a": ["x"]}, tagger=list), "sources"),
        (lambda: m.characteristic_words({"a": ["x"], "b": [" "]}, tagger=lambda c: [[("x", "NOUN")]]), r"sources\['b'\]"),
        (lambda: m.characteristic_words({"a": ["x", "y"], "b": ["z"]}, tagger=lambda c: [[]]), "tagger"),
        # faithfulness
        (lambda: m.faithfulness(["a"], [{}] * 3, check), "3 facts"),
        (lambda: m.faithfulness(["a", ""], [{}] * 2, check), r"captions\[1\]"),
        (lambda: m.faithfulness(["a pig"], [5], check), r"facts\[0\]"),
        (lambda: m.faithfulness(["a pig"], [{"kind": "pig"}], check), r"facts\[0\].*KeyError"),
        (lambda: chair(["a", "b"], [["dog"], ["cat", 3]]), r"objects\[1\]\[1\]"),
        (lambda: chair(["a"], ["dog"]), r"objects\[0\]"),
        (lambda: chair(["a", "b"], [["dog"]]), "1 lists of objects"),
        (lambda: chair(["a"], [["dog"]], synonyms={"dog": [], "animal": ["dogs"]}), "'dog' and 'animal'"),
        (lambda: chair(["a"], [["dog"]], synonyms={"dog": "hound"}), r"synonyms\['dog'\]"),
        # features
        (lambda: m.clip_score(EYE, ZERO), r"image_features\[2\]"),
        (lambda: m.clip_score(EYE, EYE[:2]), "image_features"),
        (lambda: m.clip_score(EYE, EYE.half()), "dtypes"),
        (lambda: m.clip_score(EYE, EYE, preset="mine"), "preset"),
        (lambda: score_prefix("mine", "A photo"), "preset"),
        (lambda: m.ref_clip_score(EYE, EYE, [EYE, EYE]), "2 sets of references"),
        (lambda: m.ref_clip_score(EYE, EYE, [EYE, ZERO, EYE, EYE]), r"reference_features\[1\]\[2\]"),
        (lambda: pair_matching(EYE), "similarity"),
        (lambda: m.emscore([VIDEO] * 2, [VIDEO]), "1 videos"),
        (lambda: m.emscore([VIDEO] * 2, [VIDEO, 0 * VIDEO]), r"frame_features\[1\]\[0\]"),
        (lambda: emscore_matrix([VIDEO], [VIDEO, 0 * VIDEO]), r"frame_features\[1\]\[0\]"),
        (lambda: m.emscore([VIDEO], [VIDEO], idf=[[1.0]]), r"idf\[0\]"),
        (lambda: m.emscore([VIDEO[:, :3]], [VIDEO]), r"token_features\[0\]"),
        (lambda: m.emscore([VIDEO], [VIDEO], reference_features=[[]]), "reference_features"),
        (lambda: m.emscore([VIDEO], [VIDEO], reference_features=[[VIDEO[:, :3]]]), r"reference_features\[0\]\[0\]"),
        # self-retrieval
        (lambda: m.self_retrieval([[1.0, 0.0, 0.0], [1.0, 0.0]], EYE), r"text_features\[1\]"),
        (lambda: m.self_retrieval(EYE[:2], [["a"], ["b"]]), "image_features"),
        (lambda: m.self_retrieval(EYE.half(), EYE), "text_features"),
        (lambda: m.self_retrieval(EYE, ZERO), r"image_features\[2\]"),
        *((lambda bag=bag: retrieve(bags=[bag]), r"bags\[0\]") for bag in ([0, 1.5], [0, "1"], [0, None])),
        *((lambda bag=bag: retrieve(bags=[[0, 1], bag], duplicates="merge"), r"bags\[1\]") for bag in ([9, 0], [-1, 0])),
        (lambda: retrieve(sets=[[0, 1.5], *[[0, 1]] * 3], duplicates="merge"), r"sets\[0\]"),
        *((lambda n=n: retrieve(num_distractors=n, protocol="blocks"), "num_distractors") for n in (0, -1, 5)),
        *((lambda ks=ks: retrieve(ks=ks), "ks") for ks in ((), (0,), ("1",), (1.5,), (True,))),
        (lambda: retrieve(bags=[[0, 1]], num_distractors=3), "bags and num_distractors"),
        (lambda: retrieve(num_distractors=99), "num_distractors"),
        (lambda: retrieve(protocol="hard"), "protocol"),
        (lambda: retrieve(duplicates="drop"), "duplicates"),
        (lambda: retrieve(num_bootstrap=-1), "num_bootstrap"),
        (lambda: m.self_retrieval(EYE[:2], EYE, targets=[0, 2], num_distractors=1, protocol="blocks"), "image 1"),
        *((lambda known=known: retrieve(pool_ranks=known), "pool_ranks") for known in ([1, 2, 3], [1, 2, 3, 0], [5] * 4)),
        (lambda: retrieve(pool_ranks=[1] * 4, bags=[[0, 1]]), "pool_ranks"),
        (lambda: retrieve(pool_ranks=[1] * 4, num_distractors=1, protocol="blocks"), "pool_ranks"),
        (lambda: retrieve(pool_ranks=[1] * 4, duplicates="merge"), "pool_ranks"),
    ],
)  # fmt: skip
def test_the_argument_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
