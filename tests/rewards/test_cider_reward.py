import json
from pathlib import Path

import pytest
import torch

from hf_captionrl.rewards import CiderReward, WeightedRewards
from hf_captionrl.text.cider_d import CiderScorer, DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize
from tests.tolerances import assert_close, close

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "cider.json").read_text())
CANDIDATES = [" ".join(ptb_tokenize(caption)) for caption in VECTORS["raw_hyp"]]
REFERENCES = [[" ".join(ptb_tokenize(caption)) for caption in captions] for captions in VECTORS["raw_refs"]]


def ready(rollouts, references=REFERENCES, **kwargs) -> CiderReward:
    reward = CiderReward(**kwargs)
    reward.prepare(rollouts.data(references))
    return reward


@pytest.mark.parametrize(("eos", "variant"), [(True, "cider_d"), (False, "cider")])
def test_equals_the_score_on_words(rollouts, eos, variant):
    """Several captions per image, repeated images in any order, words that no reference has."""
    rows = [5, 1, 5, 0]
    candidates = [
        [CANDIDATES[5], REFERENCES[5][2], "a zebra"],
        [CANDIDATES[1], "a a a a a", REFERENCES[1][0]],
        [CANDIDATES[2], CANDIDATES[5], "table"],
        [REFERENCES[0][4], REFERENCES[0][0] + " and more", CANDIDATES[0]],
    ]
    flat = [caption for group in candidates for caption in group]
    found = ready(rollouts, cider_eos=eos, variant=variant)(rollouts.context(flat, rows))

    def words(captions: list[str]) -> list[list[str]]:
        return [caption.split() for caption in captions]

    frequencies = DocumentFrequencies.from_references([words(group) for group in REFERENCES], eos=eos)
    scorer = CiderScorer(frequencies, variant=variant)
    assert_close(found, scorer([words(group) for group in candidates], [words(REFERENCES[row]) for row in rows]))
    assert found.max() > 1


def test_end_token_is_rewarded(rollouts):
    """A truncated caption scores less than one that ends, and the same if the end is not scored."""
    for eos in (True, False):
        reward = ready(rollouts, cider_eos=eos)
        ended = reward(rollouts.context([REFERENCES[3][0]], [3]))
        truncated = reward(rollouts.context([REFERENCES[3][0]], [3], ended=False))
        assert (float(truncated) < float(ended)) is eos
        assert float(truncated) > 0


def test_frequencies_of_the_batch_are_those_of_the_code_of_no_detail_left_behind(rollouts):
    """Eight images of a larger training set score as if they were the whole corpus."""
    more = [[f"image {n} shows a kitchen", "a man"] for n in range(6)]
    batch = ready(rollouts, [*more, *REFERENCES], cider_eos=False, cider_frequencies="batch")
    train = ready(rollouts, [*more, *REFERENCES], cider_eos=False)
    context = rollouts.context(CANDIDATES, list(range(6, 14)))
    expected = VECTORS["expected"]["ciderD_corpus_df_of_these_8"]["per_image"]
    assert batch(context).tolist() == close(expected, ulps=32)
    assert not torch.allclose(batch(context), train(context), rtol=0.01)
    assert batch(rollouts.context(CANDIDATES[:1], [6])).tolist() == [0.0]  # of one image alone


@pytest.mark.parametrize("eos", [True, False])
def test_references_without_words(rollouts, eos):
    with pytest.raises(ValueError, match="No reference has a token"):
        ready(rollouts, [[""], ["", " "]], cider_eos=eos)
    # One such image among others has no reward and is counted; one such reference matches nothing.
    reward = ready(rollouts, [["a cat"], ["", " "], ["a dog runs", ""]], cider_eos=eos)
    context = rollouts.context(["a cat", "a cat", "a dog", "a dog runs", "", "x"], [1, 2, 0])
    values = WeightedRewards([reward])(context)[:, 0]
    assert values[:2].isnan().all()
    assert context.statistics["rewards/cider/undefined"] == 2
    assert values[3] > values[2] > 0
    full = ready(rollouts, [["a cat"], ["", " "], ["a dog runs"]], cider_eos=eos)
    assert float(values[3]) < float(full(rollouts.context(["a dog runs"], [2])))
