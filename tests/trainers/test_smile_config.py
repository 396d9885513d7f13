"""SmileConfig: defaults of the paper, presets, and errors that name the remedy."""

import pytest

from hf_captionrl.trainers import SmileConfig


def test_paper_defaults(tmp_path):
    config = SmileConfig(str(tmp_path))
    assert config.learning_rate == 1e-5
    assert config.weight_decay == 0.05
    assert config.lr_scheduler_type == "cosine"
    assert config.per_device_train_batch_size == 32
    assert config.num_train_epochs == 5
    assert config.mle_weight == 0.0
    assert config.max_caption_length == 40
    assert (config.generation_num_beams, config.generation_max_new_tokens) == (3, 75)
    assert (config.mle_label_smoothing, config.random_draw) == (0.0, "sequence")
    assert config.remove_unused_columns is False


def test_code_preset_sets_only_missing_values(tmp_path):
    config = SmileConfig(str(tmp_path), preset="code")
    assert (config.mle_label_smoothing, config.random_draw) == (0.1, "position")
    config = SmileConfig(str(tmp_path), preset="code", mle_label_smoothing=0.0)
    assert (config.mle_label_smoothing, config.random_draw) == (0.0, "position")


def test_best_model_is_chosen_by_retrieval(tmp_path):
    config = SmileConfig(str(tmp_path), load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert config.metric_for_best_model == "recall_at_1"
    assert config.greater_is_better


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mle_weight", 1.5),
        ("first_token", "last"),
        ("subset", "nouns"),
        ("captions_per_image", "two"),
        ("preset", "blog"),
        ("num_random", 0),
        ("mle_label_smoothing", 1.0),
        ("random_draw", "word"),
        ("cache_image_features", True),  # without a frozen tower
        ("feature_cache_dtype", "int8"),
        ("cache_pixels", "png"),
        ("image_decoder", "opencv"),
        ("frame_pooling", "max"),
        ("generation_num_beams", 0),
        ("generation_max_new_tokens", 0),
        ("remove_unused_columns", True),
        ("max_caption_length", 1),
        ("per_device_train_batch_size", 0),
        ("gradient_accumulation_steps", 0),
        ("learning_rate", float("nan")),
        ("weight_decay", -0.1),
        ("max_grad_norm", float("inf")),
        ("adam_beta1", 1.0),
        ("neftune_noise_alpha", -1.0),
    ],
)
def test_bad_values_are_named(tmp_path, name, value):
    with pytest.raises(ValueError, match=name):
        SmileConfig(str(tmp_path), **{name: value})
