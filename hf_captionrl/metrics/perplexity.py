"""Perplexity of captions under a causal language model.

Legend: B captions per batch, T tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import check_captions


def caption_perplexity(
    captions: Any,
    model: Any,
    tokenizer: Any,
    *,
    bos: Literal["tokenizer", "prepend"] = "tokenizer",
    batch_size: int = 32,
    max_length: int | None = None,
) -> dict[str, Any]:
    r"""Perplexity of captions, each scored separately, under a causal language model.

    Reference: the "Perplexity of fixed-length models" page of transformers, which SMILE cites: the first id of
    the tokenizer is only context, and every later one is predicted. GPT-2's tokenizer adds no BOS, so its first word is not
    scored; `bos="prepend"` puts BOS before it and scores it.
    Differs from it by: captions are scored one by one, not as one running text.

    Args:
        captions: The captions.
        model: A causal language model (`transformers.PreTrainedModel`); used in evaluation mode.
        tokenizer: Its tokenizer.
        bos: `"tokenizer"`: the tokenizer's ids; `"prepend"`: BOS before them, unless they begin with it.
        batch_size: Captions per forward pass, sorted by length.
        max_length: Number of tokens after which captions are truncated; `None`: the model's limit, if it has one.
    Returns:
        `dict`: `perplexity`, `exp(total nats / scored tokens)`, the micro-average; `mean_perplexity`, the mean over
        captions, which is dominated by rare captions; lower is better; `per_sample`, NaN if a caption has only one token;
        `nats` and `tokens`, loss and number of scored tokens of each caption ([`bootstrap_interval`] of their ratio of sums
        is an interval of the logarithm of the perplexity);
        `num_tokens`, `num_truncated`, `signature`.
    """
    texts = check_captions(captions)
    if bos not in ("tokenizer", "prepend"):
        raise ValueError(f"bos must be 'tokenizer' or 'prepend', got {bos!r}.")
    limit = getattr(model.config, "max_position_embeddings", None) if max_length is None else max_length
    start = [tokenizer.bos_token_id] if bos == "prepend" else []
    if start == [None]:
        raise ValueError("bos='prepend' needs a tokenizer with bos_token. Set it, or use bos='tokenizer'.")
    ids = []
    num_truncated = 0
    for text in texts:
        tokens = list(tokenizer(text, verbose=False)["input_ids"])
        whole = tokens if tokens[:1] == start else start + tokens
        ids.append(whole[:limit])
        num_truncated += len(whole) > len(ids[-1])
    device = next(model.parameters()).device
    nats = torch.zeros(len(ids), dtype=torch.float64)
    scored = torch.tensor([max(len(row) - 1, 0) for row in ids])
    order = sorted(scored.nonzero().flatten().tolist(), key=lambda i: len(ids[i]))
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for at in range(0, len(order), batch_size):
                rows = order[at : at + batch_size]
                # Attention is causal, so padding on the right does not change the tokens before it.
                words = [torch.tensor(ids[row], device=device) for row in rows]
                batch = pad_sequence(words, batch_first=True)
                mask = pad_sequence(list(map(torch.ones_like, words)), batch_first=True)
                logits = model(input_ids=batch, attention_mask=mask).logits[:, :-1].float()  # (B, T-1, V)
                following = batch[:, 1:]
                losses = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none").view_as(following)
                nats[rows] = (losses.double() * mask[:, 1:]).sum(dim=1).cpu()
    finally:
        model.train(was_training)
    if len(bad := torch.nonzero(~torch.isfinite(nats))):
        raise ValueError(f"The loss of caption {int(bad[0])} is not finite. Check the weights, or load them in fp32.")
    if int(scored.sum()) == 0:
        raise ValueError("No caption has a second token to predict. Use bos='prepend', which scores the first too.")
    per_sample = torch.where(scored > 0, torch.exp(nats / scored.clamp(min=1)), torch.full_like(nats, math.nan))
    name = getattr(model.config, "_name_or_path", "") or getattr(model.config, "model_type", "")
    if name and Path(name).is_dir():
        name = Path(name).resolve().name  # local paths are not meaningful on other machines
    return {
        "perplexity": float(torch.exp(nats.sum() / scored.sum())),  # infinite, not an error, above e^709
        "mean_perplexity": float(per_sample[scored > 0].mean()),
        "per_sample": per_sample.numpy(),
        "nats": nats.numpy(),
        "tokens": scored.numpy(),
        "num_tokens": int(scored.sum()),
        "num_truncated": num_truncated,
        "signature": signature(metric="caption_perplexity", model=name, average="micro", bos=bos),
    }
