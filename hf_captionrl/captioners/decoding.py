"""Decodes greedy and sampled captions of an image from one prefill; finished rows leave the batch.

`generate` of transformers calls [`DecodingLoop`] in place of its loop, after it prepared inputs, cache and settings.

Legend: B images, R captions per image, N = B * R rows, P tokens of the prompt, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EncoderDecoderCache, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_captionrl.utils.versions import cache_name


class FirstTokens(LogitsProcessor):
    """Only the first `number` ids are generated: output heads are often padded, and a tokenizer decodes other ids to nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `(N, V)`, minus infinity from id `number` on."""
        scores[:, self.number :] = -torch.inf  # in place: a slice, whatever V is
        return scores


_ROWWISE = tuple(
    getattr(logits_process, name)
    for name in """ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor MinLengthLogitsProcessor
    MinNewTokensLengthLogitsProcessor NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor
    SuppressTokensAtBeginLogitsProcessor SuppressTokensLogitsProcessor TemperatureLogitsWarper TopKLogitsWarper
    TopPLogitsWarper""".split()
)
"""Processors that treat rows independently, so greedy and sampled rows can be processed together."""
_OF_THE_IMAGE = ("encoder_outputs", "encoder_hidden_states", "encoder_attention_mask")
# Finished rows are removed if at most this share of the rows is left; copying the cache for fewer costs more than it saves.
_COMPACTION = 0.8


class UndecodableError(Exception):
    """The settings or the cache need the loop of transformers."""


def draw_tokens(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token per row by inverting the cumulative distribution; several times faster than `torch.multinomial`.

    `scores` `(N, V)` are unnormalised, fp32; minus infinity is never drawn. `uniforms` `(N,)` are in [0, 1). Returns
    ids `(N,)`.
    """
    cumulative = scores.softmax(-1).cumsum(-1)  # (N, V)
    # In fp32 the last sum times a number below 1 is always less than the last sum, so a token is always found.
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


@dataclass
class DecodingLoop:
    """A `custom_generate` for `generate`, which must be called with `num_return_sequences=1`.

    The prompt is read once per image. Finished rows leave the batch. The random numbers are drawn before the first token,
    so captions do not depend on the rows that have left.
    """

    num_sampled: int  # sampled captions per image; 0 for the greedy one only
    greedy: bool  # whether the first caption of each image is the greedy one
    folded: bool  # whether cross-attention accepts B images for N rows (`captioners.shared_cross_attention`)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Decode `(B, P)` to `(N, P + T)`, right-padded."""
        self._check(logits_processor, stopping_criteria, generation_config, model_kwargs, synced_gpus or streamer)
        per_image = self.num_sampled + self.greedy
        length = generation_config.max_length - input_ids.size(1)
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        images = torch.arange(len(input_ids), device=input_ids.device)
        # `getattr` of a module is slow where the attribute is missing.
        offset_modules = [m for m in model.modules() if isinstance(vars(m).get("rope_deltas"), Tensor)]
        batch = _Batch(model, input_ids, images, model_kwargs, images, len(images), offset_modules)
        batch.take(outputs)
        if not _selectable(batch.cache):
            raise UndecodableError
        batch.repeat(per_image, folded=self.folded)
        device, rows = input_ids.device, len(batch.input_ids)
        pad, ends = generation_config._pad_token_tensor.to(device), set(generation_config._eos_token_tensor.tolist())
        drawn = torch.rand(length, self.num_sampled * len(input_ids), device=device)
        drawn = drawn.view(length, len(input_ids), self.num_sampled)
        uniforms = F.pad(drawn, (int(self.greedy), 0)).flatten(1)  # (T, N), greedy rows use none
        mixed = self.greedy and self.num_sampled
        is_greedy = torch.arange(rows, device=device) % per_image == 0 if mixed else None  # (N,)
        written = pad.repeat(rows, generation_config.max_length)  # (N, P + T)
        active = [True] * rows  # whether a row is not finished
        active_rows = None  # the same as a tensor, if a finished row is in the batch
        for step in range(length):
            scores = batch.logits
            for processor in logits_processor:  # the list itself would inspect their signatures for every token
                scores = processor(batch.input_ids, scores)
            chosen = draw_tokens(scores, uniforms[step]) if self.num_sampled else scores.argmax(-1)
            if is_greedy is not None:
                greedy_rows = is_greedy.nonzero().squeeze(1)
                chosen[greedy_rows] = scores[greedy_rows].argmax(-1)
            if active_rows is not None:
                chosen = torch.where(active_rows, chosen, pad)
            batch.input_ids = torch.cat([batch.input_ids, chosen.unsqueeze(1)], 1)
            if step + 1 == length:
                break
            tokens = chosen.tolist()  # on a GPU, the only wait for the device
            if not ends.isdisjoint(tokens):
                active = [before and token not in ends for before, token in zip(active, tokens, strict=True)]
                if not any(active):
                    break
                if (kept := batch.to_keep(active)) is not None:
                    index, images = (torch.tensor(part, device=device) for part in kept)
                    written[batch.rows, : batch.input_ids.size(1)] = batch.input_ids
                    batch.select(index, images)
                    batch.images, batch.rows = len(images), batch.rows[index]
                    uniforms, is_greedy = uniforms[:, index], None if is_greedy is None else is_greedy[index]
                    active = [active[row] for row in kept[0]]
                active_rows = None if all(active) else torch.tensor(active, device=device)
            batch.forward()
        width = batch.input_ids.size(1)
        written[batch.rows, :width] = batch.input_ids
        return written[:, :width]

    def _check(
        self, processors: Any, criteria: Any, config: GenerationConfig, model_kwargs: dict[str, Any], other: Any
    ) -> None:
        mode = config.get_generation_mode()
        wanted = GenerationMode.SAMPLE if self.num_sampled else GenerationMode.GREEDY_SEARCH
        if (
            other
            or mode != wanted
            or config.return_dict_in_generate
            or config._eos_token_tensor is None
            or config._pad_token_tensor is None
            or not model_kwargs.get("use_cache")
            or config.prefill_chunk_size is not None
            or any(type(each) not in (FirstTokens, *_ROWWISE) for each in processors)
            or any(type(each) not in (EosTokenCriteria, MaxLengthCriteria) for each in criteria)
            or not _selectable(model_kwargs.get(cache_name()))
        ):
            raise UndecodableError


def _selectable(cache: Any) -> bool:
    """Whether rows of a cache can be selected."""
    double = isinstance(cache, EncoderDecoderCache)
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if double else [cache]
    return all(hasattr(part, "layers") for part in parts) and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for part in parts for layer in part.layers
    )


@dataclass
class _Batch:
    """The rows that are not finished, and all data with one entry per row."""

    model: Any
    input_ids: Tensor  # (N, P + t)
    logits: Tensor  # (N, V), of the next token, fp32
    model_kwargs: dict[str, Any]
    rows: Tensor  # (N,), their place in the result
    images: int  # rows of the keys and values in cross-attention
    offset_modules: list[Any]  # with offsets per row, for positions in time, height and width

    @property
    def cache(self) -> Any:
        return self.model_kwargs[cache_name()]

    def take(self, outputs: Any) -> None:
        self.logits = outputs.logits[:, -1].to(torch.float32, copy=True)
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )

    def forward(self) -> None:
        inputs = self.model.prepare_inputs_for_generation(self.input_ids, next_sequence_length=1, **self.model_kwargs)
        self.take(self.model(**inputs, return_dict=True))

    def repeat(self, times: int, *, folded: bool) -> None:
        """Repeat every row; with `folded`, data of the images keep one row per image."""
        number = len(self.rows)
        index = torch.arange(number, device=self.rows.device).repeat_interleave(times)
        images = index[::times] if folded else index
        self.select(index, images)
        self.logits, self.images = self.logits[index], len(images)
        self.rows = torch.arange(number * times, device=self.rows.device)

    def to_keep(self, active: list[bool]) -> tuple[list[int], list[int]] | None:
        """Rows and images to keep, or None if too few can leave; each image keeps the same number of rows."""
        size = len(active) // self.images
        starts = range(0, len(active), size)
        counts = [sum(active[start : start + size]) for start in starts]
        images = [image for image, count in enumerate(counts) if count]
        width = max(counts)
        if len(images) * width > _COMPACTION * len(active):
            return None
        of_image = [sorted(range(start, start + size), key=lambda row: not active[row])[:width] for start in starts]
        return [row for image in images for row in of_image[image]], images

    def select(self, index: Tensor, images: Tensor) -> None:
        """Keep the rows `index`, and of the data of the images the rows `images`; `logits`, `rows` and `images` stay."""
        number, changed = len(self.input_ids), len(images) != self.images  # whether images leave or are repeated
        cross = [*_OF_THE_IMAGE, *(["attention_mask"] if self.model.config.is_encoder_decoder else [])]
        for name, value in self.model_kwargs.items():
            if name in cross and not changed:
                continue
            rows, of = (images, self.images) if name in cross else (index, number)
            in_space = name == "position_ids" and isinstance(value, Tensor) and value.dim() == 3  # (3, N, P)
            self.model_kwargs[name] = value[:, rows] if in_space else _rows_of(value, rows, of)
        if isinstance(self.cache, EncoderDecoderCache):
            self.cache.self_attention_cache.batch_select_indices(index)
            if changed:
                self.cache.cross_attention_cache.batch_select_indices(images)
        else:
            self.cache.batch_select_indices(index)
        for module in self.offset_modules:
            module.rope_deltas = _rows_of(module.rope_deltas, index, number)
        self.input_ids = self.input_ids[index]


def _rows_of(value: Any, index: Tensor, number: int) -> Any:
    """Select rows of a tensor, or of the tensors of a model output, if it has `number` rows."""
    if isinstance(value, Tensor):
        return value[index] if value.dim() > 1 and value.size(0) == number else value
    if isinstance(value, dict):  # a model output
        return type(value)(**{name: _rows_of(part, index, number) for name, part in value.items()})
    return value
