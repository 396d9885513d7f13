"""Perplexity of captions as an `evaluate` module, under any causal language model."""

import evaluate

import hf_captionrl.metrics as metrics
from hf_captionrl.evaluate_modules.prediction_columns import CaptionColumns, column_features

__all__ = ["CaptionPerplexity"]

_CITATION = """\
@inproceedings{yue2023smile,
  title     = {Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation},
  author    = {Yue, Zihao and Hu, Anwen and Zhang, Liang and Jin, Qin},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {36},
  year      = {2023}
}
@article{radford2019language,
  title   = {Language Models are Unsupervised Multitask Learners},
  author  = {Radford, Alec and Wu, Jeffrey and Child, Rewon and Luan, David and Amodei, Dario and Sutskever, Ilya},
  journal = {OpenAI blog},
  year    = {2019}
}
"""

_DESCRIPTION = """\
How surprised a causal language model is by captions, each on its own: fluency, as SMILE measures it with GPT-2. Lower
is better, but a captioner that repeats itself has a low perplexity too.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[str]`, N): Captions.
    model: Causal language model: a name on the Hub (`"openai-community/gpt2"`), a folder, `"scenes:gpt2-perplexity"`,
        or a model in memory.
    tokenizer: Its tokenizer, needed with a model in memory.
    bos: `"tokenizer"` (ids as the tokenizer makes them; GPT-2's first word is then not scored) or `"prepend"`.
    batch_size (`int`): Captions a forward pass.
    max_length (`int`): Cut captions after so many tokens; by default at the model's limit.
Returns:
    perplexity (`float`, exp of nats per token of all captions, lower is better); mean_perplexity, over captions;
    per_sample (None where a caption has nothing to score); nats and tokens, each caption's loss and scored tokens, for
    intervals; num_tokens; num_truncated; signature.
Examples:

    >>> import evaluate
    >>> import hf_captionrl
    >>> metric = evaluate.load("caption_perplexity")
    >>> fluent = metric.compute(predictions=["a pig left of a tree"], model="scenes:gpt2-perplexity")
    >>> jumbled = metric.compute(predictions=["of tree a left a pig"], model="scenes:gpt2-perplexity")
    >>> 1 < fluent["perplexity"] < jumbled["perplexity"]
    True
"""


class CaptionPerplexity(CaptionColumns, evaluate.Metric):
    """Perplexity of captions, by `hf_captionrl.metrics.caption_perplexity`."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=column_features(self.prediction_kinds),
            reference_urls=["https://huggingface.co/docs/transformers/perplexity"],
        )

    def _compute(
        self, predictions, *, model=None, tokenizer=None, bos="tokenizer", batch_size=32, max_length=None, **others
    ):
        from hf_captionrl.evaluate_modules import inputs, results

        results.warn_of_misspelling(others, self._compute)
        loaded, words = inputs.load_language_model(model, tokenizer)
        result = metrics.caption_perplexity(
            predictions, loaded, words, bos=bos, batch_size=batch_size, max_length=max_length
        )
        return results.plain_result(result)
