"""The ClipCap model: equality with the published code (reimplemented here), generation, processor, saving, Auto classes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, OPTConfig, SiglipVisionConfig

from hf_captionrl.captioners import ClipCapCaptioner, load_captioner
from hf_captionrl.captioners.clipcap import ClipCapConfig, ClipCapForConditionalGeneration
from tests.captioners.test_decoding import multinomial_of
from tests.tiny import HIDDEN, IMAGE_SIZE, tiny_captioner, tiny_clipcap, tiny_images
from tests.tolerances import assert_close

ROOT = Path(__file__).parents[2]
MAPPERS = {
    "mlp": {},
    "mlp, normalised": {"normalize_image_embeds": True},
    "transformer": {"mapping_type": "transformer", "clip_length": 4, "num_mapper_layers": 2, "num_mapper_heads": 4},
}


def inputs(processor, captions=("a red cat", "two dog on a cat", "bird")):
    batch = processor(images=tiny_images(len(captions)), text=list(captions), padding=True, return_tensors="pt")
    return dict(batch)


def published_mapper(model, prefix):
    """`MLP` or `TransformerMapper` of the published train.py, computed from a state dict."""
    w = {name: value.detach() for name, value in model.mapper.state_dict().items()}
    B = prefix.size(0)
    P = model.config.prefix_length
    if model.config.mapping_type == "mlp":
        hidden = torch.tanh(prefix @ w["model.0.weight"].T + w["model.0.bias"])
        return (hidden @ w["model.2.weight"].T + w["model.2.bias"]).view(B, P, -1)
    C, heads = model.config.clip_length, model.config.num_mapper_heads
    x = (prefix @ w["linear.weight"].T + w["linear.bias"]).view(B, C, -1)
    x = torch.cat((x, w["prefix_const"].unsqueeze(0).expand(B, -1, -1)), dim=1)
    width = x.size(-1)
    for i in range(model.config.num_mapper_layers):
        layer = {k.removeprefix(f"transformer.layers.{i}."): v for k, v in w.items()}
        y = F.layer_norm(x, (width,), layer["norm1.weight"], layer["norm1.bias"])
        n = y.size(1)
        queries = (y @ layer["attn.to_queries.weight"].T).reshape(B, n, heads, width // heads)
        both = (y @ layer["attn.to_keys_values.weight"].T).reshape(B, n, 2, heads, width // heads)
        keys, values = both[:, :, 0], both[:, :, 1]
        attention = torch.einsum("bnhd,bmhd->bnmh", queries, keys) * (width // heads) ** -0.5
        out = torch.einsum("bnmh,bmhd->bnhd", attention.softmax(dim=2), values).reshape(B, n, width)
        x = x + out @ layer["attn.project.weight"].T + layer["attn.project.bias"]
        y = F.layer_norm(x, (width,), layer["norm2.weight"], layer["norm2.bias"])
        y = torch.relu(y @ layer["mlp.fc1.weight"].T + layer["mlp.fc1.bias"])
        x = x + y @ layer["mlp.fc2.weight"].T + layer["mlp.fc2.bias"]
    return x[:, C:]


def published_logits(model, pixel_values, tokens):
    """`ClipCaptionModel.forward` of the published code, without a start token, and its slice for the loss."""
    encoder = model.vision_tower.encoder
    prefix = encoder.visual_projection(encoder.vision_model(pixel_values).pooler_output)
    if model.config.normalize_image_embeds:
        prefix = prefix / prefix.norm(2, -1, keepdim=True)
    embedding_text = model.language_model.transformer.wte(tokens)
    embedding_cat = torch.cat((published_mapper(model, prefix), embedding_text), dim=1)
    logits = model.language_model(inputs_embeds=embedding_cat).logits
    return logits[:, model.config.prefix_length - 1 : -1]


@pytest.mark.parametrize("mapper", MAPPERS)
def test_forward_equals_the_published_code(mapper):
    model, processor = tiny_clipcap(**MAPPERS[mapper])
    batch = inputs(processor)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    output = model(**batch, labels=labels)
    assert output.logits.shape == (*batch["input_ids"].shape, model.config.text_config.vocab_size)
    tokens = batch["input_ids"][:, 1:]
    expected = published_logits(model, batch["pixel_values"], tokens)  # (B, T - 1, V)
    kept = batch["attention_mask"][:, 1:].bool()
    assert_close(output.logits[:, :-1][kept], expected[kept], ulps=64)
    assert_close(output.loss, F.cross_entropy(expected[kept], tokens[kept]))
    # The embedding of the start token has no effect; the image does.
    with torch.no_grad():
        other = model(**{**batch, "input_ids": torch.cat([torch.full_like(tokens[:, :1], 7), tokens], 1)}).logits
        swapped = model(**{**batch, "pixel_values": batch["pixel_values"].flip(0)}).logits
    torch.testing.assert_close(other, output.logits)
    assert (swapped - output.logits).abs().max() > 1e-2
    # Negative control of the comparison, with one changed weight.
    with torch.no_grad():
        next(model.mapper.parameters()).view(-1)[0] += 1.0
        assert (model(**batch).logits[:, :-1][kept] - expected[kept]).abs().max() > 1e-3


def test_beams_have_the_scores_of_their_tokens():
    model, processor = tiny_clipcap()
    batch = inputs(processor, ["", "", ""])
    settings = {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "return_dict_in_generate": True}
    beams = model.generate(batch["pixel_values"], max_new_tokens=6, output_scores=True, **settings)
    end = processor.tokenizer.eos_token_id
    assert beams.sequences.size(0) == 6
    for index, (row, score) in enumerate(zip(beams.sequences, beams.sequences_scores, strict=True)):
        new = row[1:].tolist()
        new = new[: new.index(end) + 1] if end in new else new
        ids = torch.tensor([[row[0].item(), *new]])
        logits = model(pixel_values=batch["pixel_values"][index // 2][None], input_ids=ids).logits[0, :-1]
        assert_close(score, logits.log_softmax(-1)[torch.arange(len(new)), torch.tensor(new)].mean(), ulps=32)
    # DiscriTune's 40 tokens are 10 prefix vectors and 30 tokens of the caption.
    length = model.config.prefix_length + 4
    assert model.generate(batch["pixel_values"], max_length=length, do_sample=False).size(1) <= 1 + 4


def test_generation_stops_at_the_first_token_with_a_full_stop():
    model, processor = tiny_clipcap(text={"vocab_size": 271})
    tokenizer = processor.tokenizer
    tokenizer.add_tokens(["x.y"])
    stops = processor.period_token_ids()
    assert stops[0] == tokenizer.convert_tokens_to_ids(".")
    assert tokenizer.convert_tokens_to_ids("x.y") in stops
    pixel_values = processor(images=tiny_images(3), return_tensors="pt")["pixel_values"]
    model.config.period_token_ids = stops
    with torch.no_grad():  # make it likely to be sampled
        model.language_model.lm_head.weight[stops] += 0.5 * model.language_model.lm_head.weight.std()

    def sample(**more):
        torch.manual_seed(0)
        settings = {"do_sample": True, "top_k": 0, "num_return_sequences": 40, "max_new_tokens": 30}
        return model.generate(pixel_values, **settings, **more)

    assert any(set(row[:-1]) & set(stops) for row in sample().tolist())  # without stop_at_period it continues
    stopped = sample(stop_at_period=True)
    ends = [next((i for i, token in enumerate(row) if token in stops), None) for row in stopped.tolist()]
    for row, at in zip(stopped.tolist(), ends, strict=True):
        assert at is None or set(row[at + 1 :]) <= {tokenizer.pad_token_id}
    assert len(ends) - ends.count(None) > 5
    model.config.stop_at_period = True
    assert torch.equal(sample(), stopped)


def test_other_towers_and_language_models():
    torch.manual_seed(0)
    small = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 40}
    opt = OPTConfig(
        **text, hidden_size=48, word_embed_proj_dim=24, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4
    )
    vision = SiglipVisionConfig(**small, image_size=IMAGE_SIZE, patch_size=8)
    pixels = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    for language in (LlamaConfig(**small, **text), opt):
        model = ClipCapForConditionalGeneration(ClipCapConfig(vision, language, prefix_length=4)).eval()
        pooled = model.vision_tower.encoder(pixels).pooler_output
        assert torch.equal(model.get_image_features(pixels).pooler_output, pooled)
        assert model.get_image_features(pixels).last_hidden_state.shape == (2, 1, HIDDEN)
        got = model.generate(pixels, max_new_tokens=5, do_sample=False, num_beams=2)
        assert got.size(0) == 2
        ids = torch.randint(3, 60, (2, 6))
        loss = model(pixel_values=pixels, input_ids=ids, labels=ids).loss
        loss.backward()
        assert model.mapper.model[0].weight.grad.abs().sum() > 0
    fresh = ClipCapForConditionalGeneration(ClipCapConfig(vision, opt, mapping_type="transformer", num_mapper_heads=4))
    assert 0.8 < fresh.mapper.prefix_const.std() < 1.2  # as published


def test_clipcap_processor_prepends_the_start_token(tmp_path):
    _, processor = tiny_clipcap()
    batch = processor(images=tiny_images(2), text=["a cat", "red"], padding=True, return_tensors="pt")
    start = processor.tokenizer.bos_token_id
    assert batch["input_ids"][:, 0].tolist() == [start, start]
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert processor.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["a cat", "red"]
    assert set(processor(images=tiny_images(1))) == {"pixel_values"}
    processor.tokenizer.bos_token = None
    with pytest.raises(ValueError, match="no start token"):
        processor(text="a cat")


# Models import modules while the modules of the Auto classes are being imported.
ORDERS = (
    "from transformers import AutoModelForImageTextToText; import hf_captionrl",
    "import hf_captionrl",
    "import hf_captionrl; from transformers import AutoProcessor",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clipcap")
    model, processor = tiny_clipcap()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    pixel_values = processor(images=tiny_images(2), return_tensors="pt")["pixel_values"]
    written = model.generate(pixel_values, max_new_tokens=5, do_sample=False).tolist()
    torch.save(pixel_values, folder / "pixels.tensor")
    return folder, written


WRITE = """
import sys, json, torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
folder = sys.argv[1]
is_lazy = "hf_captionrl.captioners.clipcap.modeling_clipcap" not in sys.modules
model = AutoModelForImageTextToText.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)
config = AutoConfig.from_pretrained(folder)
pixels = torch.load(folder + "/pixels.tensor", weights_only=True)
ids = model.generate(pixels, max_new_tokens=5, do_sample=False).tolist()
kinds = [type(model).__name__, type(processor).__name__, type(config).__name__]
modules = [type(model).__module__, type(processor).__module__, type(config).__module__]
print(json.dumps([ids, kinds, modules, is_lazy]))
"""
KINDS = ["ClipCapForConditionalGeneration", "ClipCapProcessor", "ClipCapConfig"]


@pytest.mark.slow  # a fresh process per order
@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_load_clipcap(saved, order):
    folder, written = saved
    command = [sys.executable, "-c", f"{order}\n{WRITE}", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ids, kinds, modules, is_lazy = json.loads(done.stdout.splitlines()[-1])
    assert (ids, kinds, is_lazy) == (written, KINDS, True)
    assert all(module.startswith("hf_captionrl.") for module in modules)


def stopping(**settings):
    model, processor = tiny_clipcap(stop_at_period=True, **settings)
    processor.tokenizer.add_tokens(["x.y"])
    model.resize_token_embeddings(len(processor.tokenizer))
    captioner = load_captioner(model, processor=processor)
    assert isinstance(captioner, ClipCapCaptioner)
    return captioner


def test_the_end_token_is_the_full_stop():
    captioner = stopping()
    period = captioner.tokenizer.convert_tokens_to_ids(".")
    other = captioner.tokenizer.convert_tokens_to_ids("x.y")
    end = captioner.tokenizer.eos_token_id
    assert captioner.eos_token_id == period
    assert captioner.start_token_id == captioner.pad_token_id == end
    assert captioner.end_token_ids[0] == period
    assert set(captioner.end_token_ids) == {period, other, end}
    assert captioner.base_model.config.period_token_ids == list(captioner.end_token_ids[:-1])
    plain = tiny_captioner("clipcap")
    assert plain.end_token_ids == (plain.eos_token_id,) == (end,)
    # Every encoded caption ends with exactly one full stop, also if the data have none.
    labels = captioner.encode_captions(["a red cat"])["labels"][0]
    for caption in ("a red cat.", "a red cat .  ", "a red cat..."):
        assert torch.equal(captioner.encode_captions([caption])["labels"][0], labels)
    assert labels[-1] == period
    assert (labels[1:-1] != period).all()
    assert captioner.decode(labels[None, 1:]) == ["a red cat."]
    assert "." not in plain.decode(plain.encode_captions(["a red cat"])["labels"][:, 1:])[0]
    assert captioner.encode_captions(["."])["labels"].shape == (1, 3)  # a caption of full stops only is not empty


def test_log_probs_include_the_stop_token():
    captioner = stopping(seed=2)
    pixel_values = captioner.encode_images(tiny_images(2))["pixel_values"]
    torch.manual_seed(0)
    settings = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "num_return_sequences": 60}
    written = captioner.generate(pixel_values=pixel_values, **settings)
    ends = set(captioner.end_token_ids)
    seen = set()
    for ids, mask, ended, caption in zip(written.ids, written.mask, written.ended, written.captions, strict=True):
        row = ids.tolist()
        at = next((i for i, token in enumerate(row) if token in ends), None)
        assert bool(ended) == (at is not None)
        assert int(mask.sum()) == (len(row) if at is None else at + 1)
        assert mask[: int(mask.sum())].all()
        if at is not None:
            seen.add(row[at])
            assert caption.endswith(".") or row[at] != captioner.eos_token_id
    assert len(seen) > 1  # by "." and by another token
    batch = captioner.encode_completions(written.ids, written.mask)
    got = captioner.log_probs({**batch, "pixel_values": pixel_values})
    counts = (captioner.align_labels(batch["labels"]) != -100).sum(1)
    assert torch.equal(counts, written.mask.sum(1))
    # DiscriTune: mean of log p over the tokens, including the stop token, given the prefix without start token.
    model = captioner.base_model
    with torch.no_grad():
        prefix = model.prefix_embeds(pixel_values)
        for row in range(0, 120, 7):
            tokens = written.ids[row][written.mask[row]]
            embeds = torch.cat([prefix[row // 60], model.get_input_embeddings()(tokens)])
            logits = model.language_model(inputs_embeds=embeds[None]).logits[0, model.config.prefix_length - 1 : -1]
            expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].mean()
            assert_close(got[row].sum() / counts[row], expected)


def test_stop_at_period_is_an_argument_and_is_saved(tmp_path, monkeypatch):
    tiny_captioner("clipcap").save_pretrained(tmp_path / "plain")
    assert not load_captioner(tmp_path / "plain").base_model.config.stop_at_period
    captioner = load_captioner(tmp_path / "plain", stop_at_period=True)
    assert captioner.eos_token_id == captioner.tokenizer.convert_tokens_to_ids(".")
    captioner.save_pretrained(tmp_path / "stopping")
    again = load_captioner(tmp_path / "stopping")
    assert again.end_token_ids == captioner.end_token_ids
    images = again.encode_images(tiny_images(2))["pixel_values"]
    torch.manual_seed(1)
    left = again.generate(pixel_values=images, do_sample=True, max_new_tokens=20).ids
    torch.manual_seed(1)
    monkeypatch.setattr(torch, "multinomial", multinomial_of(torch.rand(20, 2)))
    right = again.model.generate(images, do_sample=True, max_new_tokens=20)[:, 1:]  # with transformers alone
    assert left.tolist() == right.tolist()
    assert load_captioner(tmp_path / "stopping", stop_at_period=False).end_token_ids == (right.new_tensor(269).item(),)


def test_features_are_the_image_embedding():
    captioner = tiny_captioner("clipcap")
    pixel_values = captioner.encode_images(tiny_images(3))["pixel_values"]
    features = captioner.image_features(pixel_values)
    assert features.shape == (3, 1, 24)
    assert torch.equal(features[:, 0], captioner.base_model.get_image_features(pixel_values).pooler_output)
    # Features are normalised after they are cached, so that the cache works with and without normalisation.
    model, processor = tiny_clipcap(normalize_image_embeds=True)
    unit = load_captioner(model, processor=processor)
    assert unit.vision_signature() == captioner.vision_signature()
    ids = unit.generate(image_features=3.0 * features.detach(), max_new_tokens=6).ids
    assert ids.tolist() == unit.generate(pixel_values=pixel_values, max_new_tokens=6).ids.tolist()
