r"""First-token shifting: the second of the two options in SMILE's section 3.3 for the first word of a caption."""

from typing import Any

from torch import Tensor

from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX
from hf_captionrl.losses.vocabulary_subset import first_supervised

__all__ = ["shift_first_token"]

_PREFIX = "##"


def _is_wordpiece(tokenizer: Any) -> bool:
    """Checks the tokenizer's model, not its vocabulary: GPT-2's vocabulary also contains "##" (from Markdown)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return type(backend.model).__name__ == "WordPiece"
    return hasattr(tokenizer, "wordpiece_tokenizer")


def shift_first_token(input_ids: Tensor | None, labels: Tensor, tokenizer: Any) -> tuple[Tensor | None, Tensor]:
    r"""Replaces the first word of each caption with its `##` sub-word form, in input and target.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", section 3.3,
    "First-token Shifting": "##a" rarely begins a caption, so the first position is hard even within the subset. Use it
    with `first_token="smile"`. Captions whose first word has no `##` form in the vocabulary are not changed.

    Args:
        input_ids (`torch.Tensor` of shape `(B, T)`, *optional*): Decoder input, not shifted against `labels`; None
            if the model derives it from the labels (encoder-decoders).
        labels (`torch.Tensor` of shape `(B, T)`): Token ids from the collator: equal to `input_ids` at every position
            that is not `IGNORE_INDEX`.
        tokenizer: The captioner's WordPiece tokenizer.
    Returns:
        `tuple`: New `(input_ids, labels)`; the arguments are not modified.
    Raises:
        ValueError: If the tokenizer is not a WordPiece tokenizer, or `labels` are already shifted against `input_ids`.
    """
    if not _is_wordpiece(tokenizer):
        raise ValueError(
            f"First-token shifting needs a WordPiece tokenizer (BLIP, GIT, BERT). {type(tokenizer).__name__} is not "
            'one: its vocabulary has no "##" forms. Use first_token="mle" instead.'
        )
    supervised = labels != IGNORE_INDEX  # (B, T)
    if input_ids is not None and not (input_ids[supervised] == labels[supervised]).all():
        raise ValueError(
            "labels must equal input_ids at every supervised position. Shift the first token in the collated batch, "
            "before the labels are aligned with the hidden states."
        )
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    first = first_supervised(supervised).tolist()
    labels = labels.clone()
    input_ids = None if input_ids is None else input_ids.clone()
    for caption, position in enumerate(first):
        if not supervised[caption, position]:
            continue
        word = tokenizer.convert_ids_to_tokens(int(labels[caption, position]))
        shifted = vocabulary.get(_PREFIX + word)
        if shifted is None:
            continue
        labels[caption, position] = shifted
        if input_ids is not None:
            input_ids[caption, position] = shifted
    return input_ids, labels
