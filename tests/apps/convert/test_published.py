"""Checkpoints of the published code of BLIP and CLIP: tensors and outputs equal the same model in transformers."""

import open_clip
import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPConfig, CLIPModel, CLIPVisionModelWithProjection

from hf_captionrl.apps.convert.convert import convert
from hf_captionrl.captioners import load_captioner
from hf_captionrl.evaluation.metric_functions import metric_function
from hf_captionrl.retrieval import load_scorer
from tests.captioners.test_clipcap import MAPPERS, inputs, published_logits
from tests.retrieval.tiny_scorers import make_clip
from tests.tiny import HIDDEN, tiny_blip, tiny_clipcap, tiny_images
from tests.tolerances import assert_close

BLIP_NAMES = [
    ("vision_model.embeddings.class_embedding", "visual_encoder.cls_token"),
    ("vision_model.embeddings.position_embedding", "visual_encoder.pos_embed"),
    ("vision_model.embeddings.patch_embedding", "visual_encoder.patch_embed.proj"),
    ("vision_model.post_layernorm", "visual_encoder.norm"),
    ("vision_model.encoder.layers", "visual_encoder.blocks"),
    ("self_attn.qkv", "attn.qkv"),
    ("self_attn.projection", "attn.proj"),
    ("layer_norm", "norm"),
]
CLIP_NAMES = [
    ("vision_model.embeddings.class_embedding", "visual.class_embedding"),
    ("vision_model.embeddings.patch_embedding", "visual.conv1"),
    ("vision_model.embeddings.position_embedding.weight", "visual.positional_embedding"),
    ("vision_model.pre_layrnorm", "visual.ln_pre"),
    ("vision_model.post_layernorm", "visual.ln_post"),
    ("vision_model.encoder.layers", "visual.transformer.resblocks"),
    ("text_model.encoder.layers", "transformer.resblocks"),
    ("text_model.embeddings.token_embedding", "token_embedding"),
    ("text_model.embeddings.position_embedding.weight", "positional_embedding"),
    ("text_model.final_layer_norm", "ln_final"),
    ("layer_norm", "ln_"),
    ("self_attn.out_proj", "attn.out_proj"),
    ("mlp.fc1", "mlp.c_fc"),
    ("mlp.fc2", "mlp.c_proj"),
]


def original_blip(model):
    """The tensors of a captioner with the names of BLIP's code, which only differ in the vision tower."""
    found = {}
    for name, value in model.state_dict().items():
        if name.startswith("vision_model."):
            for ours, theirs in BLIP_NAMES:
                name = name.replace(ours, theirs)
        found[name] = value.clone()
    found["text_decoder.bert.embeddings.position_ids"] = torch.arange(8)[None]
    return found


def original_clip(model):
    """The tensors of a scorer with the names of OpenAI's code."""
    found = {}
    for name, value in model.state_dict().items():
        for ours, theirs in CLIP_NAMES:
            name = name.replace(ours, theirs)
        if name.endswith("_projection.weight"):
            name, value = ("visual.proj" if name.startswith("visual") else "text_projection"), value.T
        found[name] = value.clone()
    for kind in ("weight", "bias"):
        for name in [n for n in found if n.endswith(f"self_attn.q_proj.{kind}")]:
            layer = name.removesuffix(f"self_attn.q_proj.{kind}")
            parts = [found.pop(f"{layer}self_attn.{letter}_proj.{kind}") for letter in "qkv"]
            found[f"{layer}attn.in_proj_{kind}"] = torch.cat(parts)
    return {**found, "input_resolution": torch.tensor(16), "context_length": torch.tensor(8)}


def assert_same_tensors(folder, model):
    found, expected = load_file(folder / "model.safetensors"), model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def saved(model, processor, folder):
    model.config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def refused(message, state, folder, **settings):
    """A checkpoint of these tensors is refused in one line, and nothing is left behind."""
    torch.save(state, folder / "weights.pth")
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=message) as error:
        convert(folder / "weights.pth", folder / "refused", **settings)
    assert "\n" not in str(error.value)
    assert sorted(folder.iterdir()) == before


def test_training_checkpoint_of_blip_with_a_configuration(tmp_path):
    """What SMILE's training writes: weights, optimizer, configuration and epoch in one file."""
    model, processor = tiny_blip(seed=3)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=1e-5)
    weight.sum().backward()
    optimizer.step()
    config = {"vit": "base", "image_size": 384, "init_lr": 1e-5, "prompt": "a picture of "}
    content = {"model": original_blip(model), "optimizer": optimizer.state_dict(), "config": config, "epoch": 3}
    torch.save(content, tmp_path / "smile.pth")
    like = saved(model, processor, tmp_path / "like")
    report = convert(tmp_path / "smile.pth", tmp_path / "new", config=like)
    assert report.kind == "BLIP captioner"
    assert report.notes == ["smile.pth: omitted optimizer, config, epoch, which are not weights."]
    assert_same_tensors(tmp_path / "new", model)
    again, source = load_captioner(tmp_path / "new"), load_captioner(model, processor=processor)
    batch = source.encode_images(tiny_images(3, size=24))
    assert torch.equal(again.encode_images(tiny_images(3, size=24))["pixel_values"], batch["pixel_values"])
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert again.generate(**batch, **settings).captions == source.generate(**batch, **settings).captions


def test_blip_pretraining_checkpoint_keeps_the_captioner(tmp_path):
    model, _ = tiny_blip()
    model.config.save_pretrained(tmp_path / "like")
    parts = ("itm_head", "text_encoder", "vision_proj", "visual_encoder_m")
    more = {f"{part}.weight": torch.ones(2) for part in parts}
    torch.save({"model": {**original_blip(model), **more}}, tmp_path / "model_base.pth")
    report = convert(tmp_path / "model_base.pth", tmp_path / "new", config=str(tmp_path / "like"))
    assert_same_tensors(tmp_path / "new", model)
    assert report.notes == [f"Omitted {', '.join(parts)}, which captioning does not use."]


def test_image_positions_are_interpolated_as_transformers_does(tmp_path):
    model, processor = tiny_blip(seed=5)
    size = 2 * model.config.vision_config.image_size
    processor.image_processor.size = {"height": size, "width": size}
    like = saved(model, processor, tmp_path / "like")
    torch.save({"model": original_blip(model)}, tmp_path / "w.pth")
    convert(tmp_path / "w.pth", tmp_path / "new", config=like, image_size=size)
    larger = load_captioner(tmp_path / "new").base_model
    assert larger.config.vision_config.image_size == size
    pixels = torch.randn(2, 3, size, size)
    expected = model.vision_model(pixels, interpolate_pos_encoding=True).last_hidden_state
    assert_close(larger.vision_model(pixels).last_hidden_state, expected)
    convert(tmp_path / "w.pth", tmp_path / "same", config=like, image_size=size // 2)
    assert_same_tensors(tmp_path / "same", model)
    refused("image_size is 33", original_blip(model), tmp_path, config=like, image_size=33)


@pytest.mark.parametrize("names", ["openai", "open_clip"])
def test_weights_of_pac_s(tmp_path, names):
    """Its two checkpoints are training states of OpenAI's CLIP and of open_clip's, with GELU."""
    model, processor = make_clip()
    model.config.text_config.hidden_act = model.config.vision_config.hidden_act = "gelu"
    state = original_clip(model)
    if names == "open_clip":
        state = {name: value for name, value in state.items() if name not in ("input_resolution", "context_length")}
        sizes = {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 16, "mlp_ratio": 2}
        text = {"context_length": 12, "vocab_size": len(processor.tokenizer), "width": 16, "heads": 2, "layers": 2}
        theirs = open_clip.model.CLIP(
            8, sizes, text | {"mlp_ratio": 2, "context_length": len(state["positional_embedding"])}
        )
        assert theirs.load_state_dict(state, strict=False).missing_keys == []
        state = theirs.state_dict()
    torch.save({"state_dict": state, "epoch": 7}, tmp_path / "clip_ViT-B-32.pth")
    convert(tmp_path / "clip_ViT-B-32.pth", tmp_path / "new", config=saved(model, processor, tmp_path / "like"))
    again = load_scorer(tmp_path / "new")
    captions, images = ["a cat", "a red dog"], tiny_images(2, size=24)
    found = metric_function("pac_s", scorer=again)(captions, [["x"]] * 2, images)
    text = again.text_features([f"A photo depicts {caption}" for caption in captions])
    cosines = [float(t @ v) for t, v in zip(text, again.image_features(images), strict=True)]
    assert_close(found, [2 * max(cosine, 0) for cosine in cosines], dtype="float32", magnitude=2)
    if names == "open_clip":
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            features = torch.nn.functional.normalize(theirs.eval().encode_image(pixels), dim=1)
        assert_close(again.image_features(images), features, dtype="float32", ulps=256)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Folders of a CLIP and a GPT-2, as on the Hub."""
    folder = tmp_path_factory.mktemp("parts")
    model, processor = tiny_clipcap(seed=3)
    torch.manual_seed(0)
    # The projection is wrong, as in some published configurations.
    vision = model.config.vision_config.to_dict() | {"projection_dim": 512}
    text = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": HIDDEN}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    CLIPModel(config).save_pretrained(folder / "clip")
    processor.image_processor.save_pretrained(folder / "clip")
    model.language_model.save_pretrained(folder / "gpt2")
    processor.tokenizer.save_pretrained(folder / "gpt2")
    return {"vision_model": str(folder / "clip"), "language_model": str(folder / "gpt2")}


def published(model, path, *, mapper_alone=False, **changes):
    """A checkpoint in the format of the published code."""
    state = {f"clip_project.{name}": value for name, value in model.mapper.state_dict().items()}
    if not mapper_alone:
        state |= {f"gpt.{name}": value for name, value in model.language_model.state_dict().items()}
        for layer in range(2):  # buffers of old versions of transformers
            state[f"gpt.transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
            state[f"gpt.transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save({**state, **changes}, path)
    return path


@pytest.mark.parametrize("kind", MAPPERS)
def test_converted_checkpoint_equals_the_published_code(kind, parts, tmp_path):
    source, processor = tiny_clipcap(seed=7, **MAPPERS[kind])
    checkpoint = published(source, tmp_path / "weights.pt")
    settings = {"normalize_image_embeds": "normalised" in kind, "num_mapper_heads": 4}
    convert(checkpoint, tmp_path / "out", **parts, **settings)
    captioner = load_captioner(tmp_path / "out")
    model = captioner.model
    encoder = model.vision_tower.encoder
    original = CLIPModel.from_pretrained(parts["vision_model"])
    batch = inputs(processor)
    with torch.no_grad():
        expected = original.get_image_features(batch["pixel_values"]).pooler_output
        torch.testing.assert_close(model.get_image_features(batch["pixel_values"]).pooler_output, expected)
        source.vision_tower.encoder = CLIPVisionModelWithProjection(encoder.config)
        source.vision_tower.encoder.load_state_dict(encoder.state_dict())
        expected = published_logits(source, batch["pixel_values"], batch["input_ids"][:, 1:])
        logits = model(**batch).logits[:, :-1]
    kept = batch["attention_mask"][:, 1:].bool()
    assert_close(logits[kept], expected[kept], ulps=64)
    assert model.config.mapping_type == source.config.mapping_type
    assert model.config.prefix_length == source.config.prefix_length
    assert model.config.stop_at_period
    period = captioner.tokenizer.convert_tokens_to_ids(".")
    assert captioner.eos_token_id == period == captioner.end_token_ids[0]
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names
    assert not [name for name in names if name.endswith((".pt", ".bin"))]


def test_mapper_without_language_model_gets_the_published_one(parts, tmp_path):
    source, _ = tiny_clipcap(seed=7)
    checkpoint = published(source, tmp_path / "weights.pt", mapper_alone=True)
    report = convert(checkpoint, tmp_path / "out", **parts, stop_at_period=False)
    assert "only the mapper" in report.notes[0]
    model = load_captioner(tmp_path / "out").model
    reference, _ = tiny_clipcap(seed=3)
    for left, right in zip(model.language_model.parameters(), reference.language_model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(model.mapper.model[0].weight, source.mapper.model[0].weight)
    assert not model.config.stop_at_period


def test_files_that_are_not_checkpoints_raise(tmp_path):
    """Pickles with code are in tests/security/test_pickles.py."""
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty.pt").write_text("")
    torch.save({"epoch": 3}, tmp_path / "epoch.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    torch.save({"weight": torch.ones(1)}, tmp_path / "other.pt")
    for name in ("text.pt", "empty.pt", "epoch.pt", "list.pt", "script.pt", "other.pt"):
        with pytest.raises(ValueError, match=name) as caught:
            convert(tmp_path / name, tmp_path / "out")
        assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "shape", "shown"),
    [
        ("gpt.transformer.wte.weight", (9, 64), "transformer.wte"),
        ("clip_project.model.0.bias", (5,), r"model\.0\.bias"),
        ("clip_project.model.2.weight", (65, 96), r"\(65\)"),
        ("gpt.transformer.h.2.ln_1.weight", (64,), r"h\.2\.ln_1"),
        ("optimizer.step", (1,), "optimizer"),
        ("clip_project.prefix_const", (3, 48), "linear.weight"),
        ("gpt.transformer.ln_f.bias", None, r"ln_f\.bias"),
        ("clip_project.model.2.weight", None, r"model\.2\.weight"),
    ],
)
def test_tensors_that_do_not_match_raise(name, shape, shown, parts, tmp_path):
    state = torch.load(published(tiny_clipcap()[0], tmp_path / "weights.pt"), weights_only=True)
    state.pop(name, None)
    refused(shown, state | ({} if shape is None else {name: torch.ones(shape)}), tmp_path, **parts)
