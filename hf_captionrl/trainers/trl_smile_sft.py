"""SMILE for text: supervised fine-tuning of a causal language model on TRL's `SFTTrainer`."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from hf_captionrl.captioners.head_tap import head_projection, is_tappable, replaced_forward
from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss
from hf_captionrl.losses.linear_log_probs import accumulation_dtype
from hf_captionrl.trainers.checkpoints import ExactResumeArguments, ExactResumeTrainer
from hf_captionrl.trainers.policy import refuse_data_parallel, require_fp32
from hf_captionrl.utils.options import Fraction, Range, check_values, documented

Scope = Literal["document", "sentence", "window"]
SCOPES: tuple[str, ...] = get_args(Scope)


@dataclass
class SmileSFTConfig(ExactResumeArguments, SFTConfig):
    r"""Arguments of [`SmileSFTTrainer`]: those of `trl.SFTConfig` and of SMILE.

    Only what differs from `trl.SFTConfig` is listed.
    """

    mle_weight: Fraction = documented(
        0.0, "lambda of Eq. 4: loss = lambda * MLE + (1 - lambda) * SMILE. 1 is trl.SFTTrainer's loss."
    )
    first_token: Literal["mle", "smile"] = documented(
        "mle", "The first token of each subset: 'mle' chooses it from the whole vocabulary, 'smile' from the subset."
    )
    subset_scope: Scope = documented(
        "document",
        "Text whose words form the subset of a token: its 'document' (the paper), its 'sentence', or its 'window' of "
        "window_tokens tokens.",
    )
    # The loss of a subset of one token is 0.
    window_tokens: Annotated[int, Range(at_least=2)] = documented(
        32, "Supervised tokens of a window, for subset_scope='window'."
    )

    def __post_init__(self) -> None:
        check_values(self)
        super().__post_init__()
        if self.mle_weight == 1.0:
            return
        if self.packing_strategy == "wrapped" and (self.packing or self.eval_packing):
            raise ValueError("packing_strategy='wrapped' drops the boundaries of documents. Use 'bfd'.")
        if self.eval_packing and not (self.packing or self.padding_free):
            raise ValueError("eval_packing=True needs packing=True: trl drops the boundaries of documents.")
        if self.loss_type != "nll" or self.label_smoothing_factor > 0:
            raise ValueError("SMILE needs loss_type='nll' and label_smoothing_factor=0. Use them, or mle_weight=1.")


# --- Segments of a packed batch that share one vocabulary subset: documents, sentences or windows --------------------
# Legend: B rows of a batch, T tokens, D features, N supervised tokens, K segments, V vocabulary.

_END_MARKS = (".", "!", "?", "。", "！", "？", "…")
_CLOSING = "\"'”’»)]* \t"  # may follow the mark within one token
_PADDING_FACTOR = 4  # rows of a group are padded to at most so many times their length
_SMALL = 4096  # slots below which one group is always faster than several


class Segments(NamedTuple):
    """The supervised tokens of a batch and their segments."""

    index: Tensor  # (N,): position of each token in the flattened `(B, T)` batch
    segment: Tensor  # (N,): its segment, counted from 0, ascending
    slot: Tensor  # (N,): its place within the segment
    lengths: Tensor  # (K,): tokens of each segment, at least 1


def sentence_ends(tokenizer: Any, vocab_size: int) -> Tensor:
    """Which tokens `(V,)` end a sentence, from the text of each token alone; the point of "3.14" does too.

    A token ends a sentence if its text ends in an end mark (closing quotes and brackets after it are ignored), contains a
    line break, or is a special token such as the end of the text.
    """
    ends = torch.zeros(vocab_size, dtype=torch.bool)
    known = min(len(tokenizer), vocab_size)
    for token, text in enumerate(tokenizer.batch_decode([[i] for i in range(known)], skip_special_tokens=False)):
        ends[token] = "\n" in text or text.rstrip(_CLOSING).endswith(_END_MARKS)
    ends[[token for token in tokenizer.all_special_ids if token < vocab_size]] = True
    return ends


def document_ids(labels: Tensor, position_ids: Tensor | None) -> Tensor:
    """Which document each token belongs to: ids `(B, T)` that ascend over the flattened batch.

    `position_ids` `(B, T)` are 0 at the first token of each document; None where a row is a document.
    """
    B, T = labels.shape
    rows = torch.arange(B, device=labels.device).unsqueeze(1) * (T + 1)  # (B, 1)
    if position_ids is None:
        return rows.expand(B, T)
    return rows + (position_ids.expand(B, T) == 0).cumsum(1)


def find_segments(
    labels: Tensor, documents: Tensor, scope: str, *, window_tokens: int = 32, ends: Tensor | None = None
) -> Segments:
    """Split the supervised tokens into segments that share one subset.

    A sentence includes all consecutive end marks ("?!", ". " and the end of the text), and ends at unsupervised tokens
    (another speaker's turn). Windows count the supervised tokens of a document; a single last token, often the end of the
    text, joins the previous window.

    Shapes: `labels` `(B, T)`, `documents` `(B, T)`, `ends` `(V,)`.
    """
    index = (labels != IGNORE_INDEX).flatten().nonzero().squeeze(1)  # (N,)
    tokens, document = labels.flatten()[index], documents.flatten()[index]
    order = torch.arange(len(index), device=index.device)
    first = torch.ones_like(index, dtype=torch.bool)  # first of its document
    first[1:] = document[1:] != document[:-1]
    starts = first.clone()
    if scope == "sentence":
        assert ends is not None
        ending = ends.to(tokens.device)[tokens]  # (N,)
        starts[1:] |= (ending[:-1] & ~ending[1:]) | (index[1:] != index[:-1] + 1)
    elif scope == "window":
        place = order - torch.where(first, order, 0).cummax(0).values  # within the document
        last = torch.ones_like(first)
        last[:-1] = first[1:]
        starts |= (place % window_tokens == 0) & ~last
    segment = starts.cumsum(0) - 1
    slot = order - torch.where(starts, order, 0).cummax(0).values
    return Segments(index, segment, slot, torch.bincount(segment))


def similar_lengths(lengths: Tensor) -> Iterator[Tensor]:
    """Groups of segments of lengths `(K,)` that may be padded to one length without much waste."""
    if lengths.numel() == 0:
        return
    ordered, order = lengths.sort(descending=True)
    if int(ordered[0]) * lengths.numel() <= _SMALL:
        yield order
        return
    start = 0
    while start < len(order):
        stop = start + int((ordered[start:] > ordered[start] / _PADDING_FACTOR).sum())
        yield order[start:stop]
        start = stop


# --- The forward of a causal language model that returns SMILE's loss where TRL expects log-probabilities ------------
# Legend: B rows of a batch, T tokens, V vocabulary, D features, K segments.
#
# TRL's `SFTTrainer` calls `model(..., labels=labels, fused_lm_head=True)` and sums `-output.log_probs`. The forward made
# here answers that call with the (negative) sum of SMILE's loss, so that averaging over tokens, gradient accumulation and
# processes stay TRL's.


def uses_trl_head(head: Any, mle_weight: float) -> bool:
    """Whether the loss is plain maximum likelihood on a plain head, which TRL computes itself."""
    return mle_weight == 1.0 and isinstance(head, nn.Linear)


def logit_factors(config: Any) -> tuple[float, float | None]:
    """Factor and soft cap that a model applies to its logits after the output projection."""
    text = config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(text, name, None)) is not None:
            return float(factor), cap
    divisor = getattr(text, "logits_scaling", None)
    if divisor is None:
        return 1.0, cap
    return float(divisor if text.model_type == "hyperclovax" else 1 / divisor), cap


def segment_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    documents: Tensor,
    *,
    scope: str = "document",
    window_tokens: int = 32,
    ends: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    r"""SMILE with a separate subset for each document, sentence or window.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-4 and section 6.
    `scope="document"` is the paper's; the other scopes address the limitation that section 6 names. Everything is
    aligned: position t predicts `labels[:, t]`.

    Shapes: `hidden` `(B, T, D)`, `weight` `(V, D)`, `labels` and `documents` `(B, T)`, `ends` `(V,)`. `settings` are for
    [`fused_smile_loss`]. Returns the sum over the supervised tokens, in nats; a connected 0 if there are none.
    """
    segments = find_segments(labels, documents, scope, window_tokens=window_tokens, ends=ends)
    tokens = labels.flatten()[segments.index]  # (N,)
    states = hidden.flatten(0, 1)[segments.index]  # (N, D)
    place = torch.full_like(segments.lengths, -1)  # (K,)
    # A sum over no rows, not over all of them times 0: in fp16 that sum may be infinite, and the product NaN.
    total = states.to(accumulation_dtype(hidden, weight)).sum() if len(tokens) == 0 else None
    for group in similar_lengths(segments.lengths):
        longest = int(segments.lengths[group].max())
        place.fill_(-1)[group] = torch.arange(len(group), device=group.device)
        row = place[segments.segment]  # (N,)
        is_member = row >= 0
        at = (row[is_member], segments.slot[is_member])
        padded = states.new_zeros(len(group), longest, states.size(-1)).index_put(at, states[is_member])
        targets = tokens.new_full((len(group), longest), IGNORE_INDEX).index_put(at, tokens[is_member])
        loss = fused_smile_loss(padded, weight, targets, reduction="sum", **settings)
        total = loss if total is None else total + loss
    return cast(Tensor, total)


def add_smile_head(model: Any, config: Any, *, ends: Tensor | None, packed: bool) -> None:
    """Let a model answer TRL's call with SMILE's loss, unless TRL's head computes it (`config.mle_weight` is 1)."""
    trl_forward = model.forward
    factor, softcap = logit_factors(model.config)
    if not is_tappable(model.get_output_embeddings()):
        raise ValueError("The output projection has no plain weight. Exclude it from quantisation and from DoRA.")

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        head = self.get_output_embeddings()
        if not fused_lm_head:
            return trl_forward(*args, **kwargs)
        if uses_trl_head(head, config.mle_weight):
            return trl_forward(*args, fused_lm_head=True, **kwargs)
        labels, num_items = kwargs.pop("labels", None), kwargs.pop("num_items_in_batch", None)
        if labels is None or kwargs.pop("shift_labels", None) is not None:
            raise ValueError("SMILE needs whole documents with labels. Use no context or sequence parallelism.")
        position_ids = kwargs.get("position_ids")
        if packed and position_ids is None:
            raise ValueError("A padding-free batch came without position_ids. Use LoRA, or no packing.")
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state[:, :-1]
        documents = document_ids(labels, position_ids)[:, 1:]
        labels = labels[:, 1:]

        def compute(states: Tensor) -> Tensor:
            states, weight, bias = head_projection(head, states)
            if factor != 1.0:
                states, bias = states * factor, None if bias is None else bias * factor
            return segment_loss(
                states,
                weight,
                labels,
                documents,
                bias=bias,
                scope=config.subset_scope,
                window_tokens=config.window_tokens,
                ends=ends,
                mle_weight=config.mle_weight,
                first_token=config.first_token,
                softcap=softcap,
            )

        # As the head's forward: FSDP2 and ZeRO-3 gather its weight there.
        with replaced_forward(head, compute):
            total = head(hidden)
        mask = labels != IGNORE_INDEX
        nothing = total.detach().new_zeros(())
        number = mask.sum().clamp(min=1) if num_items is None else num_items
        return FusedCausalLMOutput(
            loss=total / number, log_probs=-total, entropy=nothing, is_top1=nothing, label_mask=mask
        )

    model.forward = types.MethodType(forward, model)


@contextmanager
def plain_head_for_checks(model: Any) -> Iterator[None]:
    """Hide a LoRA on the output projection from TRL, which refuses it because its fused head would not train it."""
    if isinstance(model, str):
        yield
        return
    from peft import PeftModel
    from peft.tuners.lora import Linear as LoraLinear

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    original = base.get_output_embeddings

    def below_adapter() -> Any:
        head = original()
        return head.base_layer if type(head) is LoraLinear else head

    base.get_output_embeddings = below_adapter
    try:
        yield
    finally:
        del base.get_output_embeddings


class SmileSFTTrainer(ExactResumeTrainer, SFTTrainer):
    """`trl.SFTTrainer` whose loss chooses each token from the words of its document, sentence or window.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-4 and appendix B.

    Data, packing, labels, adapters and averaging are TRL's, and with `mle_weight=1` also the loss. A subset holds only
    the supervised tokens, including the end token, and no words of the prompt. An adapter on the output projection is
    allowed if `model` is a loaded model. TRL's entropy and token accuracy need the whole vocabulary, so they are logged
    only where TRL's head computes the loss, at `mle_weight=1`. Trainable weights are fp32, as in [`CaptionTrainer`].

    Args:
        model (`PreTrainedModel`, `PeftModel` or `str`): The causal language model, or its name.
        args ([`SmileSFTConfig`] or `TrainingArguments`, *optional*): Configuration. None: the defaults, in `{model name}-SMILE`.
        kwargs (`Any`): As for `trl.SFTTrainer`: `train_dataset`, `eval_dataset`, `processing_class`, `peft_config`, ...

    Example:
        >>> trainer = SmileSFTTrainer(model, SmileSFTConfig("out"), train_dataset=rows)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names = ("trl", "sft", "smile")
    args: SmileSFTConfig
    config_class = SmileSFTConfig
    method_name = "SMILE"

    def __init__(
        self, model: PreTrainedModel | Any, args: SmileSFTConfig | TrainingArguments | None = None, **kwargs: Any
    ) -> None:
        if isinstance(args, TrainingArguments) and not isinstance(args, SFTConfig):  # as TRL does
            args = self.config_class(**{**args.to_dict(), "hub_token": args.hub_token})
        args = self._resolve_args(model, args)
        refuse_data_parallel(args, model)
        self._load_safely(args, by_name=isinstance(model, str), model=model)
        with plain_head_for_checks(model):
            super().__init__(model, args, **kwargs)
        require_fp32(self.model, args)
        base = self.accelerator.unwrap_model(self.model)
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        ends = None
        if args.subset_scope == "sentence" and args.mle_weight < 1.0:
            tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
            ends = sentence_ends(tokenizer, base.get_output_embeddings().weight.size(0))
        if self.aux_loss_enabled and not uses_trl_head(base.get_output_embeddings(), args.mle_weight):
            raise ValueError("SMILE has no router loss. Set router_aux_loss_coef=0.0, or mle_weight=1.")
        self._base = base
        add_smile_head(base, args, ends=ends, packed=self.padding_free)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)
        if not uses_trl_head(self._base.get_output_embeddings(), self.args.mle_weight):
            for name in ("entropy", "mean_token_accuracy"):  # of full logits
                self._metrics["train" if self.model.training else "eval"].pop(name, None)
        return result
