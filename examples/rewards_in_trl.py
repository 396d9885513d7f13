"""Rewards of this package in TRL's own GRPOTrainer (TRL 1.16): self-retrieval with a bank of distractors, and a function.

    python examples/rewards_in_trl.py [MODEL]     # by default HuggingFaceTB/SmolVLM-Instruct, which is downloaded

TRL calls rewards with the captions of a few images, so each caption is compared with a fixed bank of images, not with the batch.
`SelfRetrievalGRPOTrainer` is the same trainer with the images of the whole rollout as distractors, and bags of similar images.
"""

import sys

from trl import GRPOConfig, GRPOTrainer

from hf_captionrl import load_scenes, load_scorer
from hf_captionrl.rewards import BankRewardFunction, ImageBank

PROMPT = "Briefly describe the content of the image."


def few_words(completions, **columns):
    """A function of your own: minus the share of words above 20. Captions of chat models are lists of messages."""
    texts = [messages[-1]["content"] for messages in completions]
    return [-max(len(text.split()) - 20, 0) / 20 for text in texts]


def make_trainer(model, data):
    """The trainer; `data` has the columns image and image_id."""
    scorer = load_scorer("scenes:clip-reward")  # for photographs: "openai/clip-vit-base-patch32"
    targets = ImageBank(scorer.image_features(data["image"][:]), data["image_id"][:], scorer.signature)
    self_retrieval = BankRewardFunction(scorer, targets, bank_size=min(1000, len(data)))  # 1,000 if you can
    # Columns: TRL reads prompt (messages) and image, the reward reads image_id. TRL puts the image into the message.
    data = data.select_columns(["image", "image_id"])
    data = data.add_column("prompt", [[{"role": "user", "content": PROMPT}]] * len(data))
    args = GRPOConfig(
        "outputs/rewards_in_trl",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        max_steps=1,
        reward_weights=[1.0, 0.1],
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
    )
    return GRPOTrainer(model, [self_retrieval, few_words], args=args, train_dataset=data)


if __name__ == "__main__":
    scenes = load_scenes(num_train=32, num_validation=0, num_test=0)["train"]
    trainer = make_trainer(sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolVLM-Instruct", scenes)
    trainer.train()
    print(
        {name: round(value, 3) for name, value in trainer.state.log_history[0].items() if name.startswith("rewards/")}
    )
