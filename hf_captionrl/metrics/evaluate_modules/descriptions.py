"""The one table of the modules of `evaluate`: what `evaluate`, their cards and their Spaces say about them, and their features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import indent
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Description:
    """Texts and features of a module."""

    name: str
    title: str  # heading of the card
    summary: str  # what the Hub shows beside the title, at most 60 characters
    description: str  # what is measured
    arguments: str  # of `compute`, written as the `Args:` of a docstring
    returns: str  # keys of the result
    limitations: str  # what a reader of the number must know
    # Arguments of `compute` with the `result` that they must give; the first is the example.
    cases: tuple[Mapping[str, Any], ...]
    citation: str  # BibTeX
    urls: tuple[str, ...]  # of the papers
    predictions: tuple[str, ...] = ("text",)  # kinds of rows that they may be, see `metric.KINDS`
    references: tuple[str, ...] = ()  # the same; empty if there is no such column
    references_required: bool = False
    extra: str = ""  # of `pip install hf-captionrl[...]` that the Space needs

    @property
    def examples(self) -> str:
        """The first case as a doctest."""
        case = self.cases[0]
        lines = ["import evaluate", "import hf_captionrl", f'metric = evaluate.load("{self.name}")']
        lines = [f">>> {line}" for line in lines] + [">>> found = metric.compute("]
        lines += [*(f"...     {name}={value!r}," for name, value in case.items() if name != "result"), "... )"]
        for key, value in case["result"].items():
            if isinstance(value, float):
                lines += [f'>>> round(found["{key}"], 4)', repr(round(value, 4))]
            else:
                lines += [f'>>> found["{key}"]', repr(value)]
        return "\n".join(lines) + "\n"

    @property
    def inputs_description(self) -> str:
        """Arguments, result and example as `evaluate` shows them."""
        parts = {"Args:\n": self.arguments, "Returns:\n": self.returns, "Examples:\n\n": self.examples}
        return "\n" + "".join(head + indent(text, "    ") for head, text in parts.items())


_SCORER = """\
scorer: Image-text model that makes the features: a name on the Hub, a folder, `"open_clip:NAME@TAG"`,
    `"scenes:siglip-held-out"`, or a loaded `hf_captionrl.load_scorer(...)`. Not needed if both sides are features.
"""
_TRUNCATED = "num_truncated and truncated_share, captions that the scorer truncates"
_SMILE = """\
@inproceedings{yue2023smile,
  title     = {Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation},
  author    = {Yue, Zihao and Hu, Anwen and Zhang, Liang and Jin, Qin},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {36},
  year      = {2023}
}
"""

_ALL = (
    Description(
        name="caption_diversity",
        title="Caption Diversity",
        summary="Div-n, mBLEU, vocabulary and novelty of captions",
        description="""\
How much captions differ. Per image: Div-1 and Div-2 (distinct words and word pairs over all words) and mBLEU-4 (each
caption against the other captions of its image; lower is more diverse), per corpus and per image. Over the whole set: share
of distinct captions, mean length, lexical diversity (distinct words in thousands), vocabulary, and share of captions
that are not in a training set.
""",
        arguments="""\
predictions: The captions of each of B images (`list[list[str]]`, at least two per image); or N captions, with `image_ids`.
image_ids (N labels): The image of each of N captions.
tokenize: `"ptb"`, or `"char"`: each character of a script without spaces (Chinese, Japanese, Thai) is a word.
training_captions (`list[str]`): Captions of a training set, for `novel_captions`.
min_frequency (`int`): Number of occurrences from which a word counts for `vocabulary_size`.
max_order (`int`): Longest n-gram of mBLEU.
""",
        returns="""\
div_1, div_2 (`float` in [0, 1], higher is more diverse); mbleu_1 ... mbleu_4 (corpus) and mbleu_1_per_image ... (mean over
captions), lower is more diverse; unique_captions; length; lexical_diversity; vocabulary_size; novel_captions; empty and
degenerate, shares of captions without letter or digit, and that repeat themselves; per_sample, lists for the images of
div_1, div_2, mbleu_4_per_image, and of their contributions to mbleu_4 and unique_captions; signature.
""",
        limitations="""\
Diversity alone is not quality: random words are the most diverse captions. Div-n decreases with the number and
length of captions, so compare sets of the same size. Div-2 is divided by words here, by word pairs elsewhere.
""",
        cases=(
            {
                "predictions": ["a cat", "two dogs", "one cat sleeps", "a dog"],
                "image_ids": ["c", "d", "c", "d"],
                "training_captions": ["a cat"],
                "min_frequency": 2,
                "result": {"div_1": 0.9, "div_2": 0.55, "mbleu_4": 4.14e-08, "unique_captions": 1.0}
                | {"length": 2.25, "vocabulary_size": 2, "novel_captions": 0.75},
            },
        ),
        citation="""\
@inproceedings{chen2020sle,
  title     = {Better Captioning With Sequence-Level Exploration},
  author    = {Chen, Jia and Jin, Qin},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2020}
}
""",
        urls=("https://arxiv.org/abs/2003.03749", "https://arxiv.org/abs/1703.10476"),
        predictions=("texts", "text"),
    ),
    Description(
        name="caption_faithfulness",
        title="Caption Faithfulness",
        summary="Objects and claims that are not in the image",
        description="""\
Whether captions describe what is in the image. CHAIR counts objects that a caption names and its image does not
contain (CHAIR-i over mentions, CHAIR-s over captions), using lists of objects with synonyms. If all facts are known, as
in the embedded scenes of hf_captionrl, a checker counts wrong claims and mentioned facts exactly. Report it beside
every retrieval number.
""",
        arguments="""\
predictions (`list[str]`, N): Captions.
references (N rows, optional): For CHAIR, the objects of each caption's image (`list[str]`); for the checker, its
    facts (a mapping, or the mapping as JSON).
objects (`list[list[str]]`, N), facts (`list[dict]`, N): Instead of references; pass both to get the numbers of both.
synonyms (`dict[str, list[str]]`): Other names of each object; `"coco"`: of COCO's 80 objects.
check: Function of a caption and its facts (see `hf_captionrl.metrics.caption_faithfulness`); by default the checker
    of the embedded scenes.
""",
        returns="""\
With objects chair_i, chair_s (`float` in [0, 1], lower is better; None, with chair_i_reason, if no object was recognised)
and object_recall, with the counts num_mentions, num_wrong, num_objects and num_captions; with facts hallucination,
wrong_captions (lower is better) and fact_recall (higher is better); per_sample, lists for each caption; signature.
""",
        limitations="""\
CHAIR knows only the objects of its list, and counts objects that annotators left out as wrong. Plurals are reduced by
spelling rules. The exact checker works only for the embedded scenes of hf_captionrl.
""",
        cases=(
            {
                "predictions": ["a puppy chases a ball", "two cats"],
                "references": [["dog"], ["cat"]],
                "synonyms": {"dog": ["puppy"], "ball": []},
                "result": {"chair_i": 0.3333333333, "chair_s": 0.5, "object_recall": 1.0},
            },
            {
                "predictions": ["two large pigs on a blue background"],
                "references": [
                    {"kind": "pig", "count": 2, "size": "small", "orientation": "sideways", "position": "top"}
                    | {"background": "blue", "second": "mushroom", "relation": "left of"}
                ],
                "result": {"hallucination": 0.25, "fact_recall": 0.375, "wrong_captions": 1.0},
            },
        ),
        citation="""\
@inproceedings{rohrbach2018object,
  title     = {Object Hallucination in Image Captioning},
  author    = {Rohrbach, Anna and Hendricks, Lisa Anne and Burns, Kaylee and Darrell, Trevor and Saenko, Kate},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2018}
}
""",
        urls=("https://arxiv.org/abs/1809.02156",),
        references=("texts", "text"),
    ),
    Description(
        name="caption_nlg",
        title="Caption NLG: BLEU, ROUGE-L, CIDEr, CIDEr-D",
        summary="BLEU, ROUGE-L, CIDEr and CIDEr-D without Java",
        description="""\
How similar captions are to human references: BLEU-1 to BLEU-4, ROUGE-L, CIDEr and CIDEr-D (two metrics: what
pycocoevalcap and most papers call "CIDEr" is CIDEr-D), on the words of the PTB tokenizer, without Java; they equal
pycocoevalcap's. METEOR and SPICE are the authors' Java programs and need Java (the extra `[java]`; SPICE also needs Stanford
CoreNLP); if a part is missing, their value is None and `<key>_reason` says why.
""",
        arguments="""\
predictions: One caption per image (`list[str]`, B), or a list of captions per image.
references (`list[list[str]]`, B): References of each image, at least one.
which (`list[str]` or `"all"`): Some of `"bleu"`, `"rouge_l"`, `"cider"`, `"cider_d"`, `"meteor"` and `"spice"`; by default those
    without Java.
frequencies: Document frequencies for CIDEr and CIDEr-D: a `hf_captionrl.text.cider_d.DocumentFrequencies`, the path of
    a saved one, or the references of a training set (`list[list[str]]`). By default they are counted in `references`, as in
    pycocoevalcap; CIDEr of a single image is then 0.
eos (`bool`): Whether CIDEr and CIDEr-D score an end-of-sequence word after each caption.
sigma (`float`): Width of CIDEr-D's length penalty.
max_order (`int`): Longest n-gram of BLEU.
beta (`float`): Weight of recall in ROUGE-L.
tokenize: `"ptb"`, or `"char"`: each character of a script without spaces (Chinese, Japanese, Thai) is a word.
""",
        returns="""\
bleu_1 ... bleu_4, rouge_l, meteor, spice (`float` in [0, 1]), cider, cider_d (`float` in [0, 10]; 1.0 is what papers print as
100), higher is better; spice_subsets; `<key>_reason` where one was not run; per_sample, a list of each number; signature,
the metrics' signatures joined by " + ".
""",
        limitations="""\
Overlap metrics prefer generic captions and penalise correct details that no reference mentions. CIDEr depends on its
document frequencies: those of another set give other numbers. English only.
""",
        cases=(
            {
                "predictions": ["a man rides a horse", "two dogs play"],
                "references": [["a man rides a brown horse", "a rider"], ["two dogs play in the snow"]],
                "result": {"bleu_1": 0.6065306596, "bleu_4": 0.4534874412, "rouge_l": 0.7616470659}
                | {"cider": 4.2534252562, "cider_d": 3.7742235942},
            },
        ),
        citation="""\
@inproceedings{vedantam2015cider,
  title     = {{CIDEr}: Consensus-based Image Description Evaluation},
  author    = {Vedantam, Ramakrishna and Zitnick, C. Lawrence and Parikh, Devi},
  booktitle = {IEEE Conference on Computer Vision and Pattern Recognition},
  year      = {2015}
}
""",
        urls=("https://github.com/salaniz/pycocoevalcap", "https://arxiv.org/abs/1411.5726"),
        predictions=("text", "texts"),
        references=("texts",),
        references_required=True,
        extra="java",
    ),
    Description(
        name="caption_perplexity",
        title="Caption Perplexity",
        summary="Fluency of captions under a language model",
        description="""\
Perplexity of captions under a causal language model, each caption scored separately: fluency, as SMILE measures it with GPT-2.
Lower is better, but repetitive captions have a low perplexity too.
""",
        arguments="""\
predictions (`list[str]`, N): Captions.
model: Causal language model: a name on the Hub (`"openai-community/gpt2"`), a folder, `"scenes:gpt2-perplexity"`, or a
    model in memory.
tokenizer: Its tokenizer, needed with a model in memory.
bos: `"tokenizer"` (the tokenizer's ids; GPT-2's first word is then not scored) or `"prepend"`.
batch_size (`int`): Captions per forward pass.
max_length (`int`): Tokens after which a caption is truncated; by default the model's limit.
""",
        returns="""\
perplexity (`float`, exp of nats per token of all captions, lower is better); mean_perplexity, over captions; per_sample, a
list of perplexity (None if a caption has no token to score); nats and tokens, each caption's loss and scored tokens, for
intervals; num_tokens; num_truncated; signature.
""",
        limitations="""\
A low perplexity means that captions are predictable, not that they are correct or good: repetition lowers it.
Numbers from different language models cannot be compared.
""",
        cases=(
            {
                "predictions": ["a pig left of a tree", "two pigs"],
                "model": "scenes:gpt2-perplexity",
                "result": {"num_tokens": 10, "num_truncated": 0},
            },
        ),
        citation=_SMILE,
        urls=("https://huggingface.co/docs/transformers/perplexity",),
    ),
    Description(
        name="clip_score",
        title="CLIPScore and RefCLIPScore",
        summary="CLIPScore and RefCLIPScore with any scorer",
        description="""\
CLIPScore: the scaled cosine between a caption and its image under a frozen image-text model; negative cosines count as
0. RefCLIPScore, if reference captions are given: the harmonic mean of CLIPScore and the largest cosine with a
reference. Presets name the conventions of papers: `hessel` (2.5), `smile` (250), both after "A photo depicts",
`ndlb` (100, no clamp, no prefix), and `pac_s` (2, after "A photo depicts"), which is PAC-S with its weights. A caption that
is too long for the scorer is truncated before its end-of-text token.
""",
        arguments="""\
predictions (`list[str]`, N): Captions; or their features, N vectors of D floats.
references (N rows, optional): The image of each caption: an image (PIL, array), a path, or a feature vector of D floats;
    with a pool in `images` or `image_features`, the image's id or row (if left out, caption i belongs to image i). Lists of
    texts are reference captions, for RefCLIPScore, and need such a pool.
"""
        + _SCORER
        + """\
text_features (`(N, D)`): Features of the captions with the preset's prefix; the scorer is then not used for them.
images, image_features, image_ids, targets: The images, as in `self_retrieval`.
reference_captions (`list[list[str]]`, N): For RefCLIPScore, if references are images.
reference_features: Features of the reference captions, N arrays `(R, D)`.
preset (`str`): `"hessel"`, `"smile"`, `"ndlb"` or `"pac_s"` (with a scorer of `captionrl convert clip_ViT-B-32.pth`).
scale (`float`), clamp (`bool`), prefix (`str`): Override the preset's.
""",
        returns=f"""\
clip_score (`float`, higher is better); ref_clip_score where there are reference captions; per_sample, a list of each;
{_TRUNCATED}; signature.
""",
        limitations="""\
CLIPScore does not see many errors (counts, relations) and overrates captioners that were trained with the same scorer.
Numbers with different scorers, prefixes or scales cannot be compared; the signature states them.
""",
        cases=(
            {
                "predictions": ["a kite"],
                "references": [[0.6, 0.8]],
                "text_features": [[1.0, 0.0]],
                "reference_features": [[[0.8, 0.6], [0.0, 1.0]]],
                "preset": "hessel",
                "result": {"clip_score": 1.5000000238, "ref_clip_score": 1.0434782606},
            },
        ),
        citation="""\
@inproceedings{hessel2021clipscore,
  title     = {{CLIPScore}: A Reference-free Evaluation Metric for Image Captioning},
  author    = {Hessel, Jack and Holtzman, Ari and Forbes, Maxwell and Le Bras, Ronan and Choi, Yejin},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2021}
}
""",
        urls=("https://arxiv.org/abs/2104.08718",),
        predictions=("text", "vector"),
        references=("image", "text", "vector", "row", "texts"),
    ),
    Description(
        name="self_retrieval",
        title="Self-Retrieval",
        summary="Does a caption retrieve its target image?",
        description="""\
Self-retrieval measures whether a caption distinguishes its image from others. A frozen image-text model (CLIP, SigLIP,
any dual encoder) ranks the images of a pool by their similarity to the caption; the result is the rank of the target,
the image that the caption describes. The pool is all images (SMILE), random distractors (RD100 of DiscriTune and No Detail
Left Behind), bags of similar images (TrueMatch) or a set of candidates for each caption (ImageCoDe). Ties count against
the caption.
""",
        arguments="""\
predictions (`list[str]`, N): Captions; or their features, N vectors of D floats.
references (N rows, optional): The image of each caption: an image (PIL, array), a path (equal paths are one image), or
    a feature vector of D floats; with a pool given below, the image's id or row. If left out, caption i belongs to
    image i of the pool. Equal images count as different images: if an image has several captions, pass paths,
    ids or `duplicates="merge"`.
"""
        + _SCORER
        + """\
text_features (`(N, D)`): Features of the captions; the scorer is then not used for them.
images: The pool: M images or paths, or a mapping of ids to images.
image_features: The pool as features `(M, D)`, as a mapping of ids to vectors, or as a
    `hf_captionrl.retrieval.FeatureCache` (its ids are `image_ids`, or those in references).
image_ids (`list[str]`, M): Ids of the pool's rows.
targets (`list[int]`, N): Row of each caption's image, instead of references.
bags (`list[list[int]]`): Rows of images; each caption is ranked within the bag of its image.
sets (`list[list[int]]`, N): Candidates of each caption, its target among them.
num_distractors (`int`): Number of random distractors per caption; 99 gives RD100.
protocol: `"expected"` (exact, no seed), `"blocks"` (consecutive images, as the papers do) or `"sampled"`.
ks (`list[int]`): Values of k of recall at k; 1, 5 and 10 by default.
seed, repeats (`int`): Seed and number of draws of `"sampled"`.
duplicates: `"count"`: images with equal features compete with each other; `"merge"`: they are one image.
num_bootstrap (`int`), confidence (`float`): 0 gives no intervals; confidence of the intervals.
block_size (`int`): Captions ranked at once.
pool_ranks (`list[int]`, N): Ranks in the whole pool, if known.
concepts (list of M values): What each image shows; a caption retrieves any image of its concept among other concepts.
""",
        returns=f"""\
recall_at_1, recall_at_5, recall_at_10 (`float` in [0, 1], higher is better), each with `_ci` (low, high) and `_ci_method`;
per_sample, a list of each recall; mean_rank, median_rank; ranks (1 is best) with captions and groups, the caption and the
image or bag of each; num_captions, pool_size, num_duplicate_images; {_TRUNCATED};
signature.
""",
        limitations="""\
A caption can retrieve its image and still be wrong: report `caption_faithfulness` beside every recall. A scorer overrates
captioners that were trained with it. Recall depends on the pool: compare only numbers with the same pool, protocol and
scorer, which the signature states. A scorer's biases about people and places are also in the metric.
""",
        cases=(
            {
                "predictions": ["a red kite in the sky", "a red kite", "a field"],
                "references": ["sky", "sky", "field"],
                "image_ids": ["sky", "field"],
                "text_features": [[0.6, 0.8], [0.8, 0.6], [1.0, 0.0]],
                "image_features": [[0.6, 0.8], [1.0, 0.0]],
                "num_bootstrap": 0,
                "result": {
                    "recall_at_1": 1.0,
                    "mean_rank": 1.0,
                    "median_rank": 1.0,
                    "ranks": [1, 1, 1],
                    "pool_size": 2,
                },
            },
        ),
        citation=_SMILE
        + """\
@inproceedings{dessi2023discritune,
  title     = {Cross-Domain Image Captioning with Discriminative Finetuning},
  author    = {Dess{\\`i}, Roberto and Bevilacqua, Michele and Gualdoni, Eleonora and Rakotonirina, Nathana{\\"e}l Carraz
               and Franzon, Francesca and Baroni, Marco},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2023}
}
@article{gaur2024nodetail,
  title   = {No Detail Left Behind: Revisiting Self-Retrieval for Fine-Grained Image Captioning},
  author  = {Gaur, Manu and Singh S, Darshan and Tapaswi, Makarand},
  journal = {arXiv preprint arXiv:2409.03025},
  year    = {2024}
}
""",
        urls=("https://arxiv.org/abs/2306.13460", "https://arxiv.org/abs/2304.01662"),
        predictions=("text", "vector"),
        references=("image", "text", "vector", "row", "texts"),
    ),
)

DESCRIPTIONS = {each.name: each for each in _ALL}
"""The modules by name: one file of this folder each."""
