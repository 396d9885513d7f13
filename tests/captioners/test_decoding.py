"""The decoding loop writes what transformers' loop writes, in the same distribution, with fewer rows."""

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from hf_captionrl.captioners import captioner as generation
from hf_captionrl.captioners import decoding, load_captioner
from hf_captionrl.captioners.decoding import UndecodableError, draw_tokens
from tests.captioners.given_draws import multinomial_of
from tests.tiny import FAMILIES, tiny_captioner, tiny_images
from tests.tiny_chat import CHAT_TYPES, tiny_chat
from tests.tiny_families import FAMILY_NAMES, tiny_family
from tests.tolerances import resolution

B, G, T = 3, 4, 12
ALL = (*FAMILIES, *FAMILY_NAMES, *CHAT_TYPES)
WARPED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(5)


def captioner_and_images(family):
    if family in FAMILIES:
        captioner = tiny_captioner(family)
    else:
        model, processor = tiny_chat(family) if family in CHAT_TYPES else tiny_family(family)
        captioner = load_captioner(model.eval(), processor=processor)
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


@pytest.mark.parametrize("family", ALL)
def test_greedy_captions_equal_those_of_transformers(family, monkeypatch):
    captioner, images = captioner_and_images(family)
    settings = {"max_new_tokens": T, **many_ends(captioner)}
    found = captioner.generate(**images, **settings).ids
    of_transformers(monkeypatch)
    assert found.tolist() == captioner.generate(**images, **settings).ids.tolist()


@pytest.mark.parametrize("settings", [{"top_k": 0}, WARPED])
@pytest.mark.parametrize("family", ALL)
def test_sampled_captions_equal_those_of_transformers_with_the_same_random_numbers(family, settings, monkeypatch):
    captioner, images = captioner_and_images(family)
    settings = {
        "max_new_tokens": T,
        "do_sample": True,
        "num_return_sequences": G,
        **settings,
        **many_ends(captioner),
    }
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


def test_draws_have_the_distribution_of_the_scores():
    """Chi-square over eight tokens; the 0.1 % quantile of 7 degrees of freedom is 24.3."""
    scores = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.2])
    number = 200_000
    drawn = draw_tokens(scores.repeat(number, 1), torch.rand(number))
    expected = scores.double().softmax(-1) * number
    counts = torch.bincount(drawn, minlength=8).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


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
        {"do_sample": True, "num_beams": 2},
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


@pytest.mark.parametrize("family", ["vit-gpt2", "blip2-opt", "blip2-t5", "florence2"])
def test_inputs_of_beam_search_are_prepared_once(family, monkeypatch):
    captioner, images = captioner_and_images(family)
    calls = []
    prepare = GenerationMixin._prepare_model_inputs

    def counted(*args, **kwargs):
        calls.append(1)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_prepare_model_inputs", counted)
    captioner.generate(**images, max_new_tokens=3, num_beams=2)
    assert len(calls) == 1
    captioner.writer.generation_config.num_beams = 2
    captioner.generate(**images, max_new_tokens=3)
    assert len(calls) == 2


def test_several_greedy_captions_of_an_image_are_refused():
    captioner, images = captioner_and_images("blip")
    with pytest.raises(ValueError, match="num_return_sequences"):
        captioner.generate(**images, num_return_sequences=2)


@pytest.mark.parametrize("family", ["blip", "vit-bert", "clipcap"])
def test_compaction_does_not_change_captions(family, monkeypatch):
    captioner, images = captioner_and_images(family)
    settings = {"max_new_tokens": T, "do_sample": True, "num_return_sequences": G, **many_ends(captioner)}
    state = torch.get_rng_state()
    found = captioner.generate(**images, **settings).ids
    monkeypatch.setattr(decoding, "_COMPACTION", -1.0)
    torch.set_rng_state(state)
    rows = forwards(captioner)
    assert found.tolist() == captioner.generate(**images, **settings).ids.tolist()
    assert set(rows[1:]) == {B * G}
