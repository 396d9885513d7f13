"""The decoding loop writes what transformers' loop writes, in the same distribution, with fewer rows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hf_captionrl.captioners import Captioner, load_captioner
from hf_captionrl.captioners import captioner as generation
from hf_captionrl.captioners.decoding import UndecodableError, draw_tokens
from hf_captionrl.trainers.caption_rl_trainer import drawing_from_the_policy, token_log_probs
from tests.captioners.models import MODELS, build, captioner_of
from tests.tiny import _spread, tiny_blip, tiny_git, tiny_images
from tests.tolerances import assert_close, resolution

B, G, T = 3, 4, 12
WARPED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(5)


def captioner_and_images(family):
    captioner = captioner_of(family)
    return captioner, captioner.encode_images(tiny_images(B))


def many_ends(captioner):
    """End tokens that a random model writes after a few tokens, at another place in each row."""
    size = captioner.vocab_size
    return {"eos_token_id": [i for i in range(size) if i % 6 == 1 and i != captioner.pad_token_id]}


def of_transformers(monkeypatch, uniforms=None):
    """Use transformers' own loop, with the random numbers `uniforms` `(T, N)`."""

    def refuse(*args, **kwargs):
        raise UndecodableError

    monkeypatch.setattr(generation.DecodingLoop, "__call__", refuse)
    if uniforms is not None:
        monkeypatch.setattr(torch, "multinomial", multinomial_of(uniforms))


def forwards(captioner):
    """Rows of each forward of the language model's output projection."""
    rows = []
    head = captioner.output_head(captioner.base_model)
    head.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    return rows


@pytest.mark.parametrize(
    ("family", "settings"), [*((family, {"top_k": 0}) for family in MODELS), ("blip", WARPED), ("qwen2_vl", WARPED)]
)
def test_sampled_captions_equal_those_of_transformers_with_the_same_random_numbers(family, settings, monkeypatch):
    captioner, images = captioner_and_images(family)
    settings = {"max_new_tokens": T, "do_sample": True, "num_return_sequences": G, **settings, **many_ends(captioner)}
    rows = forwards(captioner)
    state = torch.get_rng_state()
    found = captioner.generate(**images, **settings).ids
    torch.set_rng_state(state)
    uniforms = torch.rand(T, B * G)
    assert rows[0] == B  # one prefill per image
    assert min(rows[1:]) < B * G  # finished rows leave the batch
    of_transformers(monkeypatch, uniforms)
    assert found.tolist() == captioner.generate(**images, **settings).ids.tolist()


@pytest.mark.parametrize("family", ["blip", "vit-gpt2", "git", "clipcap"])
def test_greedy_first_gives_the_captions_of_two_passes(family, monkeypatch):
    captioner, images = captioner_and_images(family)
    ends = {"max_new_tokens": T, **many_ends(captioner)}
    sampling = {"do_sample": True, "num_return_sequences": G, "top_k": 0, **ends}
    state = torch.get_rng_state()
    both = captioner.generate(**images, greedy_first=True, **sampling)
    torch.set_rng_state(state)
    sampled, greedy = captioner.generate(**images, **sampling), captioner.generate(**images, do_sample=False, **ends)
    places = torch.arange(B * (G + 1))
    sampled, greedy = (each.rows(torch.arange(len(each.captions))) for each in (sampled, greedy))  # of equal width
    assert both.rows(places[places % (G + 1) == 0]).ids.tolist() == greedy.ids.tolist()
    found = both.rows(places[places % (G + 1) > 0])
    assert found.ids.tolist() == sampled.ids.tolist()
    assert found.captions == sampled.captions
    assert found.ended.tolist() == sampled.ended.tolist()
    assert found.mask.tolist() == sampled.mask.tolist()
    # The loop of transformers gives the greedy captions at the same places.
    of_transformers(monkeypatch)
    again = captioner.generate(**images, greedy_first=True, **sampling)
    assert again.rows(places[places % (G + 1) == 0]).ids.tolist() == greedy.ids.tolist()
    assert len(again.captions) == B * (G + 1)


def test_draws_never_choose_impossible_tokens():
    inf = float("-inf")
    scores = torch.tensor([[inf, 0.0, inf], [0.0, inf, inf], [inf, inf, 0.0], [inf, 5.0, 5.0]])
    for uniform in (0.0, 0.25, 0.5, 1 - 2**-24):
        drawn = draw_tokens(scores, torch.full((4,), uniform)).tolist()
        assert drawn[:3] == [1, 0, 2]
        assert drawn[3] == (1 if uniform < 0.5 else 2)


def test_draws_of_a_large_vocabulary_follow_the_exact_cumulative_sum():
    scores = torch.randn(6, 50_000) * 3
    uniforms = torch.rand(6)
    cumulative = scores.double().softmax(-1).cumsum(-1)
    rounding = resolution(1.0, summands=50_000)
    for row, token in enumerate(draw_tokens(scores, uniforms).tolist()):
        before = float(cumulative[row, token - 1]) if token else 0.0
        assert before - rounding <= float(uniforms[row]) <= float(cumulative[row, token]) + rounding


def test_draws_with_the_largest_uniform_choose_a_possible_token():
    """The last cumulative sum is rounded, and differs from 1 in both directions."""
    scores = torch.randn(500, 2000) * 3
    scores[:, -500:] = float("-inf")
    sums = scores.softmax(-1).cumsum(-1)[:, -1]
    assert float(sums.min()) < 1 < float(sums.max())
    drawn = draw_tokens(scores, torch.full((500,), 1 - 2**-24))
    assert int(drawn.max()) < 1500


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"do_sample": True, "typical_p": 0.5},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"generation_config": GenerationConfig(num_beams=2)},
    ],
)
def test_other_settings_use_the_loop_of_transformers(settings, monkeypatch):
    captioner, images = captioner_and_images("vit-gpt2")
    state = torch.get_rng_state()
    found = captioner.generate(**images, max_new_tokens=T, **settings).ids
    torch.set_rng_state(state)
    of_transformers(monkeypatch)
    assert found.tolist() == captioner.generate(**images, max_new_tokens=T, **settings).ids.tolist()


def multinomial_of(uniforms: Tensor) -> Callable[[Tensor, int], Tensor]:
    """A `torch.multinomial` that inverts the cumulative distribution in a plain loop; call t uses `uniforms[t]` `(N,)`."""
    steps = iter(uniforms)

    def multinomial(probabilities: Tensor, num_samples: int) -> Tensor:
        chosen = []
        for row, draw in zip(probabilities.double(), next(steps).tolist(), strict=True):
            token, total = -1, 0.0
            while total <= draw * float(row.sum()):
                token += 1
                total += float(row[token])
            chosen.append([token])
        return torch.tensor(chosen)

    return multinomial


# Log-probabilities of sampled tokens are equal in generation, with caches and one token at a time, and in the loss


class Recorder(LogitsProcessor):
    """Records the scores of every step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append(scores.detach().float().clone())
        return scores


def recorded(captioner: Captioner, images: dict[str, Tensor], **settings: Any) -> tuple[Any, Tensor]:
    """Sampled captions, and the log-probabilities `(N, T, V)` of their distributions."""
    recorder = Recorder()
    torch.manual_seed(0)
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": 4, "num_return_sequences": G, **settings}
    with drawing_from_the_policy(captioner):
        written = captioner.generate(**images, logits_processor=LogitsProcessorList([recorder]), **how)
    return written, torch.stack(recorder.steps, dim=1).log_softmax(-1)


def given(captioner: Captioner, images: dict[str, Tensor], written: Any, **how: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities `(N, T)` of the tokens by the captioner, and logits `(N, T, V)` of the model's forward."""
    batch = {**captioner.encode_completions(written.ids, written.mask), **images}
    labels = captioner.align_labels(batch["labels"])
    mine, logits = [], []
    with torch.no_grad():
        log_probs = captioner.log_probs(batch, **how)
        whole = captioner.model(**{key: value for key, value in batch.items() if key != "labels"}).logits.float()
    whole = whole if captioner.is_encoder_decoder else whole[:, -labels.size(1) - 1 : -1]
    T = written.ids.size(1)
    for row, label in enumerate(labels):
        at = (label != -100).nonzero()[:, 0]
        at = torch.cat([at, at.new_zeros(T - len(at))])  # padding is ignored
        mine.append(log_probs[row, at])
        logits.append(whole[row, at])
    return torch.stack(mine), torch.stack(logits)


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_of_generation_and_loss_are_equal(name):
    captioner, images = captioner_and_images(name)
    written, sampled_from = recorded(captioner, images)
    assert len(written.ids) == B * G
    mine, logits = given(captioner, images, written)
    mask = written.mask
    assert mask.sum() > len(mask)  # captions of more than one token
    ids = written.ids.unsqueeze(-1)
    whole = logits.log_softmax(-1).gather(-1, ids)[..., 0]
    assert_close(mine[mask], whole[mask], magnitude=10)
    # Chat models never generate their image token, and no model ids beyond the tokenizer; the other tokens share the probability.
    sampled_from = sampled_from[:, : mask.size(1)]
    allowed = logits.masked_fill(sampled_from.isinf(), -torch.inf).log_softmax(-1)
    assert sampled_from[..., : captioner.num_tokens].isinf().sum(-1).max() <= 1
    for step in range(mask.size(1)):
        here = mask[:, step]
        assert_close(sampled_from[here, step], allowed[here, step], ulps=32, magnitude=10)


def test_another_caption_is_detected():
    """Negative control: the same scores against the captions of the other image."""
    captioner, images = captioner_and_images("blip")
    written, sampled_from = recorded(captioner, images)
    swapped = {name: value.flip(0) for name, value in images.items()}
    _, logits = given(captioner, swapped, written)
    assert (sampled_from[:, 0] - logits.log_softmax(-1)[:, 0]).abs().max() > 1e-2


# --- Output heads with more rows than the tokenizer has ids ----------------------------------------------------------

ROWS = 400


def padded(name):
    """A captioner whose output head has `ROWS` rows, most of them beyond the tokenizer, and images."""
    if name == "blip":
        model, processor = tiny_blip(vocab_size=ROWS)
    elif name == "git":
        model, processor = tiny_git(vocab_size=ROWS)
    else:
        model, processor = build(name)
        model.resize_token_embeddings(ROWS)
        _spread(model)
    captioner = load_captioner(model.eval(), processor=processor)
    assert captioner.vocab_size == ROWS > len(captioner.tokenizer)
    return captioner, captioner.encode_images(tiny_images(B))


@pytest.mark.parametrize("name", ["blip", "git", "qwen2_vl"])
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "num_return_sequences": G, "top_k": 0},
        {"do_sample": True, "num_return_sequences": G, "top_k": 0, "greedy_first": True},
        {"num_beams": 3, "num_return_sequences": 3},
        {"do_sample": True, "top_k": 0, "num_beams": 2},
    ],
)
@pytest.mark.parametrize("own_loop", [True, False])
def test_ids_beyond_the_tokenizer_are_never_written(name, settings, own_loop):
    captioner, images = padded(name)
    captioner.own_loop = own_loop
    size = len(captioner.tokenizer)

    def largest():
        with drawing_from_the_policy(captioner):  # as rollouts of trainers
            of_policy = captioner.generate(**images, max_new_tokens=T, **settings)
        written = captioner.generate(**images, max_new_tokens=T, **settings)
        return max(int(written.ids.max()), int(of_policy.ids.max()))

    assert largest() < size
    captioner.num_tokens = None  # the negative control
    assert largest() >= size


@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize("name", ["blip", "git", "qwen2_vl"])
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(name, full_logits):
    captioner, images = padded(name)
    captioner.use_full_logits = full_logits
    written, sampled_from = recorded(captioner, images)
    mine, logits = given(captioner, images, written, of_generation=True)
    size = len(captioner.tokenizer)
    assert sampled_from[..., size:].isinf().all()
    expected = logits[..., :size].log_softmax(-1).gather(-1, written.ids.unsqueeze(-1))[..., 0]
    assert_close(mine[written.mask], expected[written.mask], magnitude=10)
    of_all_rows, _ = given(captioner, images, written)
    assert (mine - of_all_rows)[written.mask].min() > 0.1  # the negative control


def test_the_policy_gradient_has_the_distribution_of_the_rollout():
    captioner, images = padded("git")
    written, before = recorded(captioner, images, temperature=0.7)
    sampled_from = (before / 0.7).log_softmax(-1)  # recorded before the temperature
    inputs = {**captioner.encode_completions(written.ids, written.mask), **images}
    args = SimpleNamespace(do_sample=True, temperature=0.7, entropy_weight=0.1)
    log_probs, entropies = token_log_probs(captioner, inputs, args)
    supervised = captioner.align_labels(inputs["labels"]) != -100
    drawn = sampled_from.gather(-1, written.ids.unsqueeze(-1))[..., 0]
    assert_close(log_probs[supervised], drawn[written.mask], ulps=64, magnitude=10)
    entropy = -(sampled_from.exp() * sampled_from.nan_to_num(neginf=0)).sum(-1)
    assert_close(entropies[supervised], entropy[written.mask], ulps=64, magnitude=10)
