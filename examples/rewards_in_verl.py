"""The self-retrieval reward in verl (signature of verl 0.9.0), and the file of training images that verl reads.

    python examples/rewards_in_verl.py train.parquet
    python -m verl.trainer.main_ppo data.train_files=train.parquet algorithm.adv_estimator=grpo \
        reward.custom_reward_function.path=examples/rewards_in_verl.py reward.custom_reward_function.name=compute_score ...

verl calls `compute_score(data_source=, solution_str=, ground_truth=, extra_info=)` once per caption, in several processes. So each
caption is compared with its image and a bank of images. `ground_truth` is the id of its image. verl was not run here.
"""

import functools
import sys

from datasets import Dataset

from hf_captionrl import load_scenes, load_scorer
from hf_captionrl.rewards import BankRewardFunction, ImageBank

PROMPT = "<image>Briefly describe the content of the image."


def training_images():
    """Your images; for photographs: load_captions("imagefolder", data_dir="photos", split="train")."""
    return load_scenes(num_train=64, num_validation=0, num_test=0)["train"]


@functools.cache
def reward():
    """Once per process: the scorer, and the features of all images."""
    scorer, data = load_scorer("scenes:clip-reward"), training_images()
    targets = ImageBank(scorer.image_features(data["image"][:]), data["image_id"][:], scorer.signature)
    return BankRewardFunction(scorer, targets, bank_size=min(1000, len(data)))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Nats, at most 0. Keys other than `score` are logged."""
    (score,) = reward()(completions=[solution_str], image_id=[ground_truth])
    return {"score": score, "words": len(solution_str.split())}


def verl_rows(data):
    """The columns that verl reads: prompt (messages, with a mark for the image), images, reward_model, extra_info."""
    for index, row in enumerate(data):
        yield {
            "data_source": "captions",
            "prompt": [{"role": "user", "content": PROMPT}],
            "images": [row["image"]],
            "ability": "captioning",
            "reward_model": {"style": "rule", "ground_truth": str(row["image_id"])},
            "extra_info": {"split": "train", "index": index},
        }


if __name__ == "__main__":
    data = training_images()
    Dataset.from_list(list(verl_rows(data))).to_parquet(sys.argv[1] if len(sys.argv) > 1 else "train.parquet")
    for caption in (data[0]["full_caption"], data[1]["full_caption"]):
        print(compute_score("captions", caption, data[0]["image_id"], {"index": 0}), caption)
