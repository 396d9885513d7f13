"""Self-retrieval of chat models at scale with TRL's GRPO, including vLLM.

Legend: B images of this process, G captions per image, N = B * G captions, T tokens, P processes, C = B * P images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch
from accelerate.utils import gather
from torch import Tensor
from torch.utils.data import Sampler
from trl import GRPOConfig, GRPOTrainer

from hf_captionrl.captioners.captioner import Completions, completion_mask
from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.data import BagCurriculumSampler, training_rows
from hf_captionrl.data.bag_curriculum import parse_bag_schedule
from hf_captionrl.rewards import RewardContext, RewardData, RewardLike, resolve_rewards
from hf_captionrl.rewards.base import completion_text, refuse_token_credit
from hf_captionrl.trainers.caption_rl_trainer import RewardedImages, make_bag_sampler
from hf_captionrl.trainers.caption_trainer import EpochCallback
from hf_captionrl.trainers.checkpoints import ExactResumeArguments, ExactResumeTrainer
from hf_captionrl.trainers.guard import UnchangedCallback
from hf_captionrl.trainers.policy import refuse_data_parallel, require_fp32
from hf_captionrl.trainers.self_retrieval_trainer import SelfRetrievalArguments, scorer_list
from hf_captionrl.utils.images import to_rgb
from hf_captionrl.utils.options import check_values, documented

if TYPE_CHECKING:
    from hf_captionrl.retrieval import Scorer


@dataclass
class SelfRetrievalGRPOConfig(ExactResumeArguments, SelfRetrievalArguments, GRPOConfig):
    r"""Arguments of [`SelfRetrievalGRPOTrainer`].

    Only what differs from [`SelfRetrievalArguments`] and TRL's `GRPOConfig` is listed. The reward ranks the
    `generation_batch_size / num_generations` images of a rollout; DiscriTune's "1 of 100" are 100 images. With
    `distractor_scope="bank"` a rollout may be one image.
    """

    prompt: str = documented(
        "Briefly describe the content of the image.", "Text of the user's message beside the image."
    )
    bag_schedule: Any = documented(
        None,
        "Bag sizes, with neighbours given to the trainer: 'paper', one size, or {last epoch: size}. None: the paper's.",
    )
    feature_cache_dir: str | None = documented(
        None, "Folder of the scorer's cached image features. None: the default one."
    )
    remove_unused_columns: bool = documented(False, "Rewards need the columns of the data.")

    def __post_init__(self) -> None:
        check_values(self)
        self.check_rewards()
        self.bag_schedule = parse_bag_schedule(self.bag_schedule)
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns is True, but rewards need the columns of the data. Use False.")
        super().__post_init__()


_ROW = "caption_row"


class BagRepeatSampler(Sampler[int]):
    """Rows in the order of TRL's GRPO: each image G times, each rollout `repeat_count` times.

    A rollout is a batch of bags. TRL needs the same number of images in every rollout, so where bags do not fill it,
    random images of no bag are added as distractors, the same on every process. The sampler has no `set_epoch`, which
    accelerate would call too: [`EpochCallback`] sets the epoch of the bags.
    """

    def __init__(self, bags: BagCurriculumSampler, num_generations: int, repeat_count: int) -> None:
        self.bags, self.num_generations, self.repeat_count = bags, num_generations, repeat_count

    def __len__(self) -> int:
        return len(self.bags) * self.bags.batch_size * self.num_generations * self.repeat_count

    def __iter__(self) -> Iterator[int]:
        for index, rows in enumerate(self.bags):
            missing = self.bags.batch_size - len(rows)
            if missing:
                free = np.setdiff1d(np.arange(self.bags.num_images), rows)
                generator = np.random.default_rng([self.bags.seed, self.bags.epoch, index])
                rows = rows + generator.choice(free, missing, replace=False).tolist()
            for _ in range(self.repeat_count):
                yield from (row for row in rows for _ in range(self.num_generations))


class SelfRetrievalGRPOTrainer(ExactResumeTrainer, GRPOTrainer):
    r"""GRPO with the self-retrieval reward: can a frozen image-text model find the image from the caption?

    Only the rewards and the sampler are defined here; generation (transformers or vLLM, `args.use_vllm`), advantages and
    the loss are TRL's. For captioners that are not chat models, and for greedy and running-mean baselines, a guard and
    exact resume, use [`SelfRetrievalTrainer`].

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): A chat model with images as input.
        scorer ([`Scorer`] or a list of them): Frozen reward scorer. Several are an ensemble. None only with `reward_funcs`
            that need none.
        args ([`SelfRetrievalGRPOConfig`], *optional*): Configuration. None: the defaults, in `{model name}-SelfRetrieval`.
        train_dataset (`datasets.Dataset`): Columns `image`, `image_id` and `captions`.
        neighbours (array of shape `(N, k)`, *optional*): Most similar training rows of each row, best first, of
            `captionrl bags`; rollouts then consist of bags.
        reward_funcs (*optional*): Instead of the configured rewards; as for [`CaptionRLTrainer`].
        kwargs: For TRL's trainer: `processing_class`, `peft_config`, `callbacks`, `optimizers`, ...

    Example:
        >>> args = SelfRetrievalGRPOConfig("out", per_device_train_batch_size=100, num_generations=5)  # doctest: +SKIP
        >>> SelfRetrievalGRPOTrainer("HuggingFaceTB/SmolVLM-Instruct", scorer, args, train).train()  # doctest: +SKIP
    """

    args: SelfRetrievalGRPOConfig
    config_class = SelfRetrievalGRPOConfig
    method_name = "SelfRetrieval"

    def __init__(
        self,
        model: Any,
        scorer: Scorer | Sequence[Scorer] | None = None,
        args: SelfRetrievalGRPOConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        neighbours: Any | None = None,
        reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        scorers = [None] if scorer is None and reward_funcs is not None else scorer_list(scorer)
        args = self._resolve_args(model, args)
        if kwargs.get("eval_dataset") is not None:
            raise ValueError("eval_dataset has no rewards here. Leave it out, and use `captionrl evaluate`.")
        if train_dataset is None:
            raise ValueError("train_dataset is missing. Pass the images to train on.")
        train_dataset = training_rows(
            train_dataset, whole_set_for="rewards, bags and the curriculum are prepared from all images"
        )
        self.rewards = resolve_rewards(
            args.make_rewards(scorer=scorers) if reward_funcs is None else reward_funcs,
            args.reward_weights,
            args,
        )
        refuse_token_credit(self.rewards.rewards)
        self.image_rows, self.scorers = train_dataset, scorers
        images = args.generation_batch_size // args.num_generations
        share = args.per_device_train_batch_size * args.steps_per_generation
        if share % args.num_generations:
            raise ValueError(
                f"num_generations ({args.num_generations}) must divide per_device_train_batch_size x steps_per_generation = {share}."
            )
        self.bags = make_bag_sampler(args, images, len(train_dataset), neighbours=neighbours)
        uneven = [size for size in self.bags.schedule.values() if images % size]
        if uneven and args.distractor_scope == "bag":
            raise ValueError(
                f"Bags of {uneven} do not fill rollouts of {images} images, as distractor_scope='bag' needs. Use 'batch'."
            )
        refuse_data_parallel(args, model)
        # With beta above 0, TRL loads the reference model by its name, wherever the policy comes from.
        self._load_safely(args, by_name=isinstance(model, str) or args.beta != 0.0, model=model)
        super().__init__(
            model,
            reward_funcs=[_named(reward.name) for reward in self.rewards.rewards],
            args=args,
            train_dataset=_with_prompts(train_dataset, args.prompt),
            **kwargs,
        )
        if not self._is_vlm:
            raise ValueError(f"{type(self.model).__name__} reads no images. Use a chat model with images as input.")
        # TRL's loss reads it, and only a run would set it.
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        # TRL's collator changes nothing; the policy reads the picture that the scorers read.
        self.data_collator = _with_rgb
        require_fp32(self.model, args)
        if not args.use_vllm:  # ids beyond the tokenizer decode to nothing
            rows, config = self.model.get_output_embeddings().out_features, self.generation_config
            beyond = range(1 + max(self._tokenizer.get_vocab().values()), rows)
            config.suppress_tokens = [*(config.suppress_tokens or []), *beyond]
        self.reward_weights = torch.tensor(self.rewards.weights, dtype=torch.float32)
        repeat_count = self.num_iterations * self.args.steps_per_generation
        self._sampler = BagRepeatSampler(self.bags, self.num_generations, repeat_count)
        self._unchanged = UnchangedCallback()
        self.add_callback(EpochCallback(self.bags))
        self.add_callback(self._unchanged)
        with args.main_process_first(local=False, desc="encoding the training images for the scorers"):
            self.rewarded = RewardedImages(train_dataset, self.accelerator)
            self.rewards.prepare(self._reward_data())

    def _reward_data(self) -> RewardData:
        args = self.args

        def encode(captions: Sequence[str]) -> tuple[Tensor, Tensor]:
            end = self._tokenizer.eos_token_id
            rows = [[*self._tokenizer(c.strip(), add_special_tokens=False).input_ids, end] for c in captions]
            return self._padded(rows, end)

        return self.rewarded.data(
            image_features=lambda scorer: scorer_features(scorer, self.image_rows, cache_dir=args.feature_cache_dir),
            encode=encode,
            eos_token_id=self._tokenizer.eos_token_id,
            scorer=self.scorers[0],
            max_completion_length=args.max_completion_length,
            has_bags=min(self.bags.schedule.values()) > 1,
        )

    @staticmethod
    def _padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(row) for row in rows])
        width = max(int(lengths.max()), 1)
        ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows])
        return ids, torch.arange(width) < lengths[:, None]

    # Overrides of TRL

    def _get_train_sampler(self, dataset: datasets.Dataset | None = None) -> Sampler:
        return self._sampler

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        """Rewards `(N * P, R)` of the whole rollout; each process rewards its captions among all images."""
        context = self.reward_context(inputs, completions, completion_ids_list, prompts)
        local = self.rewards(context).to(self.accelerator.device, torch.float32)  # (N, R)
        for name, value in context.statistics.items():
            # TRL logs the mean over processes, also of what is a sum.
            for number in value if isinstance(value, list) else [value * self.accelerator.num_processes]:
                self._log_metric(name, float(number))
        for column, cells in context.extra.items():
            self._log_completion_extra(column, cells)
        rewards = gather(local)
        self.rewards.refuse_unscored(rewards)
        if self.model.training:
            totals = self.rewards.total(rewards.cpu()).nan_to_num().view(-1, self.num_generations)
            self._unchanged.note_advantages(totals - totals[:, :1])
        return rewards

    def reward_context(
        self, inputs: list[dict[str, Any]], completions: list[Any], ids_list: list[list[int]], prompts: Any = None
    ) -> RewardContext:
        """What rewards see of N rows of the data, the captions of one image adjacent, with their completions."""
        G = self.num_generations if self.model.training else self.num_generations_eval
        device = self.accelerator.device
        rows = torch.tensor([row[_ROW] for row in inputs[::G]], device=device)  # (B,)
        ids, mask = self._padded(ids_list, self._tokenizer.pad_token_id)
        until_end, ended = completion_mask(ids, end_ids=self.eos_token_ids, pad_id=self._tokenizer.pad_token_id)
        captions = [completion_text(completion).strip() for completion in completions]
        written = Completions(ids.to(device), captions, ended.to(device), (mask & until_end).to(device))
        arguments = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": ids_list,
            "trainer_state": self.state,
        }
        step = self._rollout_number()
        return self.rewarded.context(rows, written, self.bags.bag_size, step=step, arguments=arguments)

    def _rollout_number(self) -> int:
        """Number of rollouts before this one, also in a resumed run."""
        accumulation = self.args.gradient_accumulation_steps
        micro_step = self.state.global_step * accumulation + self._step % accumulation
        return micro_step // (self.args.steps_per_generation * self.num_iterations)


def _named(name: str) -> Any:
    """A placeholder with the name under which TRL logs a reward that `_calculate_rewards` computes."""

    def reward(**kwargs: Any) -> list[float]:
        raise RuntimeError(f"The reward {name!r} is computed for a whole rollout, by _calculate_rewards.")

    reward.__name__ = name
    return reward


def _with_rgb(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if _ROW not in rows[0]:
        raise ValueError("Rewards are prepared for trainer.train_dataset. Pass that or a part of it.")
    return [row | {"image": to_rgb(row["image"])} for row in rows]


def _with_prompts(dataset: datasets.Dataset, prompt: str) -> datasets.Dataset:
    """TRL's columns beside ours; images stay as they are stored."""
    dataset = dataset.remove_columns([c for c in ("prompt", _ROW) if c in dataset.column_names])
    dataset = dataset.add_column("prompt", [[{"role": "user", "content": prompt}]] * len(dataset))
    return dataset.add_column(_ROW, list(range(len(dataset))))
