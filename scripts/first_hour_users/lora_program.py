"""What a user of LoRA writes: a chat model by its folder, stored in bf16, `LoraConfig`, SMILE."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import safe_open

from hf_captionrl import SmileConfig, SmileTrainer, load_scenes
from tests.tiny.chat import tiny_chat

BASE = "chat-model"


def stored_dtypes(file: Path) -> list[str]:
    """The dtypes of a file of weights."""
    with safe_open(str(file), "pt") as weights:
        return sorted({weights.get_slice(key).get_dtype() for key in weights.keys()})  # noqa: SIM118


def saved_weights(file: Path) -> dict[str, torch.Tensor]:
    """The weights of a file by name."""
    with safe_open(str(file), "pt") as weights:
        return {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118


def main() -> None:
    """Save the model as a publisher does, train four steps, and write down what happened."""
    model, processor = tiny_chat("qwen2_5_vl")
    model.to(torch.bfloat16).save_pretrained(BASE)
    processor.save_pretrained(BASE)
    scenes = load_scenes(num_train=16, num_validation=0, num_test=0)["train"]
    Path("photos").mkdir(exist_ok=True)
    for number in range(6):
        scenes[number]["image"].save(f"photos/{number}.png")
    config = SmileConfig(
        "outputs/lora",
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to="none",
        logging_steps=1,
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SmileTrainer(BASE, config, train_dataset=scenes, peft_config=lora)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    trainer.save_model()

    def changed(parameters: dict[str, Any]) -> float:
        number = sum(int((value.detach().cpu() != before[name].cpu()).sum()) for name, value in parameters.items())
        return number / sum(value.numel() for value in parameters.values())

    named = dict(trainer.model.named_parameters())
    trained = {name: value for name, value in named.items() if value.requires_grad}
    adapter = Path("outputs/lora/adapter_model.safetensors")
    saved = saved_weights(adapter)
    sums = sorted(round(float(value.double().abs().sum()), 9) for value in saved.values())
    found = {
        "stored": stored_dtypes(Path(BASE) / "model.safetensors"),
        "dtypes": sorted({str(value.dtype) for value in trained.values()}),
        "changed": changed(trained),
        "base_changed": changed({name: value for name, value in named.items() if name not in trained}),
        "finite": all(math.isfinite(entry.get("loss", 0.0)) for entry in trainer.state.log_history),
        "saved": stored_dtypes(adapter),
        "same": sums == sorted(round(float(value.detach().double().abs().sum()), 9) for value in trained.values()),
    }
    Path("found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
