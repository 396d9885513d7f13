"""Captions of the decoding loop have exactly the distribution of the model, and of transformers' `generate`.

Three words and an end token are allowed, in captions of at most three tokens, so all 40 captions can be listed.

Legend: S captions, T tokens of the longest caption.
"""

import itertools
from collections import Counter

import pytest
import torch

from hf_captionrl.captioners import captioner as generation
from hf_captionrl.captioners import decoding
from hf_captionrl.captioners.decoding import UndecodableError
from tests.tiny import tiny_captioner, tiny_images
from tests.tolerances import assert_close, close

T, NUMBER = 3, 20_000
FAMILIES = ["blip", "git", "vit-gpt2", "clipcap"]


class Language:
    """A captioner that can write three words, an image, and all captions."""

    def __init__(self, family):
        self.captioner = tiny_captioner(family)
        self.end = self.captioner.end_token_ids[0]
        unused = {*self.captioner.end_token_ids, self.captioner.pad_token_id, *self.captioner.prompt_ids()}
        self.words = [i for i in range(20, 60) if i not in unused][:3]
        self.images = [self.captioner.encode_images([image]) for image in tiny_images(2)]
        texts = [words for length in range(T) for words in itertools.product(self.words, repeat=length)]
        self.captions = [(*words, self.end) for words in texts] + list(itertools.product(self.words, repeat=T))
        self.temperature = 1.0
        # A random model writes all words about equally often: this temperature makes the deviation of the scores 0.8.
        self.temperature = float(self.next_scores(0)[1].std(1).mean()) / 0.8
        allowed = {*self.words, self.end}
        self.settings = {
            "max_new_tokens": T,
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": 0,
            "eos_token_id": [self.end],
            "suppress_tokens": [i for i in range(self.captioner.vocab_size) if i not in allowed],
        }

    def next_scores(self, image):
        """All prefixes, and the scores of the four tokens that may follow, `(prefixes, 4)`: of one forward, without a cache."""
        prefixes = sorted({caption[:at] for caption in self.captions for at in range(len(caption))})
        rows = [(*prefix, token) for prefix in prefixes for token in (*self.words, self.end)]
        ids = torch.tensor([row + (self.captioner.pad_token_id,) * (T - len(row)) for row in rows])
        mask = torch.tensor([[at < len(row) for at in range(T)] for row in rows])
        batch = self.captioner.encode_completions(ids, mask)
        batch |= {name: value.repeat_interleave(len(rows), 0) for name, value in self.images[image].items()}
        with torch.no_grad():
            found = self.captioner.log_probs(batch, temperature=self.temperature).double()
        start = len(self.captioner.prompt_ids()) - 1
        last = torch.stack([found[n, start + len(row) - 1] for n, row in enumerate(rows)])
        return prefixes, last.view(len(prefixes), -1)

    def probabilities(self, image):
        """Of all captions, `(S,)`."""
        prefixes, scores = self.next_scores(image)
        given = dict(zip(prefixes, scores.softmax(1), strict=True))  # of the allowed tokens only
        place = {token: number for number, token in enumerate((*self.words, self.end))}
        steps = [[given[c[:at]][place[c[at]]] for at in range(len(c))] for c in self.captions]
        return torch.stack([torch.stack(each).prod() for each in steps])

    def sampled(self, image, number, **settings):
        """How often each caption is sampled, `(S,)`."""
        torch.manual_seed(11)
        found = self.captioner.generate(**self.images[image], num_return_sequences=number, **self.settings | settings)
        rows = zip(found.ids.tolist(), found.mask.sum(1).tolist(), strict=True)
        counts = Counter(tuple(ids[:length]) for ids, length in rows)
        assert set(counts) <= set(self.captions)
        return torch.tensor([counts[caption] for caption in self.captions]).double()


@pytest.fixture(scope="module", params=FAMILIES)
def language(request):
    return Language(request.param)


def refuse(*args, **kwargs):
    raise UndecodableError


def excess(counts, probabilities):
    """Chi-square statistic divided by its 0.1 % quantile (Wilson and Hilferty); cells with fewer than 5 expected are joined."""
    expected = probabilities / probabilities.sum() * counts.sum()
    if (rare := expected < 5).any():
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    freedom = len(counts) - 1
    assert freedom > 10
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((counts - expected) ** 2 / expected).sum()) / quantile


def test_quantile_is_that_of_the_tables():
    """The 0.1 % quantile of 39 degrees of freedom is 72.05."""
    counts = torch.full((40,), 100.0).double()
    counts[0], counts[1] = 100 + 60, 100 - 60
    assert excess(counts, torch.ones(40)) == pytest.approx(2 * 60**2 / 100 / 72.05, rel=2e-3)


def test_transformers_gives_every_caption_its_exact_probability(language, monkeypatch):
    """Its own loop is led through every caption, and the probabilities that it would sample from are multiplied."""
    expected = language.probabilities(0)
    assert float(expected.sum()) == close(1.0, dtype="float64")
    steps, found = itertools.count(), torch.ones(len(language.captions)).double()

    def lead(probabilities, num_samples):
        step = next(steps)
        tokens = [caption[step] if step < len(caption) else language.end for caption in language.captions]
        for row, caption in enumerate(language.captions):
            if step < len(caption):
                found[row] *= float(probabilities[row, tokens[row]])
        return torch.tensor(tokens)[:, None]

    monkeypatch.setattr(generation.DecodingLoop, "__call__", refuse)
    monkeypatch.setattr(torch, "multinomial", lead)
    written = language.sampled(0, len(language.captions))
    assert written.tolist() == [1.0] * len(language.captions)
    assert_close(found, expected, dtype="float32", magnitude=1.0)


@pytest.mark.parametrize("settings", [{}, {"greedy_first": True}])
def test_sampled_captions_follow_the_exact_probabilities(language, settings):
    counts = language.sampled(0, NUMBER, **settings)
    if settings:
        greedy = language.captioner.generate(**language.images[0], **language.settings | {"do_sample": False})
        counts[language.captions.index(tuple(greedy.ids[0, : int(greedy.mask.sum())].tolist()))] -= 1
    assert counts.sum() == NUMBER
    assert excess(counts, language.probabilities(0)) < 1
    # The bound notices small faults: another image, and a temperature that is 15 % too high.
    assert excess(counts, language.probabilities(1)) > 1
    assert excess(language.sampled(0, NUMBER, temperature=1.15 * language.temperature), language.probabilities(0)) > 1


def test_transformers_samples_the_same_distribution(language, monkeypatch):
    ours = language.sampled(0, NUMBER)
    monkeypatch.setattr(generation.DecodingLoop, "__call__", refuse)
    theirs = language.sampled(0, NUMBER // 4)
    assert excess(theirs, language.probabilities(0)) < 1
    assert ours.tolist() != theirs.tolist()


def test_the_bound_notices_draws_whose_numbers_are_not_uniform(language, monkeypatch):
    before = decoding.draw_tokens
    monkeypatch.setattr(decoding, "draw_tokens", lambda scores, uniforms: before(scores, uniforms**1.1))
    assert excess(language.sampled(0, NUMBER), language.probabilities(0)) > 1
