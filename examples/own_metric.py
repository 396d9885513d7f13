"""A metric of your own: a function of captions, with an interval, a test against another captioner, and `compute` of `evaluate`.

python examples/own_metric.py
"""

from hf_captionrl.metrics import mean_interval, paired_test
from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.evaluate_modules import metric
from hf_captionrl.metrics.evaluate_modules.descriptions import Description
from hf_captionrl.text.tokenize import ptb_tokenize


def word_repetition(predictions):
    """Share of the words of a caption that occur earlier in it, mean over captions; lower is better."""
    captions = [ptb_tokenize(caption) for caption in predictions]
    shares = [1 - len(set(words)) / len(words) if words else 0.0 for words in captions]
    return {
        "word_repetition": sum(shares) / len(shares),
        "word_repetition_ci": list(mean_interval(shares)),  # over captions
        "per_sample": {"word_repetition": shares},
        "signature": signature(metric="word_repetition", tok="ptb"),  # all that the number depends on
    }


class WordRepetition(metric.CaptionMetric):
    """The same for `evaluate`: rows are checked, caches and `add_batch` work, `evaluate.combine` takes it."""

    function = staticmethod(word_repetition)
    about = Description(
        name="word_repetition",
        title="Word Repetition",
        summary="Share of repeated words in captions",
        description="Words that occur earlier in the same caption, mean over captions. Lower is better.\n",
        arguments="predictions (`list[str]`, N): Captions.\n",
        returns="word_repetition (`float` in [0, 1]) with its interval; per_sample, the share of each caption; signature.\n",
        limitations="Good captions repeat articles and prepositions too.\n",
        cases=({"predictions": ["a dog and a cat", "a dog"], "result": {"word_repetition": 0.1}},),
        citation="",
        urls=(),
    )


if __name__ == "__main__":
    short = ["a red cat", "a dog", "two birds on a tree", "a boat", "a house", "a pig"]
    long = [
        "a red cat and a red car",
        "a dog and a dog",
        "two birds on a tree on a hill",
        "a boat",
        "a house",
        "a pig, a pig",
    ]
    result = WordRepetition().compute(predictions=long)
    low, high = result["word_repetition_ci"]
    print(f"{result['word_repetition']:.3f} [{low:.3f}, {high:.3f}] ({result['signature']})")
    # Two captioners on the same images: the intervals may overlap although the difference is significant.
    scores = (result, word_repetition(short))
    test = paired_test(*(score["per_sample"]["word_repetition"] for score in scores))
    print(f"difference {test['difference']:.3f}, p = {test['p_value']:.3f}")
