"""Self-retrieval: does a caption retrieve its target image?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules import metric as citations
from hf_captionrl.metrics.evaluate_modules.inputs import captions_and_pool, scorer_signature, truncation
from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric, Metric, forwards


@forwards(metrics.self_retrieval, "pool_ranks")
def compute(
    predictions: Sequence[Any],
    references: Sequence[Any] | None = None,
    *,
    scorer: Any = None,
    text_features: Any = None,
    images: Any = None,
    image_features: Any = None,
    image_ids: Sequence[str] | None = None,
    targets: Sequence[int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Call `self_retrieval` on the features of captions and of a pool of images."""
    pool_options = {"images": images, "image_features": image_features, "image_ids": image_ids, "targets": targets}
    text, pool, rows = captions_and_pool(predictions, references, text_features, scorer, "", **pool_options)
    result = metrics.self_retrieval(text, pool, targets=rows, scorer=scorer_signature(scorer), **options)
    return result | truncation(predictions, scorer)


METRIC = Metric(
    title="Self-Retrieval",
    emoji="🔎",
    summary="Does a caption retrieve its target image?",
    description="""\
Self-retrieval measures whether a caption distinguishes its image from others. A frozen image-text model (CLIP, SigLIP,
any dual encoder) ranks the images of a pool by their similarity to the caption; the result is the rank of the target,
the image that the caption describes. The pool is all images (SMILE), random distractors (RD100 of DiscriTune and No Detail Left Behind), bags of
similar images (TrueMatch) or a set of candidates for each caption (ImageCoDe). Ties count against the caption. A high
number means that captions are distinctive, not that they are correct: report it beside a faithfulness number, and
evaluate with a scorer that did not train the captioner.
""",
    arguments="""\
    predictions (`list[str]`, N): Captions; or their features, N vectors of D floats.
    references (N rows, optional): The image of each caption: an image (PIL, array), a path (equal paths are one image), or
        a feature vector of D floats; with a pool given below, the image's id or row. If left out, caption i belongs to
        image i of the pool. Equal images count as different images: if an image has several captions, pass paths,
        ids or `duplicates="merge"`.
    scorer: Image-text model that makes the features: a name on the Hub, a folder, `"open_clip:NAME@TAG"`,
        `"scenes:siglip-held-out"`, or a loaded `hf_captionrl.load_scorer(...)`. Not needed if both sides are features.
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
""",
    returns="""\
    recall_at_1, recall_at_5, recall_at_10 (`float` in [0, 1], higher is better), each with `_ci` (low, high) and `_ci_method`;
    per_sample, a list of each recall; mean_rank, median_rank; ranks (1 is best) with captions and groups, the caption and the image or bag
    of each; num_captions, pool_size, num_duplicate_images; num_truncated and truncated_share, captions that the scorer
    truncates; signature.
""",
    examples="""\
    >>> import evaluate
    >>> import hf_captionrl
    >>> from hf_captionrl.scenes import load_scenes
    >>> scenes = load_scenes(num_train=0, num_validation=0, num_test=105)["test"].select(range(0, 105, 7))
    >>> metric = evaluate.load("self_retrieval")
    >>> captions = [row["full_caption"] for row in scenes]
    >>> found = metric.compute(predictions=captions, references=list(scenes["image"]), scorer="scenes:siglip-held-out")
    >>> found["recall_at_1"], found["median_rank"], found["pool_size"]
    (1.0, 1.0, 15)

    Features, ids and bags:

    >>> found = metric.compute(
    ...     predictions=["a red kite", "a kite"],
    ...     references=["sky", "field"],
    ...     text_features=[[0.8, 0.6], [0.6, 0.8]],
    ...     image_features={"field": [1.0, 0.0], "sky": [0.6, 0.8]},
    ...     bags=[[0, 1]],
    ...     num_bootstrap=0,
    ... )
    >>> found["captions"], found["ranks"], found["recall_at_1"]
    ([1, 0], [2, 1], 0.5)
""",
    limitations="""\
A caption can retrieve its image and still be wrong: report a faithfulness number (`caption_faithfulness`) beside
every recall. A scorer overrates captioners that were trained with it; evaluate with a different one. Recall depends
on the pool: compare only numbers with the same pool, protocol and scorer, which the signature states. Scorers read a
limited number of tokens; `truncated_share` is the share of captions that were truncated. A scorer's biases about
people and places are also in the metric.
""",
    citation=citations.SMILE
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
    compute=compute,
    predictions=("text", "vector"),
    references=("image", "text", "vector", "row", "texts"),
    functions=("self_retrieval",),
    keys="`recall_at_1`, `_5`, `_10`, `mean_rank`, `median_rank`, `ranks`",
    data_arguments=("bags", "image_features", "image_ids", "text_features"),
    cases=(
        {
            "predictions": ["a red kite in the sky", "a red kite", "a field"],
            "references": ["sky", "sky", "field"],
            "image_ids": ["sky", "field"],
            "text_features": [[0.6, 0.8], [0.8, 0.6], [1.0, 0.0]],
            "image_features": [[0.6, 0.8], [1.0, 0.0]],
            "num_bootstrap": 0,
            "result": {"recall_at_1": 1.0, "mean_rank": 1.0, "median_rank": 1.0, "ranks": [1, 1, 1], "pool_size": 2},
        },
        {
            "predictions": ["a cat", "a dog", "a bird"],
            "references": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
            "text_features": [[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.8, 0.0, 0.6]],
            "num_distractors": 1,
            "num_bootstrap": 0,
            "result": {
                "recall_at_1": 0.8333333333,
                "mean_rank": 1.1666666667,
                "median_rank": 1.0,
                "ranks": [1, 1, 2],
                "pool_size": 3,
            },
        },
        {
            "predictions": ["one", "one"],
            "references": [[1.0, 0.0], [0.0, 1.0]],
            "text_features": [[0.6, 0.6], [0.6, 0.6]],
            "bags": [[0, 1]],
            "num_bootstrap": 0,
            "result": {"recall_at_1": 0.0, "mean_rank": 2.0, "median_rank": 2.0, "ranks": [2, 2], "pool_size": 2},
        },
    ),
)


class SelfRetrieval(DeclaredMetric, evaluate.Metric):
    """Self-Retrieval."""

    declaration = "self_retrieval"
