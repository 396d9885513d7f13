"""The self-retrieval reward as a plugin of ms-swift (signature of ms-swift 4.5.2), and the data that ms-swift reads.

    python examples/rewards_in_ms_swift.py train.jsonl
    swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-VL-3B-Instruct --dataset train.jsonl \
        --external_plugins examples/rewards_in_ms_swift.py --reward_funcs self_retrieval ...

ms-swift makes the reward once, with the training arguments, and calls it with a list of captions and the other columns of the data.
Each caption is compared with its image and a bank of images. ms-swift was not run here.
"""

import json
import sys
from pathlib import Path

from swift.rewards import ORM, orms

from hf_captionrl import load_scenes, load_scorer
from hf_captionrl.rewards import BankRewardFunction, ImageBank

PROMPT = "<image>Briefly describe the content of the image."


def training_images():
    """Your images; for photographs: load_captions("imagefolder", data_dir="photos", split="train")."""
    return load_scenes(num_train=64, num_validation=0, num_test=0)["train"]


class SelfRetrievalReward(ORM):
    """Nats, at most 0."""

    def __init__(self, args=None, **kwargs):
        super().__init__(args, **kwargs)
        scorer, data = load_scorer("scenes:clip-reward"), training_images()
        targets = ImageBank(scorer.image_features(data["image"][:]), data["image_id"][:], scorer.signature)
        self.reward = BankRewardFunction(scorer, targets, bank_size=min(1000, len(data)))

    def __call__(self, completions, image_id, **kwargs):
        return self.reward(completions=completions, image_id=image_id)


orms["self_retrieval"] = SelfRetrievalReward


def swift_rows(data, folder):
    """A line per image: messages with a mark for the image, images (paths), and image_id for the reward."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(data):
        path = folder / f"{number}.png"
        row["image"].save(path)
        yield {
            "messages": [{"role": "user", "content": PROMPT}],
            "images": [str(path)],
            "image_id": str(row["image_id"]),
        }


if __name__ == "__main__":
    data, file = training_images(), Path(sys.argv[1] if len(sys.argv) > 1 else "train.jsonl")
    lines = [json.dumps(row) for row in swift_rows(data, file.with_suffix(""))]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    captions = [data[0]["full_caption"], data[1]["full_caption"]]
    print(orms["self_retrieval"]()(completions=captions, image_id=[data[0]["image_id"]] * 2))
