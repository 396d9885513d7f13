"""Loading a checkpoint that is not a captioner raises an error that says what it is."""

import pytest
from transformers import (
    Blip2QFormerConfig,
    BloomConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    SiglipConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_captionrl.captioners import load_captioner

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def models():
    return {
        "llama": (LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=20)), "reads only text, not images"),
        "t5": (
            T5ForConditionalGeneration(
                T5Config(d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=20, decoder_start_token_id=0)
            ),
            "reads only text, not images",
        ),
        "vit": (ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=8)), "classifies images"),
    }


@pytest.mark.parametrize("name", ["llama", "t5", "vit"])
def test_loading_a_model_or_folder_of_another_kind_raises(name, tmp_path):
    model, reason = models()[name]
    with pytest.raises(
        ValueError, match=rf"not a captioner of a supported family.*{reason}.*Load a vision-to-text model"
    ):
        load_captioner(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"model type '{name}'.*{reason}"):
        load_captioner(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(), "reads only text"),
        (ResNetConfig(), "classifies images"),
        (SiglipConfig(), "Use load_scorer to load it"),
        (CLIPVisionConfig(), "Use load_scorer to load it"),
        (Blip2QFormerConfig(), "Load a vision-to-text model"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_loading_a_configuration_of_another_kind_raises(config, reason, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason):
        load_captioner(tmp_path)
