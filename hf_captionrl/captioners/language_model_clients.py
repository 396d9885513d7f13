"""Asks language models and vision-language models: endpoints, models of transformers, captioners."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import json
import math
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from hf_captionrl.captioners.prompts import without_words
from hf_captionrl.utils.images import to_rgb
from hf_captionrl.utils.model_files import check_complete, load_pretrained, model_path
from hf_captionrl.utils.prompts import (
    Answer,
    AnswerScores,
    BackendError,
    Failure,
    KeptAnswers,
    Prompt,
    Scores,
    Truncated,
)

RETRY_TEMPERATURE = 0.7
"""Temperature of later attempts, because greedy decoding repeats a bad answer."""


# --- Backends with a local model -------------------------------------------------------------------------------------


def default_device(device: str | None) -> str:
    """The device, or a GPU if there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def loaded_revision(model: Any, *parts: str) -> str:
    """Commit of a loaded model from the Hub, or, for folders and adapters, a hash of its weights.

    The weights of a folder can change without its name, and the commit of an adapter's base model does not identify the adapter.
    """
    from hf_captionrl.retrieval.feature_cache import model_fingerprint

    commit = getattr(getattr(model, "config", None), "_commit_hash", None)
    if commit and not hasattr(model, "peft_config"):
        return str(commit)
    generation = getattr(model, "generation_config", None)
    # The version that wrote the file does not change the model.
    settings = {} if generation is None else {**generation.to_diff_dict(), "transformers_version": None}
    return model_fingerprint(model, json.dumps(settings, sort_keys=True, default=str), *parts)[:12]


def decoding(attempt: int, max_new_tokens: int) -> dict[str, Any]:
    """Arguments of `generate`: greedy at first, sampling at later attempts, because greedy repeats a bad answer."""
    how = {"do_sample": True, "temperature": RETRY_TEMPERATURE} if attempt else {"do_sample": False}
    return {**how, "num_beams": 1, "max_new_tokens": max_new_tokens}


@dataclass(eq=False, repr=False)
class LocalBackend(AnswerScores, ABC):
    """Answers prompts batch by batch. Subclasses load the model and answer one batch."""

    model: str
    _: KW_ONLY
    revision: Any = None  # of the Hub; then of the weights, with all settings that change answers
    device: str | None = None
    dtype: str = "auto"
    batch_size: int = 8
    max_new_tokens: int = 256

    is_multimodal = False

    def __post_init__(self) -> None:
        self.revision = f"{self._load()}; greedy max_new_tokens={self.max_new_tokens}"

    @abstractmethod
    def _load(self) -> str:
        """Load the model; returns its revision."""

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        # The number of the attempt determines the decoding, so that it is the same in a batch.
        for attempt in sorted({prompt.attempt for prompt in prompts}):
            positions = [i for i, prompt in enumerate(prompts) if prompt.attempt == attempt]
            for start in range(0, len(positions), self.batch_size):
                batch = positions[start : start + self.batch_size]
                yield from zip(batch, self._answer([prompts[i] for i in batch]), strict=True)

    @abstractmethod
    def _answer(self, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        """Answer one batch."""


def seed_draws(prompts: Sequence[Prompt]) -> None:
    """Seed sampling with the first prompt and its attempt, so that a batch gets the same answers in a resumed run."""
    import torch

    torch.manual_seed(int(prompts[0].hash[:15], 16) + prompts[0].attempt)


def chat_text(tokenizer: Any, prompt: Prompt) -> str:
    """The text of a prompt that a language model continues.

    If a template has no system role (the first Mistral), the instruction is put before the first question. A model without
    a template gets the plain layout of the paper, `User : ... Assistant : ...`.
    """
    turns = prompt.turns()
    if not getattr(tokenizer, "chat_template", None):
        parts = [prompt.system] if prompt.system else []
        for user, assistant in prompt.examples:
            parts += [f"User : {user}", f"Assistant : {assistant}"]
        return "\n\n".join([*parts, f"User : {prompt.user}", "Assistant :"])
    from jinja2.exceptions import TemplateError

    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        if turns[0]["role"] != "system":
            raise
        first = {"role": "user", "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}
        return str(tokenizer.apply_chat_template([first, *turns[2:]], tokenize=False, add_generation_prompt=True))


# --- Endpoints with OpenAI's chat completions ------------------------------------------------------------------------
# The key comes from an environment variable and is sent only in the header of requests to the given address. No message, log or
# file contains it, and redirects are not followed.
#
# Not `huggingface_hub.InferenceClient`, for three reasons: its `timeout` limits each read and not the whole answer (with a
# slow server, a request with a timeout of 0.3 s took 7 s); it follows redirects, which sends prompts and images elsewhere;
# and without a key it sends the user's Hub token to the endpoint.

_LARGEST_ANSWER = 4 * 2**20  # bytes; a caption has a few hundred
_RETRIED = (408, 409, 425, 429)  # and 500 and above
_ONE_PROMPT = (400, 413, 415, 422)  # other codes, such as 401, 402, 404 and redirects, concern every prompt
_LONGEST_WAIT_S = 120.0


def image_url(image: Any) -> str:
    """An image as a data URL for chat endpoints: PNG, or JPEG of quality 90 above 512 x 512 pixels."""
    kind = "PNG" if image.width * image.height <= 512 * 512 else "JPEG"
    buffer = io.BytesIO()
    to_rgb(image).save(buffer, kind, quality=90)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


class _RetryError(Exception):
    """A message, and the seconds to wait if the server names them; another request may succeed."""


def check_address(base_url: str) -> None:
    """Refuse an invalid address of an endpoint, and one with a secret, which logs would show."""
    try:
        parts = urlsplit(base_url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of brackets or of the port
        is_valid = False
    if not is_valid or base_url.split() != [base_url] or "@" in base_url or parts.query or parts.fragment:
        raise ValueError(
            f"The endpoint (base_url) is {base_url.rpartition('@')[2].partition('?')[0]!r}. Use an address such as "
            "http://127.0.0.1:8000/v1, without a user, a password or a query; api_key_env names the variable of a key."
        )


@dataclass(eq=False, repr=False)
class HTTPBackend(AnswerScores):
    """Backend of an OpenAI-compatible endpoint (`base_url` up to `/chat/completions`) with `concurrency` requests at a time.

    Requests are repeated, at most `tries` times, after 429, 5xx, timeouts, dropped connections and answers that are not JSON.
    The wait is `backoff_s * 2**k` seconds, or that of `Retry-After`. Refusals of one prompt (400, 413, 415, 422) become a
    [`Failure`]; refusals of every prompt (wrong key, wrong address) stop the run. `timeout_s` limits a whole request. Later
    attempts use a temperature of at least `retry_temperature`, and the seed plus their number (None: no seed), so they are
    also the way to several samples. `usage` counts requests, retries, tokens of prompts and of answers.
    """

    base_url: str
    model: str
    _: KW_ONLY
    revision: str = ""
    api_key_env: str | None = None
    is_multimodal: bool = False
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = 0
    concurrency: int = 4
    timeout_s: float = 120.0
    tries: int = 6
    backoff_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep
    retry_temperature: float = RETRY_TEMPERATURE
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_address(self.base_url)
        self._url = self.base_url.rstrip("/") + "/chat/completions"
        self._key = os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""
        if self.api_key_env and not (self._key.isascii() and self._key.isprintable() and self._key):
            raise ValueError(f"api_key_env: the environment variable {self.api_key_env} holds no key. Set it.")
        settings = f"temperature={self.temperature:g} seed={self.seed} max_new_tokens={self.max_new_tokens}"
        settings += f" samples={self.retry_temperature:g}" if self.retry_temperature != RETRY_TEMPERATURE else ""
        settings += f" top_p={self.top_p:g}" if self.top_p != 1 else ""
        self.revision = "; ".join(filter(None, (self.revision, settings)))
        self.usage: Counter[str] = Counter()
        self._lock = threading.Lock()  # of the counts, which several threads change
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = partial(httpx.AsyncClient, headers=headers, timeout=None, verify=httpx.create_ssl_context())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r}, {self.model!r})"

    def _hide(self, text: str) -> str:
        """Remove the key, which a server may repeat in its answers and errors."""
        return text.replace(self._key, "***") if self._key else text

    def _shown(self, text: str) -> str:
        """What a message shows: one line without control characters, cut after the key is hidden, so that no part of it is left."""
        return self._hide("".join(filter(str.isprintable, " ".join(text.split()))))[:200]

    async def _reply(self, body: dict[str, Any]) -> tuple[httpx.Response, bytearray]:
        """The response and its content, which may end after the size of the largest answer."""
        data = bytearray()
        # httpx's timeout restarts with every byte, also of the headers; this one limits the whole request.
        async with (
            asyncio.timeout(self.timeout_s),
            self._client() as client,
            client.stream("POST", self._url, json=body) as response,
        ):
            async for part in response.aiter_raw():
                data += part
                if len(data) > _LARGEST_ANSWER:
                    break
        return response, data

    def _send(self, body: dict[str, Any]) -> Answer:
        """One request.

        Raises `_RetryError` if another may succeed, and `BackendError` if it fails for every prompt.
        """
        self._count(requests=1)
        try:
            response, data = asyncio.run(self._reply(body))
        except (httpx.HTTPError, TimeoutError) as error:  # refused, dropped and slow connections
            reason = str(error) or f"no complete answer after {self.timeout_s:g} s"
            raise _RetryError(self._shown(f"{type(error).__name__}: {reason}"), None) from None
        content = self._shown(data.decode("utf-8", "replace"))
        message, status = f"HTTP {response.status_code}: {content}", response.status_code
        if status in _RETRIED or status >= 500:
            after = response.headers.get("Retry-After", "")
            raise _RetryError(message, float(after) if after.replace(".", "", 1).isdecimal() else None)
        if status in _ONE_PROMPT:
            return Failure("backend_rejected", message)
        if not response.is_success:
            raise BackendError(f"{self._url} answers {message}. Check address, model, key and credit.")
        try:
            reply = json.loads(data if len(data) <= _LARGEST_ANSWER else b"longer than 4 MiB")
            usage = reply.get("usage") or {}
            self._count(**{name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")})
            return self._read(reply["choices"][0])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            reason = self._shown(f"{type(error).__name__}: {error}")
            raise _RetryError(f"not a chat completion ({reason}): {content}", None) from None

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self.usage.update(numbers)

    def _read(self, choice: dict[str, Any]) -> Answer:
        """The answer of a reply."""
        content = choice["message"]["content"]
        if isinstance(content, list):  # some servers return parts
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(content, str):  # null: a refusal or an empty answer
            return ""
        content = self._hide(content)
        content.encode()  # half of a surrogate pair, which no file holds, is an error here
        truncated = choice.get("finish_reason") == "length"
        self._count(truncated=truncated)
        return Truncated(content) if truncated else content

    def _ask(self, prompt: Prompt) -> Answer:
        turns: list[dict[str, Any]] = list(prompt.turns())
        if prompt.image is not None and self.is_multimodal:
            url = lambda image: {"type": "image_url", "image_url": {"url": image_url(image)}}  # noqa: E731
            turns[-1] = {"role": "user", "content": prompt.parts(url, image_first=False)}
        parameters: dict[str, Any] = {
            "model": self.model,
            "messages": turns,
            "temperature": max(self.temperature, self.retry_temperature) if prompt.attempt else self.temperature,
            "max_tokens": self.max_new_tokens,
            "seed": None if self.seed is None else self.seed + prompt.attempt,
            "top_p": None if self.top_p == 1 else self.top_p,
        }
        body = {name: value for name, value in parameters.items() if value is not None}
        message = ""
        for number in range(self.tries):
            try:
                return self._send(body)
            except _RetryError as error:
                message, wait_s = error.args
                if number + 1 < self.tries:
                    self._count(retries=1)
                    self.sleep(min(self.backoff_s * 2**number if wait_s is None else wait_s, _LONGEST_WAIT_S))
        return Failure("backend_failed", f"no answer in {self.tries} tries; the last error: {message}")

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Answer prompts, several at a time."""
        answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()

        def work(position: int, prompt: Prompt) -> None:
            try:
                answers.put((position, self._ask(prompt)))
            except Exception as error:
                answers.put((position, error))

        fatal, running = None, 0
        left: Iterator[tuple[int, Prompt]] = iter(enumerate(prompts))
        while True:
            # The next request starts only after the caller has taken an answer, so a kill loses at most these requests.
            for asked in islice(left, self.concurrency - running):
                # A daemon: the end of the process waits for no server.
                threading.Thread(target=work, args=asked, daemon=True).start()
                running += 1
            if not running:
                break
            position, answer = answers.get()
            running -= 1
            if isinstance(answer, Exception):  # the answers of running requests are still returned
                fatal, left = answer, iter(())
            else:
                yield position, answer
        if fatal is not None:
            raise fatal


class EndpointCaptioner(AbstractContextManager["EndpointCaptioner"]):
    """Captions of a vision-language model behind an endpoint; answers are kept in a file, and none is asked for twice.

    A context manager, which closes the file. `failed` has the reason for each image without an answer. A `BackendError` stops
    the run after as many failures in a row as two rounds of requests.
    """

    family = "chat"  # what a captioner of this process would be

    def __init__(self, backend: HTTPBackend, prompt: str, answers: str | os.PathLike[str]) -> None:
        self.backend, self.prompt = backend, prompt
        self.failed: dict[str, str] = {}
        failures = 2 * backend.concurrency
        self._answers = KeptAnswers(backend, answers, is_kept=lambda a: bool(caption_of(a)), max_failures=failures)

    @classmethod
    def from_options(
        cls, options: Any, output: Path, temperature: float, *, samples: float | None = None
    ) -> EndpointCaptioner:
        """The captioner of a command's `EndpointOptions`; `samples` is the temperature of all captions but the first."""
        from hf_captionrl.captioners.chat import ChatCaptioner

        backend = HTTPBackend(
            options.endpoint,
            options.model,
            is_multimodal=True,
            max_new_tokens=options.max_new_tokens,
            temperature=temperature,
            retry_temperature=temperature if samples is None else samples,
            top_p=getattr(options, "top_p", 1.0),
            seed=options.seed,
            **options.requests,
        )
        answers = output.with_suffix(".answers.jsonl")
        if options.overwrite:
            answers.unlink(missing_ok=True)
        prompt = without_words(options.prompt or ChatCaptioner.default_prompt, options.do_not_mention)
        return cls(backend, prompt, answers)

    def __exit__(self, *error: object) -> None:
        """Close the file of answers."""
        self._answers.close()

    close = __exit__

    def describe(self, image_ids: Sequence[str], images: Sequence[Any], samples: int) -> list[list[str]]:
        """Captions per image, `samples` or, where the endpoint failed, fewer; sample k has the seed plus k."""
        from hf_captionrl.retrieval import image_hash

        questions = [
            Prompt("caption", image_hash(image), self.prompt, image=image, attempt=attempt)
            for image in images
            for attempt in range(samples)
        ]
        answers = dict(self._answers.complete(questions))
        captions: list[list[str]] = [[] for _ in images]
        for number in range(len(questions)):
            row, answer = number // samples, answers[number]
            if caption := caption_of(answer):
                captions[row].append(caption)
            else:
                reason = answer.detail if isinstance(answer, Failure) else "empty, or only reasoning"
                self.failed[image_ids[row]] = reason
        return captions

    def summary(self) -> dict[str, Any]:
        """Cost of this run."""
        names = "requests retries prompt_tokens completion_tokens truncated".split()
        counts = {name: self.backend.usage[name] for name in names}
        return counts | {"answers_of_earlier_runs": self._answers.num_earlier}


def cost_sentence(facts: dict[str, Any]) -> str:
    """The summary of an [`EndpointCaptioner`] in words."""
    text = f"{facts['requests']:,} requests ({facts['retries']:,} repeated), {facts['prompt_tokens']:,} tokens of prompts and "
    text += f"{facts['completion_tokens']:,} of answers"
    text += f"; {facts['truncated']:,} answers reached --max_new_tokens" if facts["truncated"] else ""
    earlier = facts["answers_of_earlier_runs"]
    return text + (f"; {earlier:,} answers of earlier runs were used" if earlier else "") + "."


def caption_of(answer: Answer) -> str:
    """The caption in an answer: one line, without the model's reasoning and without quotation marks around all of it."""
    text = "" if isinstance(answer, Failure) else answer.text if isinstance(answer, Truncated) else answer
    # A prompt may open the reasoning; without its end there is no caption.
    text = " ".join(re.sub(r"\A.*</think>|\A\s*<think>.*", "", text, flags=re.DOTALL).split())
    is_quoted = len(text) > 1 and text[0] + text[-1] in ('""', "“”") and not set(text[1:-1]) & set('"“”')
    return text[1:-1].strip() if is_quoted else text


# --- Backends of transformers: language models, vision-language models, and the captioners of this package -----------


class TransformersBackend(LocalBackend):
    """Base class: loads a model of transformers (a folder, a name on the Hub, or a shipped model), generates, extracts the answers."""

    model_class: ClassVar[str]  # name of the class in transformers that loads the model
    processor_class: ClassVar[str]  # name of the class that prepares its inputs

    def _load(self) -> str:
        import transformers

        path, revision = model_path(self.model), self.revision
        self._processor: Any = getattr(transformers, self.processor_class).from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        self._tokenizer: Any = getattr(self._processor, "tokenizer", self._processor)
        self._tokenizer.padding_side = "left"  # the answer continues the last token of the prompt
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model_class = getattr(transformers, self.model_class)
        loaded, missing = load_pretrained(model_class, path, revision=revision, dtype=self.dtype)
        check_complete(path, loaded, missing)
        self._device = default_device(self.device)
        self._model: Any = loaded.to(self._device).eval()
        settings = self._model.generation_config
        sources = (self._tokenizer, settings, loaded.config, loaded.config.get_text_config(decoder=True))
        names = ("bos", "eos", "pad", "sep", "cls", "decoder_start")
        values = [getattr(source, f"{name}_token_id", None) for name in names for source in sources]
        special = {i for value in values for i in (value if isinstance(value, (list, tuple)) else [value])}
        self._special = special - {None}
        self._template = str(getattr(self._processor, "chat_template", None) or "")
        identity = loaded_revision(loaded, self._template)
        if settings.pad_token_id is None:
            settings.pad_token_id = self._tokenizer.pad_token_id
        return identity

    @abstractmethod
    def _encoded(self, prompts: Sequence[Prompt]) -> tuple[Any, list[str]]:
        """Inputs of the model, padded on the left, and the texts of the prompts."""

    def _answer_ids(self, text: str, last: int, answers: Sequence[str]) -> list[list[int]]:
        """Tokens of each answer as the model writes them after a text that ends in token `last`: after a word, a blank is first."""
        tokenizer, found = self._tokenizer, []
        before = tokenizer(text, add_special_tokens=False)["input_ids"]
        ends_in_word = last not in tokenizer.all_special_ids and not tokenizer.decode([last])[-1:].isspace()
        for answer in answers:
            answer = " " + answer if ends_in_word else answer
            ids = tokenizer(text + answer, add_special_tokens=False)["input_ids"]
            if ids[: len(before)] == before:
                found.append(ids[len(before) :])
            else:  # the tokenizer joins the end of the prompt with the answer; models do not
                found.append(tokenizer(answer, add_special_tokens=False)["input_ids"])
        return found

    def score_answers(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> Iterator[tuple[int, Scores]]:
        """Log-probabilities of the answers. The prompt is computed once, without padding, and its cache is shared by the answers."""
        longest = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        for position, prompt in enumerate(prompts):
            inputs, (text,) = self._encoded([prompt])
            ids = self._answer_ids(text, int(inputs["input_ids"][0, -1]), answers)
            length = inputs["input_ids"].shape[1] + max(map(len, ids))
            if longest is not None and length > longest:
                said = f"the prompt with the answers has {length} tokens, but the model accepts {longest}"
                yield position, Failure("backend_rejected", said)
            else:
                yield position, self._scores(inputs, ids)

    def _scores(self, inputs: Any, ids: list[list[int]]) -> list[float]:
        """Log-probabilities of the tokens of A answers after one prompt. Sums are in fp64, because bf16 has 8 bits."""
        import torch

        # PaliGemma's processor makes labels.
        inputs = {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": True}
        # Of the logits of the prompt only the last are needed; not every model can leave out the others.
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            inputs["logits_to_keep"] = 1
        with torch.inference_mode():
            before = self._model(**inputs)
            if self._model.config.is_encoder_decoder or getattr(before, "past_key_values", None) is None:
                super().score_answers((), ())
            first = before.logits[0, -1].double().log_softmax(0)  # (V,)
            total = first[[row[0] for row in ids]]  # (A,)
            if longer := [a for a, row in enumerate(ids) if len(row) > 1]:
                rows = [torch.tensor(ids[a]) for a in longer]
                tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(self._device)
                (cache := before.past_key_values).batch_repeat_interleave(len(longer))
                # Padding is on the right, so that no token sees it; a mask would make models compute other positions.
                after = self._model(input_ids=tokens[:, :-1].clamp(min=0), past_key_values=cache, use_cache=True)
                log_probs = after.logits.double().log_softmax(2)  # (A, T - 1, V)
                found = log_probs.gather(2, tokens[:, 1:, None].clamp(min=0))[..., 0]
                total[longer] += found.masked_fill(tokens[:, 1:] < 0, 0).sum(1)
        values: list[float] = total.tolist()
        return values

    def _generate(self, inputs: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Answer]:
        """Generate for a batch, and remove prompts and special tokens."""
        import torch

        seed_draws(prompts)
        with torch.no_grad():
            found = self._model.generate(**inputs, **decoding(prompts[0].attempt, max_new_tokens)).tolist()
        answers: list[Answer] = []
        for row, asked in zip(found, inputs["input_ids"].tolist(), strict=True):
            written = row[len(asked) :] if row[: len(asked)] == asked else row  # InstructBLIP returns only the answer
            words = [token for token in written if token not in self._special]
            text = str(self._tokenizer.decode(words, skip_special_tokens=True))
            ended = len(words) < len(written) or len(written) < max_new_tokens
            answers.append(text if ended else Truncated(text))
        return answers


class TransformersTextBackend(TransformersBackend):
    """A causal language model of transformers."""

    model_class = "AutoModelForCausalLM"
    processor_class = "AutoTokenizer"

    def _encoded(self, prompts: Sequence[Prompt]) -> tuple[Any, list[str]]:
        texts = [chat_text(self._tokenizer, prompt) for prompt in prompts]
        # Chat templates already add the first special token.
        ids = self._tokenizer(texts, add_special_tokens=not self._template)["input_ids"]
        # Not all that the tokenizer returns: GPT-2 adds the embedding of a type 0 to every token.
        return self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self._device), texts

    def _answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        longest = getattr(self._model.config, "max_position_embeddings", None) or math.inf
        lengths = self._encoded(prompts)[0]["attention_mask"].sum(1).tolist()
        too_long = "the prompt has {} tokens, but the model accepts {}"
        answers: list[Answer] = [Failure("backend_rejected", too_long.format(length, longest)) for length in lengths]
        fitting = [i for i, length in enumerate(lengths) if length + 16 <= longest]
        if fitting:
            asked = [prompts[i] for i in fitting]
            batch, _ = self._encoded(asked)
            room = min(self.max_new_tokens, longest - batch["input_ids"].shape[1])
            for i, answer in zip(fitting, self._generate(batch, asked, int(room)), strict=True):
                answers[i] = answer
        return answers


class TransformersVisionBackend(TransformersBackend):
    """An image-text-to-text model of transformers, with or without a chat template (LLaVA, Qwen-VL, InstructBLIP, BLIP)."""

    is_multimodal = True
    model_class = "AutoModelForImageTextToText"
    processor_class = "AutoProcessor"

    def _encoded(self, prompts: Sequence[Prompt]) -> tuple[Any, list[str]]:
        import torch

        from hf_captionrl.captioners.captioner import start_token_settings

        texts = [prompt.user for prompt in prompts]
        if self._template:
            contents = [prompt.parts(lambda image: {"type": "image"}, image_first=True) for prompt in prompts]
            chats = [[{"role": "user", "content": content}] for content in contents]
            render = partial(self._processor.apply_chat_template, tokenize=False, add_generation_prompt=True)
            texts = [str(render(chat)) for chat in chats]
        images: list[Any] = [[*map(to_rgb, prompt.images)] for prompt in prompts]
        if all(len(own) == 1 for own in images):
            images = [own[0] for own in images]  # models of one image take a flat list
        settings = {"padding": True, "return_tensors": "pt", **start_token_settings(self._processor, texts[0])}
        inputs = self._processor(images=images if any(images) else None, text=texts, **settings).to(self._device)
        for name, value in inputs.items():
            if torch.is_tensor(value) and value.is_floating_point():
                inputs[name] = value.to(self._model.dtype)
        return inputs, texts

    def _answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        return self._generate(self._encoded(prompts)[0], prompts, self.max_new_tokens)


@dataclass(eq=False, repr=False, kw_only=True)
class CaptionerBackend(LocalBackend):
    """A captioner of this package as the vision model; it ignores the question and describes the image."""

    is_multimodal = True
    dtype: str = "float32"
    max_new_tokens: int = 100

    def _load(self) -> str:
        import torch

        from hf_captionrl.captioners import load_captioner

        self._captioner = load_captioner(
            model_path(self.model),
            revision=self.revision,
            dtype=torch.float32 if self.dtype == "auto" else getattr(torch, self.dtype),
            device=default_device(self.device),
        )
        return loaded_revision(self._captioner.model, self._captioner.prompt)

    def _answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        inputs = self._captioner.encode_images([prompt.image for prompt in prompts])
        seed_draws(prompts)
        found = self._captioner.generate(**inputs, **decoding(prompts[0].attempt, self.max_new_tokens))
        both = zip(found.captions, found.ended.tolist(), strict=True)
        return [text if ended else Truncated(text) for text, ended in both]
