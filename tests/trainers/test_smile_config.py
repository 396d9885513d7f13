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
    ("arguments", "message"),
    [
        ({"mle_weight": 1.5}, r"mle_weight is 1.5.*\[0, 1\]"),
        ({"first_token": "last"}, "Use 'mle', 'shift' or 'smile'"),
        ({"subset": "nouns"}, "Use 'caption', 'random' or 'reverse'"),
        ({"preset": "blog"}, "Use one of"),
        ({"num_random": 0}, "Use at least 1"),
        ({"mle_label_smoothing": 1.0}, r"\[0, 1\)"),
        ({"random_draw": "word"}, "Use 'sequence' or 'position'"),
        ({"cache_image_features": True}, "freeze_vision_tower=True"),
        ({"feature_cache_dtype": "int8"}, "Use 'float32' or 'float16'"),
        ({"remove_unused_columns": True}, "Leave it False"),
        ({"max_caption_length": 1}, "at least 2"),
    ],
)
def test_bad_values_name_the_remedy(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        SmileConfig(str(tmp_path), **arguments)
