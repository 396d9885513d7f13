"""Self-retrieval as an `evaluate` module: does a caption find its own image again?"""

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.evaluate_modules.prediction_columns import CaptionColumns, column_features

__all__ = ["SelfRetrieval"]

_CITATION = """\
@inproceedings{yue2023smile,
  title     = {Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation},
  author    = {Yue, Zihao and Hu, Anwen and Zhang, Liang and Jin, Qin},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {36},
  year      = {2023}
}
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
"""

_DESCRIPTION = """\
Self-retrieval asks whether a caption tells its image from others: a frozen image-text model (CLIP, SigLIP, any
dual encoder) ranks the images of a pool by their similarity with the caption, and the rank of the caption's own image
counts. The pool is all images (SMILE), random distractors (RD100 of DiscriTune and No Detail Left Behind), bags of
similar images (TrueMatch) or a set of candidates for each caption (ImageCoDe). Ties count against the caption. A high
number says that captions are distinctive, not that they are right: read it beside a faithfulness number, and judge with
another scorer than the one a captioner was trained against.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[str]`, N): Captions; or their features, N vectors of D floats.
    references (N rows, may be left out): Of each caption its own image: images (PIL, arrays), paths (a path given twice
        is one image), feature vectors of D floats; or, with a pool given below, its id or its row. Left out, caption i
        belongs to image i of the pool. Images given as such are one image each, also if they are equal: several
        captions of one image want paths, ids or `duplicates="merge"`.
    scorer: Image-text model that makes the features: a name on the Hub, a folder, `"open_clip:NAME@TAG"`,
        `"scenes:clip-judge"`, or a loaded `hf_captionrl.load_scorer(...)`. Not needed with features on both sides.
    text_features (`(N, D)`): Features of the captions, instead of the scorer's.
    images: The pool: M images or paths, or a mapping of ids to images.
    image_features: The pool as features `(M, D)`, as a mapping of ids to vectors, or as a
        `hf_captionrl.retrieval.FeatureCache` (its ids are `image_ids`, or those in references).
    image_ids (`list[str]`, M): Ids of the pool's rows.
    targets (`list[int]`, N): Row of each caption's own image, instead of references.
    bags (`list[list[int]]`): Rows of images; every caption of a bag's images is ranked within the bag.
    sets (`list[list[int]]`, N): For each caption its candidates, the own image among them.
    num_distractors (`int`): So many random distractors for each caption; 99 gives RD100.
    protocol: `"expected"` (exact, no seed), `"blocks"` (consecutive images, as the papers do) or `"sampled"`.
    ks (`list[int]`): Which recalls; 1, 5 and 10 by default.
    seed, repeats (`int`): Of `"sampled"`; the seed also of the bootstrap.
    duplicates: `"count"` images of equal features as false negatives, or `"merge"` them.
    num_bootstrap (`int`), confidence (`float`): Resamples and width of the intervals; 0 leaves them out.
    block_size (`int`): Captions ranked at a time.
Returns:
    recall_at_1, recall_at_5, recall_at_10 (`float` in [0, 1], higher is better), each with `_ci` (low, high) and
    `_per_sample`; mean_rank, median_rank; ranks (1 is best) with captions and groups, the caption and the image or bag
    of each; num_captions, pool_size, num_duplicate_images; num_truncated and truncated_share, captions longer than the
    scorer reads; signature.
Examples:

    >>> import evaluate
    >>> import hf_captionrl
    >>> from hf_captionrl.scenes import load_scenes
    >>> scenes = load_scenes(num_train=0, num_validation=0, num_test=15)["test"]
    >>> metric = evaluate.load("self_retrieval")
    >>> captions = [row["full_caption"] for row in scenes]
    >>> found = metric.compute(predictions=captions, references=list(scenes["image"]), scorer="scenes:clip-judge")
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
"""


class SelfRetrieval(CaptionColumns, evaluate.Metric):
    """Recall at k and rank of captions that look for their own images, by `hf_captionrl.metrics.self_retrieval_recall`."""

    prediction_kinds = ("text", "vector")
    reference_kinds = ("image", "text", "vector", "row", "texts")

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=column_features(self.prediction_kinds, self.reference_kinds),
            reference_urls=["https://arxiv.org/abs/2306.13460", "https://arxiv.org/abs/2304.01662"],
        )

    def _compute(
        self,
        predictions,
        references=None,
        *,
        scorer=None,
        text_features=None,
        images=None,
        image_features=None,
        image_ids=None,
        targets=None,
        bags=None,
        sets=None,
        num_distractors=None,
        protocol="expected",
        ks=(1, 5, 10),
        seed=0,
        repeats=1,
        duplicates="count",
        num_bootstrap=1000,
        confidence=0.95,
        block_size=None,
        **others,
    ):
        from hf_captionrl.evaluate_modules import inputs, pools, results
        from hf_captionrl.retrieval.feature_checks import as_features

        results.warn_of_misspelling(others, self._compute)
        text = as_features(inputs.caption_features(predictions, text_features, scorer), "text_features")
        pool, rows = pools.image_pool(
            references,
            images=images,
            image_features=image_features,
            image_ids=image_ids,
            targets=targets,
            scorer=scorer,
            dtype=text.dtype,
        )
        result = metrics.self_retrieval(
            text,
            pool,
            targets=rows,
            bags=bags,
            sets=sets,
            num_distractors=num_distractors,
            protocol=protocol,
            ks=ks,
            seed=seed,
            repeats=repeats,
            duplicates=duplicates,
            num_bootstrap=num_bootstrap,
            confidence=confidence,
            block_size=block_size,
            scorer=inputs.scorer_signature(scorer),
        )
        return results.plain_result(result | inputs.truncation(predictions, scorer))
