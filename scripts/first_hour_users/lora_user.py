"""A user of LoRA: a chat model whose checkpoint holds bf16, trained by SMILE through adapters in fp32."""

from __future__ import annotations

from scripts.first_hour_users.session import Session
from scripts.first_hour_users.trl_user import check_published


def play_lora_user(session: Session) -> None:
    """Run the program, look at the adapter, use it."""
    session.take_program("lora_program.py")
    output = session.run("python lora_program.py", max_lines=150)
    session.check("the traceback of a run that works", "Traceback" in output, False)
    found = session.read_json("found.json")
    session.check("dtype of the checkpoint", found["stored"], ["BF16"])
    session.check("dtype of the trained weights", found["dtypes"], ["torch.float32"])
    session.check("share of changed adapter weights", found["changed"], lambda share: share > 0.9, "more than 0.9")
    session.check("share of changed weights of the base", found["base_changed"], 0.0)
    session.check("the loss is finite", found["finite"], True)
    session.check("dtype of the saved adapter", found["saved"], ["F32"])
    session.check("saved adapter weights that are those of the trainer", found["same"], True)
    folder = session.path("outputs/lora")
    session.check("an adapter was saved", (folder / "adapter_model.safetensors").is_file(), True)
    session.check("the base was not saved again", (folder / "model.safetensors").exists(), False)
    output = session.run(
        "captionrl caption outputs/lora --dataset imagefolder --data_dir photos --max_new_tokens 8 --output captions.jsonl",
        max_lines=8,
    )
    session.check_says(output, "captions of 6 of 6 images")
    session.check("lines of captions.jsonl", len(session.read_lines("captions.jsonl")), 6)
    check_published(session, "outputs/lora", "adapter_model.safetensors", "adapter_config.json")
