"""A trainer of a tiny LLaVA with TRL's GRPO, and its rewards of fixed completions."""

from __future__ import annotations

import torch
from trl import GRPOConfig, GRPOTrainer

from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SelfRetrievalGRPOConfig, SelfRetrievalGRPOTrainer
from hf_captionrl.utils.model_files import model_path
from tests.tiny.chat import tiny_chat


def make_trainer(folder: str, rows: int = 8, **settings):
    """A rollout consists of all scenes."""
    data = load_scenes(num_train=rows, num_validation=1, num_test=1)["train"]
    data = data.add_column("mark", [100 + row for row in range(len(data))])
    model, processor = tiny_chat("llava")
    model = settings.pop("model", model)
    defaults = {
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "feature_cache_dir": f"{folder}/cache",
    }
    trainer_arguments = {"processing_class": processor, **settings.pop("trainer_arguments", {})}
    scorer = settings.pop("scorer", "default")
    args = SelfRetrievalGRPOConfig(folder, **{**defaults, **settings})
    scorer = load_scorer(model_path("scenes:clip-reward")) if scorer == "default" else scorer
    return SelfRetrievalGRPOTrainer(model, scorer, args, data, **trainer_arguments)


def trainer_of_trl(folder, data, rewards) -> GRPOTrainer:
    """TRL's own trainer, of one prompt group per batch."""
    model, processor = tiny_chat("llava")
    prompts = [[{"role": "user", "content": "Describe the image."}]] * len(data)
    given = {"num_generations": 2, "per_device_train_batch_size": 2, "max_steps": 1, "max_completion_length": 6}
    given |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    given |= {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    data = data.remove_columns([name for name in data.column_names if name not in ("image", "image_id", "facts")])
    config = GRPOConfig(str(folder), **given)
    return GRPOTrainer(model, rewards, config, data.add_column("prompt", prompts), processing_class=processor)


def rewards_of(trainer, captions: list[str]) -> torch.Tensor:
    """Rewards of this process's captions, in the order of the rows."""
    G = trainer.num_generations
    share = len(captions) // trainer.accelerator.num_processes
    first = trainer.accelerator.process_index * share
    mine = captions[first : first + share]
    inputs = [trainer.train_dataset[(first + index) // G] for index in range(share)]
    answers = [[{"role": "assistant", "content": caption}] for caption in mine]
    ids = [trainer._tokenizer(caption, add_special_tokens=False).input_ids for caption in mine]
    return trainer._calculate_rewards(inputs, None, answers, ids)


CAPTIONS = [
    f"a {color} {thing}" for color in ("red", "blue", "green", "white") for thing in ("cat", "dog", "pig", "fish")
]
