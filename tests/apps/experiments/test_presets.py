"""Every preset has the values of its paper, which values_of_the_papers.py lists by hand."""

from transformers import TrainingArguments

from hf_captionrl.apps.experiments.arguments import row_names
from hf_captionrl.data.bag_curriculum import PAPER_SCHEDULE
from reproduction.real import columns_of
from tests.apps.experiments.test_arguments import CONFIGS, parsed
from tests.apps.experiments.values_of_the_papers import PAPERS

# Options that have another name than in the tables of values.
FIELDS = dict(
    pair.split(":")
    for pair in """
    start:model_name_or_path fresh:fresh_language_model rank:lora_r dropout:lora_dropout vision:vision_model
    gpt:language_model data:dataset_name folder:data_dir frames:num_frames train_column:train_captions_column
    test_column:test_references_column truematch:bags scorer:scorer_name_or_path judge:held_out_scorer_name_or_path
    prefix:clip_prefix rate:learning_rate decay:weight_decay epochs:num_train_epochs steps:max_steps
    warmup:warmup_steps beams:generation_num_beams longest:generation_max_new_tokens
    longest_reference:max_caption_length captions:captions_per_image smoothing:mle_label_smoothing
    frozen_tower:freeze_vision_tower reward:reward_kind scope:distractor_scope scale:similarity_scale
    retrieval:retrieval_weight cider:cider_weight train_longest:max_completion_length samples:num_generations
    entropy:entropy_weight eos:cider_eos repetition:repetition_weight truncation:truncation_weight
    xe_epochs:rl_start_epoch xe_rate:xe_learning_rate mle_rate:mle_learning_rate lora_targets:lora_target_modules
    controls:compare_mle_weights references:caption_column frequencies:cider_frequencies bank:bank_images
    features:bag_features bank_batch:bank_batch_size hard:num_hard_distractors curves:learning_curves
    selected:load_best_model_at_end
    """.split()
)


def value(key: str, recipe: str, arguments):
    config = next(a for a in arguments if isinstance(a, TrainingArguments))
    if key == "recipe":
        return recipe
    if key == "schedule":
        return str(config.lr_scheduler_type).rpartition(".")[2].lower()
    if key == "batch":
        return config.per_device_train_batch_size * config.gradient_accumulation_steps
    if key == "bags" and hasattr(config, "bag_schedule"):
        schedule = config.bag_schedule
        return int(schedule) if str(schedule).isdigit() else schedule
    if key == "train_beams":
        return config.generation_kwargs["num_beams"]
    if key == "scale":
        return {"code": "model"}.get(config.similarity_scale, config.similarity_scale)
    option = FIELDS.get(key, key)
    owners = [a for a in arguments if hasattr(a, option)]
    assert owners, key
    return getattr(owners[0], option)


def test_a_preset_has_the_values_of_its_paper():
    for name, wanted in PAPERS.items():
        recipe, arguments = parsed(name)
        expected = {key: value for key, value in wanted.items() if key != "measures"}
        assert {key: value(key, recipe, arguments) for key in expected} == expected, name
        assert wanted["measures"] - columns_of(name) == set(), name


def test_every_preset_of_a_paper_is_in_the_table():
    small = ("scenes", "dose", "flickr8k", "tiny", "moving_scenes", "scenes_mle")
    files = [file for file in CONFIGS.glob("*/*.yaml") if file.parent.name != "rows" and file.stem not in small]
    bases = {f"{file.parent.name}/{file.stem}" for file in files}
    rows = {name for name in row_names(CONFIGS) if name.split("/")[1] not in small}
    assert rows | bases == set(PAPERS)


def test_the_curriculum_of_bags_is_the_papers():
    assert PAPER_SCHEDULE == {3: 2, 8: 3, 10: 5, 12: 7, 14: 10, 17: 15, 20: 20}
