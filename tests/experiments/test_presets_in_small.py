"""Presets of the embedded world share with their papers what values_in_small.py does not list as a difference."""

import re

import pytest

from hf_captionrl.apps.experiments.self_retrieval import runs_of
from scripts.reproduction.real import is_embedded, preset_names
from tests.experiments.test_presets_of_the_papers import parse, value
from tests.experiments.values_in_small import IN_SMALL, OF_NO_PAPER, RL_KEYS, SLE_KEYS, SMILE_KEYS
from tests.experiments.values_of_the_papers import PAPERS
from tests.tiny import tiny_captioner


def values(name, variant, keys):
    recipe, arguments = parse(name)
    if variant is not None:
        *others, bags, config = arguments
        arguments = (*others, bags, runs_of(config, bags.named_variants)[variant])
    return {key: value(key, recipe, arguments) for key in keys}


def keys_of(name):
    recipe = parse(name)[0]
    return RL_KEYS if recipe.startswith("self_retrieval") else SLE_KEYS if recipe == "sle_blip" else SMILE_KEYS


@pytest.mark.parametrize(("name", "variant"), IN_SMALL, ids=lambda part: str(part))
def test_a_run_in_small_differs_from_the_papers_only_where_the_table_says(name, variant):
    paper, differs = IN_SMALL[name, variant]
    expected = {key: wanted for key, wanted in PAPERS[paper].items() if key in keys_of(name)} | differs
    assert set(differs) <= set(keys_of(name))
    assert values(name, variant, expected) == expected


def test_every_run_in_small_is_in_the_table():
    small = {name for name in preset_names() if is_embedded(name)}
    assert {name for name, _ in IN_SMALL} | OF_NO_PAPER == small
    assert not {name for name, _ in IN_SMALL} & OF_NO_PAPER
    for name in small - OF_NO_PAPER:
        recipe, arguments = parse(name)
        variants = set(arguments[-2].named_variants) if recipe.startswith("self_retrieval") else set()
        assert {variant for preset, variant in IN_SMALL if preset == name} == variants | {None}, name


def test_what_the_table_compares_is_in_the_papers_values():
    """A key that no preset of a paper has would be compared with nothing."""
    for keys, prefixes in ((RL_KEYS, ("discritune/", "ndlb/")), (SLE_KEYS, ("sle",)), (SMILE_KEYS, ("smile",))):
        known = {key for name, row in PAPERS.items() if name.startswith(prefixes) for key in row}
        assert set(keys) <= known


def test_the_other_weights_and_alphas_are_the_papers():
    """Table 5 of SMILE, and section 5.1 of SLE with SLL as alpha 1."""
    for name, weights in {"smile_blip/scenes": [1.0, 0.01], "smile/scenes/table5": [0.5, 0.1]}.items():
        assert values(name, None, ["controls"]) == {"controls": weights}
    (alphas,) = [a.compare_alphas for a in parse("sle/scenes/frontier")[1] if hasattr(a, "compare_alphas")]
    assert sorted(alphas) == [0.25, 0.5, 0.75, 1.0]


# BLIP's layers for GPT-2's `attn.c_attn` and `attn.c_proj`, with the output of the MLP, and CLIP's attention input and MLP.
LANGUAGE = {f"{kind}.self.{part}" for kind in ("attention", "crossattention") for part in ("query", "key", "value")}
LANGUAGE |= {"attention.output.dense", "crossattention.output.dense", "layer.N.output.dense"}
VISION = {"self_attn.qkv", "mlp.fc1", "mlp.fc2"}


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("ndlb/scenes/generic-l", LANGUAGE),
        ("ndlb/scenes/holistic-v", VISION),
        ("ndlb/scenes/blend-lv", LANGUAGE | VISION),
    ],
)
def test_lora_in_small_is_on_the_same_layers_of_blip(preset, expected):
    model = parse(preset)[1][0]
    captioner = tiny_captioner("blip")
    config = captioner.lora_config(**model.peft_config)
    names = [name for name, _ in captioner.base_model.named_modules() if re.fullmatch(config.target_modules, name)]
    found = {re.sub(r"\.\d+\.", ".N.", name) for name in names}
    assert {
        next(end for end in sorted(expected, key=len, reverse=True) if name.endswith(end)) for name in found
    } == expected
    assert (config.r, config.lora_alpha, config.lora_dropout) == (32, 16, 0.0)
