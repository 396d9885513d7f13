"""Captions against references as an `evaluate` module: BLEU, ROUGE-L, CIDEr, CIDEr-D, METEOR and SPICE."""

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.evaluate_modules.prediction_columns import CaptionColumns, column_features

__all__ = ["CaptionNLG"]

_CITATION = """\
@inproceedings{papineni2002bleu,
  title     = {{BLEU}: a Method for Automatic Evaluation of Machine Translation},
  author    = {Papineni, Kishore and Roukos, Salim and Ward, Todd and Zhu, Wei-Jing},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  year      = {2002}
}
@inproceedings{lin2004rouge,
  title     = {{ROUGE}: A Package for Automatic Evaluation of Summaries},
  author    = {Lin, Chin-Yew},
  booktitle = {Text Summarization Branches Out},
  year      = {2004}
}
@inproceedings{vedantam2015cider,
  title     = {{CIDEr}: Consensus-based Image Description Evaluation},
  author    = {Vedantam, Ramakrishna and Zitnick, C. Lawrence and Parikh, Devi},
  booktitle = {IEEE Conference on Computer Vision and Pattern Recognition},
  year      = {2015}
}
@inproceedings{denkowski2014meteor,
  title     = {Meteor Universal: Language Specific Translation Evaluation for Any Target Language},
  author    = {Denkowski, Michael and Lavie, Alon},
  booktitle = {Workshop on Statistical Machine Translation},
  year      = {2014}
}
@inproceedings{anderson2016spice,
  title     = {{SPICE}: Semantic Propositional Image Caption Evaluation},
  author    = {Anderson, Peter and Fernando, Basura and Johnson, Mark and Gould, Stephen},
  booktitle = {European Conference on Computer Vision},
  year      = {2016}
}
"""

_DESCRIPTION = """\
How near captions are to human references: BLEU-1 to BLEU-4, ROUGE-L, CIDEr and CIDEr-D (two metrics: what
pycocoevalcap and most papers call "CIDEr" is CIDEr-D), on the words of the PTB tokenizer, without Java, equal to
pycocoevalcap to 1e-4 and better. METEOR and SPICE are the authors' Java programs and run where Java is (the extra
`[java]`; SPICE also needs Stanford CoreNLP); where a part is missing their value is None and `<key>_reason` says why.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions: One caption for each of B images (`list[str]`), or for each image a list of captions.
    references (`list[list[str]]`, B): For each image its references, at least one.
    which (`list[str]` or `"all"`): Which of `"bleu"`, `"rouge_l"`, `"cider"`, `"cider_d"`, `"meteor"` and `"spice"`;
        by default those without Java.
    frequencies: Document frequencies for CIDEr and CIDEr-D: a `hf_captionrl.text.frequencies.DocumentFrequencies`, the
        path of a saved one, or the references of a training set (`list[list[str]]`). Left out, those of `references`,
        as pycocoevalcap does; with one image alone CIDEr is then 0.
    eos (`bool`): Whether CIDEr and CIDEr-D score an end-of-sequence word after each caption.
    sigma (`float`): Width of CIDEr-D's length penalty.
    max_order (`int`): Longest n-gram of BLEU.
    beta (`float`): Weight of recall in ROUGE-L.
    corenlp_dir: Folder with the jars of Stanford CoreNLP 3.6.0, for SPICE.
    java: Path of Java; looked for when left out.
    meteor_heap, spice_heap (`str`): Largest heap of each, `"2G"` and `"8G"`.
    timeout_s (`float`): Seconds until METEOR or SPICE is given up.
Returns:
    bleu_1 ... bleu_4, rouge_l, meteor, spice (`float` in [0, 1]), cider, cider_d (`float` in [0, 10]; 1.0 is what papers
    print as 100), higher is better; spice_subsets; `meteor_reason`, `spice_reason` where these were not run; per_sample,
    a list for each metric (of BLEU-1 ... BLEU-4 for `bleu`); signature, the metrics' signatures joined by " + ".
Examples:

    >>> import evaluate
    >>> import hf_captionrl
    >>> metric = evaluate.load("caption_nlg")
    >>> found = metric.compute(
    ...     predictions=["a man rides a horse", "two dogs play"],
    ...     references=[["a man rides a brown horse", "a rider"], ["two dogs play in the snow"]],
    ... )
    >>> round(found["bleu_1"], 4), round(found["rouge_l"], 4), round(found["cider_d"], 4)
    (0.6065, 0.7616, 3.7742)
    >>> metric.compute(
    ...     predictions=["a man"], references=[["a man"]], which=["spice"], corenlp_dir="nowhere"
    ... )["spice"] is None
    True
"""

_WITHOUT_JAVA = ("bleu", "rouge_l", "cider", "cider_d")
_ALL = (*_WITHOUT_JAVA, "meteor", "spice")


class CaptionNLG(CaptionColumns, evaluate.Metric):
    """BLEU, ROUGE-L, CIDEr, CIDEr-D, METEOR and SPICE, by the functions of `hf_captionrl.metrics`."""

    prediction_kinds = ("text", "texts")
    reference_kinds = ("texts",)
    references_required = True

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=column_features(self.prediction_kinds, self.reference_kinds),
            reference_urls=["https://github.com/salaniz/pycocoevalcap", "https://arxiv.org/abs/1411.5726"],
        )

    def _compute(
        self,
        predictions,
        references,
        *,
        which=_WITHOUT_JAVA,
        frequencies=None,
        eos=False,
        sigma=6.0,
        max_order=4,
        beta=1.2,
        corenlp_dir=None,
        java=None,
        meteor_heap="2G",
        spice_heap="8G",
        timeout_s=3600.0,
        **others,
    ):
        from hf_captionrl.evaluate_modules import inputs, results
        from hf_captionrl.metrics import java as programs
        from hf_captionrl.metrics.signature import signature

        results.warn_of_misspelling(others, self._compute)
        wanted = inputs.choose(which, _ALL, "which")
        counted = inputs.document_frequencies(frequencies, eos) if {"cider", "cider_d"} & set(wanted) else None
        functions = {
            "bleu": lambda: metrics.bleu(predictions, references, max_order=max_order),
            "rouge_l": lambda: metrics.rouge_l(predictions, references, beta=beta),
            "cider": lambda: metrics.cider(predictions, references, frequencies=counted, eos=eos),
            "cider_d": lambda: metrics.cider_d(predictions, references, frequencies=counted, eos=eos, sigma=sigma),
            "meteor": lambda: programs.meteor(
                predictions, references, java=java, heap=meteor_heap, timeout_s=timeout_s
            ),
            "spice": lambda: programs.spice(
                predictions, references, corenlp_dir=corenlp_dir, java=java, heap=spice_heap, timeout_s=timeout_s
            ),
        }
        result: dict = {}
        per_sample = {}
        signatures = []
        for name in wanted:
            try:
                found = functions[name]()
            except programs.JavaError as error:
                result |= {name: None, f"{name}_reason": str(error)}
                continue
            signatures.append(found.pop("signature"))
            per_sample[name] = found.pop("per_sample")
            if name == "spice":
                result["spice_subsets"] = found.pop("subsets")
            result |= found
        if not signatures:
            signatures.append(signature(metric="caption_nlg", ran="none"))
        result |= {"per_sample": per_sample, "signature": " + ".join(signatures)}
        return results.plain_result(result)
