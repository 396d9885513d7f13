"""Captions that share the keys and values of an image give the same numbers as repeated images, with less computation."""

import copy
import pickle

import pytest
import torch
from transformers import AutoConfig

from hf_captionrl.captioners import load_captioner, shared_cross_attention
from tests.captioners.test_head_tap import gradients
from tests.tiny import (
    HIDDEN,
    LAYERS,
    POSITIONS,
    _tiny_encoder_decoder,
    tiny_captioner,
    tiny_captions,
    tiny_images,
    wordpiece_tokenizer,
)
from tests.tolerances import assert_close

FOLDING = ("blip", "vit-gpt2", "vit-bert")
B, G = 2, 3
N = B * G
SEQ2SEQ = {"d_model": HIDDEN, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "dropout": 0.0}
BERT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * HIDDEN,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": POSITIONS + 2,
}
FOLDING_DECODERS = {
    **dict.fromkeys(("bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta"), BERT),
    **dict.fromkeys(("roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"), BERT),
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"), SEQ2SEQ),
    "trocr": SEQ2SEQ,
}


def grouped(captioner, dtype=torch.float64):
    """A batch of N captions and B images, as in RL training, and the same batch with N images."""
    captioner.model.to(dtype)
    pixel_values = captioner.encode_images(tiny_images(B))["pixel_values"].to(dtype)
    shared = {**captioner.encode_captions(tiny_captions(N)), "pixel_values": pixel_values}
    return shared, {**shared, "pixel_values": pixel_values.repeat_interleave(G, dim=0)}


def scores_and_gradients(captioner, batch, **kwargs):
    captioner.model.zero_grad(set_to_none=True)
    scores = captioner.log_probs(batch, return_entropy=True, **kwargs)
    weights = torch.randn(scores[0].shape, generator=torch.Generator().manual_seed(5)).to(scores[0])
    (scores[0] * weights - 0.1 * scores[1]).sum().backward()
    return scores, gradients(captioner.model)


def assert_shared_equals_repeated(captioner, batches=None, *, repeat_pixels=False, **kwargs):
    """Compare with N rows of features, repeated in the test and differentiable, or with N images."""
    shared, repeated = batches or grouped(captioner)
    found, found_gradients = scores_and_gradients(captioner, shared, **kwargs)
    if not repeat_pixels:
        repeated = dict(shared)
        features = captioner.image_features(repeated.pop("pixel_values"))
        repeated["image_features"] = torch.stack([features[row // G] for row in range(N)])
    expected, expected_gradients = scores_and_gradients(captioner, repeated, **kwargs)
    for name, left, right in zip(("log_probs", "entropy"), found, expected, strict=True):
        assert_close(left, right, msg=name)
    assert found_gradients.keys() == expected_gradients.keys()
    assert found_gradients
    assert any(gradient.abs().max() > 1e-4 for gradient in found_gradients.values())
    for name, gradient in found_gradients.items():
        assert_close(gradient, expected_gradients[name], ulps=64, magnitude=1, msg=name)


def cross_keys(captioner):
    """The modules that compute keys from the image, by their names in each family."""
    ends = ("crossattention.self.key", "crossattention.c_attn", "encoder_attn.k_proj")
    return [module for name, module in captioner.base_model.named_modules() if name.endswith(ends)]


def rows_seen(modules):
    """Records the batch size of every later call of the modules."""
    rows = []
    for module in modules:
        module.register_forward_pre_hook(lambda module, args: rows.append(args[0].size(0)))
    return rows


def tower_shapes(captioner):
    """Records the shapes of the pixels of every later call of the vision tower."""
    shapes = []
    captioner.vision_tower.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append((args[0] if args else kwargs["pixel_values"]).shape),
        with_kwargs=True,
    )
    return shapes


def without_dropout(captioner):
    for module in captioner.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, None) for family in ("blip", "git", "clipcap", "vit-gpt2")),
        ("vit-gpt2", "eager"),
        ("vit-bert", "eager"),
    ],
)
def test_shared_equals_repeated(family, attention):
    captioner = tiny_captioner(family, prompt="a picture of")
    captioner.model.train()
    without_dropout(captioner)
    assert captioner.base_model.folds_cross_attention == (family in FOLDING)
    if attention is not None:  # the others have only one implementation of cross-attention
        captioner.model.set_attn_implementation(attention)
    assert_shared_equals_repeated(captioner, temperature=0.7)
    if family != "git" and attention != "eager":  # parts of these vision towers compute in float32
        assert_shared_equals_repeated(captioner, repeat_pixels=True)


@pytest.mark.parametrize(
    ("family", "tune", "checkpointing"),
    [("blip", "both", False), ("vit-gpt2", "language", True), ("vit-bert", "both", True)],
)
def test_shared_keys_keep_the_gradients_of_lora(family, tune, checkpointing):
    captioner = tiny_captioner(family)
    captioner.add_lora(tune, r=2)
    for name, parameter in captioner.model.named_parameters():
        if "lora_B" in name:  # initially zero, which would hide errors in lora_A
            torch.nn.init.normal_(parameter, std=0.1)
    if checkpointing:
        captioner.model.enable_input_require_grads()
        captioner.model.gradient_checkpointing_enable()
    captioner.model.train()
    without_dropout(captioner)
    batches = grouped(captioner)
    keys = rows_seen(cross_keys(captioner))
    towers = tower_shapes(captioner)
    captioner.log_probs(batches[0])
    assert set(keys) == {B}
    assert [shape[0] for shape in towers if shape[-1] > 1] == [B]
    assert_shared_equals_repeated(captioner, batches)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_folds_again_in_backward(reentrant):
    captioner = tiny_captioner("blip")
    captioner.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    captioner.model.train()
    without_dropout(captioner)
    batches = grouped(captioner)
    assert_shared_equals_repeated(captioner, batches)
    keys = rows_seen(cross_keys(captioner))
    captioner.log_probs(batches[0]).sum().backward()
    assert keys == [B] * 2 * LAYERS  # forward and recomputation, in each layer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_share_keys_too(copied):
    captioner = tiny_captioner("vit-bert")
    shared, _ = grouped(captioner)
    expected = captioner.log_probs(shared)
    captioner.model = copied(captioner.model)
    assert captioner.base_model.folds_cross_attention
    keys = rows_seen(cross_keys(captioner))
    assert torch.equal(captioner.log_probs(shared), expected)
    assert keys == [B] * LAYERS
    again = load_captioner(captioner.model, processor=captioner.processor)  # the same model a second time
    assert torch.equal(again.log_probs(shared), expected)
    assert_shared_equals_repeated(captioner)


def test_folded_module_raises_for_uneven_rows_and_repeats_with_a_mask():
    captioner = tiny_captioner("vit-bert")
    attention = captioner.base_model.decoder.bert.encoder.layer[0].crossattention.self
    text, image = torch.randn(N, 4, HIDDEN), torch.randn(B, 5, HIDDEN)
    with pytest.raises(ValueError, match="captions cannot be divided evenly"):
        attention(text[:5], image)
    mask = torch.randn(N, 1, 1, 5)
    expected = attention(text, image.repeat_interleave(G, 0), mask)[0]
    torch.testing.assert_close(attention(text, image, mask)[0], expected)


@pytest.mark.parametrize("decoding", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": G}])
def test_connector_runs_once_per_generation(decoding):
    captioner = tiny_captioner("vit-gpt2")
    connector = captioner.base_model.enc_to_dec_proj
    products = []
    forward = type(connector).forward

    class Counting(type(connector)):
        def forward(self, states):
            products.append(states.size(0))
            return forward(self, states)

    connector.__class__ = Counting
    captioner.generate(**captioner.encode_images(tiny_images(B)), max_new_tokens=5, **decoding)
    assert products == [B * decoding.get("num_beams", 1)]
    assert "forward" not in connector.__dict__


def with_decoder(kind, settings):
    """A captioner of ViT and another decoder."""
    tokenizer = wordpiece_tokenizer(extra=())
    ids = {"eos_token_id": tokenizer.sep_token_id, "pad_token_id": tokenizer.pad_token_id}
    start = tokenizer.cls_token_id
    decoder = AutoConfig.for_model(kind, **settings, **ids, bos_token_id=start, vocab_size=len(tokenizer))
    model, processor = _tiny_encoder_decoder(decoder, tokenizer, {**ids, "decoder_start_token_id": start}, seed=0)
    if kind == "xmod":
        model.decoder.set_default_language("en_XX")
    return model, processor


@pytest.mark.parametrize("kind", FOLDING_DECODERS)
def test_decoders_of_transformers(kind):
    model, processor = with_decoder(kind, FOLDING_DECODERS[kind])
    captioner = load_captioner(model, processor=processor)
    assert captioner.base_model.folds_cross_attention
    batches = grouped(captioner)
    assert_shared_equals_repeated(captioner, batches)
    settings = {"max_new_tokens": 5, "do_sample": True, "top_k": 0}
    torch.manual_seed(3)
    expected = captioner.generate(pixel_values=batches[1]["pixel_values"], **settings).ids
    keys = rows_seen(cross_keys(captioner))
    torch.manual_seed(3)
    found = captioner.generate(pixel_values=batches[0]["pixel_values"], num_return_sequences=G, **settings).ids
    assert found.tolist() == expected.tolist()
    assert keys == [B] * 2  # at the first token; later tokens use the cache


def test_wrong_folding_is_detected(monkeypatch):
    """Negative control: the comparison fails if captions get the context of other captions."""
    captioner, unfolded = tiny_captioner("blip"), shared_cross_attention._unfolded

    def wrong(output, rows, images):
        found = unfolded(output, rows, images)
        return found.roll(1, 0) if isinstance(output, torch.Tensor) else found

    monkeypatch.setattr(shared_cross_attention, "_unfolded", wrong)
    with pytest.raises(AssertionError, match="log_probs"):
        assert_shared_equals_repeated(captioner)
