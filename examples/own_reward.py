"""Rewards of your own: a function, an asynchronous function, and a class that sees the whole rollout.

    python examples/own_reward.py

Functions have the signature of TRL's `reward_funcs`, and work in every trainer of this package with rewards. They are called with
keywords: `completions` (strings), `prompts`, `completion_ids`, every column of the data with one value per caption, `trainer_state`,
`log_metric(name, value)` and `log_extra(column, values)`.
"""

import asyncio

import torch

from hf_captionrl import SelfRetrievalConfig, SelfRetrievalTrainer, load_scenes, load_scorer
from hf_captionrl.rewards import Reward, SelfRetrieval


def names_layout(completions, layout, log_metric, **columns):
    """1 for a caption that contains the value of the column `layout`; None, no reward, where an image has none."""
    rewards = [None if name is None else float(name in text) for text, name in zip(completions, layout, strict=True)]
    log_metric("with_layout", sum(reward is not None for reward in rewards) / len(rewards))
    return rewards


async def fewer_words(completions, **columns):
    """Asynchronous functions of one rollout, such as calls of a language model, run at the same time."""
    await asyncio.sleep(0)
    return [-0.1 * len(text.split()) for text in completions]


class DifferentTokens(Reward):
    """The number of different tokens of each caption: a class sees token ids, siblings, references and distractors."""

    name = "different_tokens"

    def __call__(self, context):
        rows = zip(context.ids.tolist(), context.mask.tolist(), strict=True)  # N captions of T tokens
        return torch.tensor([len({token for token, used in zip(*row, strict=True) if used}) for row in rows])  # (N,)


if __name__ == "__main__":
    data = load_scenes(num_train=32, num_validation=0, num_test=0)["train"]
    data = data.add_column("layout", ["above", None] * 16)
    scorer = load_scorer("scenes:clip-reward")  # for photographs: "openai/clip-vit-base-patch32"
    args = SelfRetrievalConfig(
        "outputs/own_reward",
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=3,
        baseline="leave_one_out",  # the mean reward of the other captions of the image
        max_completion_length=16,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    # Rewards with weights. One that is alone in a trainer should need the image: short captions alone are empty captions.
    rewards: list = [(SelfRetrieval(scorer), 1.0), (names_layout, 0.5), fewer_words, (DifferentTokens(), 0.1)]
    trainer = SelfRetrievalTrainer("scenes:blip-mle", scorer, args, data, reward_funcs=rewards)
    trainer.train()
    for name, value in trainer.state.log_history[0].items():
        if name.startswith("rewards/") or name == "with_layout":
            print(f"{name:32} {value:.3f}")
