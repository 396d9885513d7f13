"""PEFT: LoRA on language model, vision tower, both and the head, and modules trained in full."""

import copy
import math
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

from hf_captionrl.apps.experiments.arguments import ModelArguments
from hf_captionrl.captioners import language_lora, load_captioner, mean_cross_entropy
from hf_captionrl.captioners.head_tap import is_tappable
from tests.captioners.test_head_tap import gradients, smile
from tests.tiny import tiny_captioner, tiny_captions, tiny_clipcap, tiny_images
from tests.tolerances import assert_close


def adapted(family: str, add) -> tuple:
    """A captioner with a non-zero adapter, and a batch."""
    captioner = tiny_captioner(family, prompt="a ")
    batch = captioner.collate(tiny_images(3), tiny_captions(3))
    torch.manual_seed(3)
    add(captioner)
    with torch.no_grad():
        for name, parameter in captioner.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return captioner, batch


@pytest.mark.parametrize("how", ["lora with dropout and bias", "modules_to_save", "dora", "both", "two"])
@pytest.mark.parametrize(("family", "head"), [("blip", "text_decoder.cls.predictions.decoder"), ("git", "output")])
def test_adapters_on_the_head_itself(family, head, how):

    def add(captioner):
        settings = {"r": 4, "target_modules": re.escape(head)}
        if how == "lora with dropout and bias":
            settings |= {"lora_dropout": 0.3, "lora_bias": True}
        if how == "dora":
            settings |= {"use_dora": True}
        if how == "modules_to_save":
            settings |= {"target_modules": captioner.lora_targets(), "modules_to_save": [head]}
        if how == "both":
            settings |= {"target_modules": f"{captioner.lora_targets()}|{re.escape(head)}"}
        captioner.model = get_peft_model(captioner.model, LoraConfig(**settings))
        if how == "two":
            captioner.model.add_adapter("second", LoraConfig(**settings))
            captioner.model.base_model.set_adapter(["default", "second"])

    captioner, batch = adapted(family, add)
    captioner.model.train()
    assert is_tappable(captioner.output_head(captioner.base_model)) == (how != "dora")
    torch.manual_seed(5)
    tapped = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    tapped.backward()
    ours = gradients(captioner.model)
    assert ours
    captioner.model.zero_grad()
    torch.manual_seed(5)
    full = captioner.model(**batch).loss
    full.backward()
    assert_close(tapped, full)
    theirs = gradients(captioner.model)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_close(ours[name], theirs[name], ulps=128)
    # SMILE equals the subset of the full logits.
    captioner.model.eval()
    fused = captioner.model(**batch, head_objective=smile).loss
    captioner.use_full_logits = True
    assert_close(fused, captioner.model(**batch, head_objective=smile).loss)


def test_disabled_and_merged_adapters():
    captioner, batch = adapted(
        "git", lambda c: setattr(c, "model", get_peft_model(c.model, LoraConfig(r=4, target_modules="output")))
    )
    on = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    with captioner.model.disable_adapter():
        off = captioner.model(**batch, head_objective=mean_cross_entropy).loss
        torch.testing.assert_close(off, captioner.model(**batch).loss)
    assert abs(on - off) > 1e-3
    captioner.model.merge_adapter()
    assert_close(captioner.model(**batch, head_objective=mean_cross_entropy).loss, on)


LAYERS = 2
GPT2 = {f"language_model.transformer.h.{n}.attn.{part}" for n in range(LAYERS) for part in ("c_attn", "c_proj")}
CLIP = {
    f"vision_tower.encoder.vision_model.encoder.layers.{n}.{part}"
    for n in range(LAYERS)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1", "mlp.fc2")
}
C_ATTN = "language_model.transformer.h.0.attn.c_attn"
FC1 = "vision_tower.encoder.vision_model.encoder.layers.0.mlp.fc1"
RATE, STEPS, BETAS = 9e-8, 200, (0.9, 0.999)
WIDTH = 192  # of the language model: sqrt(3 * 192) = 24


@pytest.mark.parametrize(("tune", "expected"), [("language", GPT2), ("vision", CLIP), ("both", GPT2 | CLIP)])
def test_adapted_modules_of_clipcap_by_their_full_names(tune, expected):
    captioner = tiny_captioner("clipcap")
    captioner.add_lora(tune, r=2)
    trained = {n.removeprefix("base_model.model.") for n, p in captioner.model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0] for name in trained if ".lora_" in name} == expected
    whole = {name for name in trained if ".lora_" not in name}
    assert whole
    assert all(name.startswith("mapper.modules_to_save.") for name in whole)


def wide_captioner():
    model, processor = tiny_clipcap(text={"n_embd": WIDTH})
    return load_captioner(model, processor=processor)


def trained_update(init: str, place: str):
    """Update of one stored weight after 200 steps of AdamW on a fixed gradient; and initial factors and that gradient."""
    captioner = wide_captioner()
    torch.manual_seed(11)
    captioner.add_lora("both", init=init)
    captioner.model.double()  # in fp32 a gradient of almost 0 can have either sign, and Adam steps by the sign
    layer = captioner.base_model.get_submodule(place)
    factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    start = [factor.detach().clone() for factor in factors]
    stored = layer.get_base_layer().weight
    is_conv1d = "transformer.h" in place
    width, out = stored.shape if is_conv1d else stored.shape[::-1]
    inputs, direction = torch.randn(16, width, dtype=torch.float64), torch.randn(16, out, dtype=torch.float64)
    optimizer = torch.optim.AdamW(factors, lr=RATE, betas=BETAS, weight_decay=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (layer(inputs) * direction).sum().backward()
        optimizer.step()
    gradient = inputs.T @ direction  # (in, out)
    update = (factors[1] @ factors[0]).detach().T * 16 / 32  # (in, out)
    return (update, start, gradient) if is_conv1d else (update.T, start, gradient.T)


def update_of_the_authors(random, gradient, *, rank=32, alpha=16):
    """W + (B A) * alpha / rank for a stored weight W, B = 0, A ~ N(0, 1), trained with AdamW as its paper writes it."""
    b, a = torch.zeros(gradient.shape[0], rank, dtype=torch.float64), random.double()
    assert a.shape == (rank, gradient.shape[1])
    weights, scale = [a, b], alpha / rank
    means = [torch.zeros_like(w) for w in weights]
    squares = [torch.zeros_like(w) for w in weights]
    for step in range(1, STEPS + 1):
        a, b = weights
        for number, g in enumerate((b.T @ gradient * scale, gradient @ a.T * scale)):
            means[number] = BETAS[0] * means[number] + (1 - BETAS[0]) * g
            squares[number] = BETAS[1] * squares[number] + (1 - BETAS[1]) * g * g
            mean, square = means[number] / (1 - BETAS[0] ** step), squares[number] / (1 - BETAS[1] ** step)
            weights[number] = weights[number] * (1 - RATE * 0.01) - RATE * mean / (square.sqrt() + 1e-8)
    return weights[1] @ weights[0] * scale


@pytest.mark.parametrize("place", [C_ATTN, FC1])
def test_the_update_after_200_steps_is_that_of_the_authors_formula(place):
    update, (first, second), gradient = trained_update("paper", place)
    # transformers' Conv1D stores (in, out): there the authors' random factor is on the side of the outputs.
    random, zero = (second.T, first) if place == C_ATTN else (first, second)
    assert_close(update, update_of_the_authors(random, gradient), summands=STEPS * 32)
    assert abs(random.mean()) < 0.1
    assert abs(random.std() - 1) < 0.1
    assert not zero.any()


def test_the_update_with_pefts_initialisation_is_smaller_by_the_ratio_of_the_standard_deviations():
    paper, *_ = trained_update("paper", C_ATTN)
    peft, (first, second), _ = trained_update("peft", C_ATTN)
    ratio = math.sqrt(3 * WIDTH)  # uniform on [-1/sqrt(w), 1/sqrt(w)] has standard deviation 1/sqrt(3 w)
    assert abs(first.std() * ratio - 1) < 0.05
    assert not second.any()
    assert 0.9 * ratio < paper.norm() / peft.norm() < 1.1 * ratio
    assert round(math.sqrt(3 * 768)) == 48  # GPT-2


def test_the_initialisation_survives_a_copy_and_the_saved_configuration_is_pefts(tmp_path):
    captioner = wide_captioner()
    config = copy.deepcopy(language_lora(captioner, r=4, init="paper"))
    captioner.add_adapter(config)
    values = torch.cat([p.flatten() for n, p in captioner.model.named_parameters() if ".lora_B." in n])
    assert abs(values.std() - 1) < 0.05
    assert all(not p.any() for n, p in captioner.model.named_parameters() if ".lora_A." in n)
    captioner.model.save_pretrained(tmp_path)
    assert LoraConfig.from_pretrained(tmp_path).r == 4


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT")
def test_factors_of_an_adapter_that_the_model_had_are_kept():
    """The language model was loaded with a trained adapter; a new one goes into the vision tower."""
    captioner = wide_captioner()
    old = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    inject_adapter_in_model(old, captioner.base_model.language_model, "default")
    with torch.no_grad():
        for name, parameter in captioner.base_model.language_model.named_parameters():
            if ".lora_" in name:
                parameter.fill_(3.0)
    captioner.add_lora("vision", init="paper")
    factors = {n: p.detach() for n, p in captioner.model.named_parameters() if ".lora_" in n}
    language = [p for n, p in factors.items() if "language_model" in n]
    assert len(language) == 2 * LAYERS
    assert all((p == 3.0).all() for p in language)
    drawn = torch.cat([p.flatten() for n, p in factors.items() if "vision_tower" in n and ".lora_A." in n])
    assert abs(drawn.std() - 1) < 0.05
    assert not any(p.any() for n, p in factors.items() if "vision_tower" in n and ".lora_B." in n)


def test_unknown_modules_and_initialisations_are_refused():
    captioner = tiny_captioner("git")
    captioner.language_lora = r"gpt\..*"
    with pytest.raises(ValueError, match=r"GitForCausalLM matches 'gpt"):
        captioner.lora_targets()
    for options in ({"tune": "language", "lora_init": "gauss"}, {"lora_init": "paper"}):
        with pytest.raises(ValueError, match="lora_init"):
            ModelArguments(**options)
    assert ModelArguments(tune="both", lora_init="paper").peft_config["init"] == "paper"
