"""Perplexity of captions under any causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules import metric as citations
from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model
from hf_captionrl.metrics.evaluate_modules.metric import DeclaredMetric, Metric, forwards


@forwards(metrics.caption_perplexity)
def compute(predictions: Sequence[str], *, model: Any = None, tokenizer: Any = None, **options: Any) -> dict[str, Any]:
    """Call `caption_perplexity` with a model given by name or in memory."""
    model, tokenizer = load_language_model(model, tokenizer)
    result = metrics.caption_perplexity(predictions, model, tokenizer, **options)
    return result | {"per_sample": {"perplexity": result["per_sample"]}}


METRIC = Metric(
    title="Caption Perplexity",
    emoji="🗣️",
    summary="Fluency of captions under a language model",
    description="""\
Perplexity of captions under a causal language model, each caption scored separately: fluency, as SMILE measures it with GPT-2.
Lower is better, but repetitive captions have a low perplexity too.
""",
    arguments="""\
    predictions (`list[str]`, N): Captions.
    model: Causal language model: a name on the Hub (`"openai-community/gpt2"`), a folder, `"scenes:gpt2-perplexity"`,
        or a model in memory.
    tokenizer: Its tokenizer, needed with a model in memory.
    bos: `"tokenizer"` (the tokenizer's ids; GPT-2's first word is then not scored) or `"prepend"`.
    batch_size (`int`): Captions per forward pass.
    max_length (`int`): Tokens after which a caption is truncated; by default the model's limit.
""",
    returns="""\
    perplexity (`float`, exp of nats per token of all captions, lower is better); mean_perplexity, over captions;
    per_sample, a list of perplexity (None if a caption has no token to score); nats and tokens, each caption's loss and scored tokens, for
    intervals; num_tokens; num_truncated; signature.
""",
    examples="""\
    >>> import evaluate
    >>> import hf_captionrl
    >>> metric = evaluate.load("caption_perplexity")
    >>> fluent = metric.compute(predictions=["a pig left of a tree"], model="scenes:gpt2-perplexity")
    >>> jumbled = metric.compute(predictions=["of tree a left a pig"], model="scenes:gpt2-perplexity")
    >>> 1 < fluent["perplexity"] < jumbled["perplexity"]
    True
""",
    limitations="""\
A low perplexity means that captions are predictable, not that they are correct or good: repetition lowers it.
Numbers from different language models cannot be compared.
""",
    citation=citations.SMILE
    + """\
@article{radford2019language,
  title   = {Language Models are Unsupervised Multitask Learners},
  author  = {Radford, Alec and Wu, Jeffrey and Child, Rewon and Luan, David and Amodei, Dario and Sutskever, Ilya},
  journal = {OpenAI blog},
  year    = {2019}
}
""",
    urls=("https://huggingface.co/docs/transformers/perplexity",),
    compute=compute,
    functions=("caption_perplexity",),
    keys="`perplexity`, `mean_perplexity`",
    cases=(
        {
            "predictions": ["a pig left of a tree", "two pigs"],
            "model": "scenes:gpt2-perplexity",
            "result": {"num_tokens": 10, "num_truncated": 0},
        },
        {
            "predictions": ["a pig left of a tree"],
            "model": "scenes:gpt2-perplexity",
            "bos": "prepend",
            "result": {"num_tokens": 7, "num_truncated": 0},
        },
    ),
)


class CaptionPerplexity(DeclaredMetric, evaluate.Metric):
    """Caption Perplexity."""

    declaration = "caption_perplexity"
