"""Captions compared with references: BLEU, ROUGE-L, CIDEr, CIDEr-D, METEOR, SPICE and CAPTURE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import check_groups
from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric, Metric
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import check_tokenize, ptb_tokenize, split_characters

_WITHOUT_JAVA = ("bleu", "rouge_l", "cider", "cider_d")
_ALL = (*_WITHOUT_JAVA, "meteor", "spice", "capture")


def compute(
    predictions: Sequence[Any],
    references: Sequence[Sequence[str]],
    *,
    which: str | Sequence[str] = _WITHOUT_JAVA,
    frequencies: Any = None,
    eos: bool = False,
    sigma: float = 6.0,
    max_order: int = 4,
    beta: float = 1.2,
    corenlp_dir: str | None = None,
    java: str | None = None,
    meteor_heap: str = "2G",
    spice_heap: str = "8G",
    timeout_s: float = 3600.0,
    extractor: Any = None,
    encoder: Any = None,
    tokenize: str = "ptb",
) -> dict[str, Any]:
    """Call the chosen metrics and join their results; a metric whose Java program or parser is missing becomes a reason."""
    wanted = list(_ALL) if which == "all" else [which] if isinstance(which, str) else list(dict.fromkeys(which))
    if not wanted or not set(wanted) <= set(_ALL):
        raise ValueError(f"which must be some of {list(_ALL)}, or 'all', got {which!r}.")
    by_character = check_tokenize(tokenize, predictions)
    if by_character:
        predictions, references = split_characters(predictions), split_characters(references)
    if not {"cider", "cider_d"} & set(wanted):
        frequencies = None
    elif isinstance(frequencies, str | os.PathLike):
        frequencies = DocumentFrequencies.load(frequencies)
    elif frequencies is not None and not isinstance(frequencies, DocumentFrequencies):
        groups = check_groups(frequencies, "frequencies")
        groups = split_characters(groups) if by_character else groups
        words = [[ptb_tokenize(text) for text in group] for group in groups]
        frequencies = DocumentFrequencies.from_references(words, eos=eos)
    options: dict[str, dict[str, Any]] = {
        "bleu": {"max_order": max_order},
        "rouge_l": {"beta": beta},
        "cider": {"frequencies": frequencies, "eos": eos},
        "cider_d": {"frequencies": frequencies, "eos": eos, "sigma": sigma},
        "meteor": {"java": java, "heap": meteor_heap, "timeout_s": timeout_s},
        "spice": {"corenlp_dir": corenlp_dir, "java": java, "heap": spice_heap, "timeout_s": timeout_s},
        "capture": {"extractor": extractor, "encoder": encoder},
    }
    result: dict[str, Any] = {}
    per_sample: dict[str, Any] = {}
    signatures = []
    for name in wanted:
        try:
            found = getattr(metrics, name)(predictions, references, **options[name])
        except (RuntimeError, ImportError) as error:
            result |= {name: None, f"{name}_reason": str(error)}
            continue
        signatures.append(found.pop("signature"))
        values = found.pop("per_sample")
        per_sample |= values if isinstance(values, dict) else {name: values}
        if name == "spice":
            result["spice_subsets"] = found.pop("subsets")
        result |= found
    named = " + ".join(signatures) or signature(metric="caption_nlg", ran="none")
    named = named.replace("tok:ptb", f"tok:{tokenize}")
    return result | {"per_sample": per_sample, "signature": named}


METRIC = Metric(
    title="Caption NLG: BLEU, ROUGE-L, CIDEr, CIDEr-D",
    emoji="📝",
    summary="BLEU, ROUGE-L, CIDEr and CIDEr-D without Java",
    description="""\
How similar captions are to human references: BLEU-1 to BLEU-4, ROUGE-L, CIDEr and CIDEr-D (two metrics: what
pycocoevalcap and most papers call "CIDEr" is CIDEr-D), on the words of the PTB tokenizer, without Java; they equal
pycocoevalcap's to 1e-4 or better. METEOR and SPICE are the authors' Java programs and need Java (the extra
`[java]`; SPICE also needs Stanford CoreNLP), and CAPTURE, precision and recall of objects, attributes and relations, needs
spaCy (`[analysis]`); if a part is missing, their value is None and `<key>_reason` says why.
""",
    arguments="""\
    predictions: One caption per image (`list[str]`, B), or a list of captions per image.
    references (`list[list[str]]`, B): References of each image, at least one.
    which (`list[str]` or `"all"`): Some of `"bleu"`, `"rouge_l"`, `"cider"`, `"cider_d"`, `"meteor"`, `"spice"` and `"capture"`;
        by default those without Java and spaCy.
    frequencies: Document frequencies for CIDEr and CIDEr-D: a `hf_captionrl.text.cider_d.DocumentFrequencies`, the
        path of a saved one, or the references of a training set (`list[list[str]]`). By default they are counted in
        `references`, as in pycocoevalcap; CIDEr of a single image is then 0.
    eos (`bool`): Whether CIDEr and CIDEr-D score an end-of-sequence word after each caption.
    sigma (`float`): Width of CIDEr-D's length penalty.
    max_order (`int`): Longest n-gram of BLEU.
    beta (`float`): Weight of recall in ROUGE-L.
    corenlp_dir: Folder with the jars of Stanford CoreNLP 3.6.0, for SPICE.
    java: Path of the Java program; found automatically by default.
    meteor_heap, spice_heap (`str`): Maximum heap of each program, `"2G"` and `"8G"`.
    timeout_s (`float`): Seconds after which METEOR or SPICE is stopped.
    tokenize: `"ptb"`, or `"char"`: each character of a script without spaces (Chinese, Japanese, Thai) is a word.
    extractor, encoder: For CAPTURE, from texts to their units (by default spaCy's parser) and to features (by default none).
""",
    returns="""\
    bleu_1 ... bleu_4, rouge_l, meteor, spice (`float` in [0, 1]), cider, cider_d (`float` in [0, 10]; 1.0 is what papers
    print as 100), higher is better; spice_subsets; capture and its parts; `<key>_reason` where one was not run; per_sample,
    a list of each number; signature, the metrics' signatures joined by " + ".
""",
    examples="""\
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
""",
    limitations="""\
Overlap metrics prefer generic captions and penalise correct details that no reference mentions. CIDEr depends on its
document frequencies: those of another set give other numbers. English only.
""",
    citation="""\
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
""",
    urls=("https://github.com/salaniz/pycocoevalcap", "https://arxiv.org/abs/1411.5726"),
    compute=compute,
    predictions=("text", "texts"),
    references=("texts",),
    references_required=True,
    extra="java",
    functions=("bleu", "rouge_l", "cider", "cider_d", "meteor", "spice", "capture"),
    keys="`bleu_1` ... `bleu_4`, `rouge_l`, `cider`, `cider_d`, `meteor`, `spice`, `capture`",
    cases=(
        {
            "predictions": ["a man rides a horse", "two dogs play"],
            "references": [["a man rides a brown horse", "a rider"], ["two dogs play in the snow"]],
            "result": {"bleu_1": 0.6065306596, "bleu_4": 0.4534874412, "rouge_l": 0.7616470659}
            | {"cider": 4.2534252562, "cider_d": 3.7742235942},
        },
        {
            "predictions": ["a man rides a horse", "two dogs play"],
            "references": [["a man rides a horse"], ["two cats sleep"]],
            "which": ["cider_d", "cider"],
            "result": {"cider": 5.4166666667, "cider_d": 5.4166666667},
        },
    ),
)


class CaptionNlg(DeclaredMetric, evaluate.Metric):
    """Caption NLG: BLEU, ROUGE-L, CIDEr, CIDEr-D."""

    declaration = "caption_nlg"
