"""Client of endpoints with OpenAI's chat completions.

The key comes from an environment variable and is sent only in the header of requests to the given address. No message, log or
file contains it, and redirects are not followed.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

from hf_captionrl.language_models.backend import RETRY_TEMPERATURE, Answer, BackendError, Failure, Truncated
from hf_captionrl.language_models.prompt import Prompt

__all__ = ["HTTPBackend", "chat_turns", "image_url"]

# Not `huggingface_hub.InferenceClient`, for three reasons: its `timeout` limits each read and not the whole answer (with a
# slow server, a request with a timeout of 0.3 s took 7 s); it follows redirects, which sends prompts and images elsewhere;
# and without a key it sends the user's Hub token to the endpoint.

_LARGEST_ANSWER = 4 * 2**20  # bytes; a caption has a few hundred
_RETRIED = (408, 409, 425, 429)  # and 500 and above
_ONE_PROMPT = (400, 413, 415, 422)  # other codes, such as 401, 402, 404 and redirects, concern every prompt
_LONGEST_WAIT_S = 120.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


def image_url(image: Any) -> str:
    """An image as a data URL for chat endpoints.

    Returns `data:image/png;base64,...` for small images, JPEG of quality 90 for those above 512 x 512 pixels.
    """
    kind = "PNG" if image.width * image.height <= 512 * 512 else "JPEG"
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, quality=90)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def chat_turns(prompt: Prompt, is_multimodal: bool, *, image_first: bool = False) -> list[dict[str, Any]]:
    """A prompt as the messages of a chat, with its image in the last one."""
    turns: list[dict[str, Any]] = list(prompt.turns())
    if prompt.image is not None and is_multimodal:
        text = {"type": "text", "text": prompt.user}
        image = {"type": "image_url", "image_url": {"url": image_url(prompt.image)}}
        turns[-1] = {"role": "user", "content": [image, text] if image_first else [text, image]}
    return turns


class HTTPBackend:
    """Backend of an OpenAI-compatible endpoint.

    Requests are repeated after 429, 5xx, timeouts, dropped connections and answers that are not JSON. The wait is
    `backoff_s * 2**k` seconds, or that of `Retry-After`. Refusals of one prompt (400, 413, 415, 422) become a [`Failure`];
    refusals of every prompt (wrong key, wrong address) stop the run.

    Args:
        base_url (`str`): Address up to `/chat/completions`, for instance `http://127.0.0.1:8000/v1`.
        model (`str`): Name of the model there.
        revision (`str`): Revision for the provenance, because endpoints do not report one.
        api_key_env (`str`, *optional*): Environment variable with the key; `None` for no key.
        is_multimodal (`bool`): Whether to send images.
        max_new_tokens (`int`): Longest answer.
        temperature (`float`): Of sampling; later attempts use at least 0.7.
        seed (`int`, *optional*): Sent plus the number of the attempt; `None` for servers without seeds.
        concurrency (`int`): Concurrent requests.
        timeout_s (`float`): Limit in seconds for connecting, for each wait, and for the whole answer.
        tries (`int`): Largest number of requests per prompt.
        backoff_s (`float`): First wait in seconds; doubled each time, at most two minutes.
        sleep (`Callable`): Waits.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        revision: str = "",
        api_key_env: str | None = None,
        is_multimodal: bool = False,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int | None = 0,
        concurrency: int = 4,
        timeout_s: float = 120.0,
        tries: int = 6,
        backoff_s: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url is {base_url!r}. Use an address such as http://127.0.0.1:8000/v1.")
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "base_url contains a user, a password or a query, which would appear in logs. Put the key into an environment "
                "variable and use api_key_env."
            )
        if tries < 1 or concurrency < 1 or timeout_s <= 0 or backoff_s < 0:
            raise ValueError(
                f"tries ({tries}) and concurrency ({concurrency}) must be at least 1, timeout_s ({timeout_s}) above 0 and "
                f"backoff_s ({backoff_s}) not negative."
            )
        self._key = ""
        if api_key_env is not None:
            self._key = os.environ.get(api_key_env, "").strip()
            if not self._key:
                raise BackendError(f"The environment variable {api_key_env} is empty. Put the endpoint's key into it.")
            # http.client would print such a key in its error.
            if not all("!" <= letter <= "~" for letter in self._key):
                raise BackendError(
                    f"The environment variable {api_key_env} contains spaces, line breaks or characters that are not ASCII, "
                    "which are invalid in a key. Put only the endpoint's key into it."
                )
        self._url = base_url.rstrip("/") + "/chat/completions"
        self.model, self.is_multimodal = model, is_multimodal
        self.revision = "; ".join(
            part
            for part in (revision, f"temperature={temperature:g} seed={seed} max_new_tokens={max_new_tokens}")
            if part
        )
        self._settings = {"max_tokens": max_new_tokens}
        self._temperature, self._seed = temperature, seed
        self._concurrency, self._timeout_s, self._tries = concurrency, timeout_s, tries
        self._backoff_s, self._sleep = backoff_s, sleep
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r}, {self.model!r})"

    def _hide(self, text: str) -> str:
        """Remove the key, which a server may repeat in its error."""
        return text.replace(self._key, "***") if self._key else text

    def _body(self, prompt: Prompt) -> bytes:
        temperature = max(self._temperature, RETRY_TEMPERATURE) if prompt.attempt else self._temperature
        body = {
            "model": self.model,
            "messages": chat_turns(prompt, self.is_multimodal),
            "temperature": temperature,
            **self._settings,
        }
        seed = {} if self._seed is None else {"seed": self._seed + prompt.attempt}
        return json.dumps(body | seed).encode("utf-8")

    def _read(self, response: Any, most: int, deadline: float) -> bytes:
        """Up to `most` bytes before the deadline; the timeout of a socket restarts with every byte."""
        data = bytearray()
        while len(data) < most and (part := response.read1(min(2**16, most - len(data)))):
            data += part
            if time.monotonic() > deadline:
                raise TimeoutError(f"the answer was incomplete after {self._timeout_s:g} s")
        return bytes(data)

    def _send(self, body: bytes) -> str | Truncated:
        """One request. Raises `_RetryError` if another may succeed, else `_RejectedError` or, for every prompt, `BackendError`."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        deadline = time.monotonic() + self._timeout_s
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                data = self._read(response, _LARGEST_ANSWER + 1, deadline)
                missing = response.length
        except urllib.error.HTTPError as error:
            try:
                with error:
                    told = self._read(error, 2000, deadline)
            except (OSError, http.client.HTTPException):
                told = b""
            said = self._hide(" ".join(told.decode("utf-8", "replace").split())[:200])
            after = error.headers.get("Retry-After", "")
            message = f"HTTP {error.code}: {said}"
            if error.code in _RETRIED or error.code >= 500:
                raise _RetryError(message, float(after) if after.replace(".", "", 1).isdecimal() else None) from None
            if error.code in _ONE_PROMPT:
                raise _RejectedError(message) from None
            raise BackendError(
                f"{self._url} answers {message}. Check the address, the model's name, the key and the credit."
            ) from None
        except (OSError, http.client.HTTPException) as error:  # timeouts, refused and dropped connections
            raise _RetryError(self._hide(f"{type(error).__name__}: {error}")) from None
        try:
            if len(data) > _LARGEST_ANSWER:
                raise ValueError("longer than 4 MiB")
            if missing:
                raise ValueError(f"{missing} bytes are missing")
            choice = json.loads(data)["choices"][0]
            content = choice["message"]["content"]
            truncated = choice.get("finish_reason") == "length"
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise _RetryError(f"not a chat completion: {type(error).__name__}: {error}") from None
        if isinstance(content, list):  # some servers return parts
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(content, str):  # null: a refusal or an empty answer
            return ""
        return Truncated(content) if truncated else content

    def _ask(self, prompt: Prompt) -> Answer:
        body = self._body(prompt)
        message = ""
        for number in range(self._tries):
            try:
                return self._send(body)
            except _RejectedError as error:
                return Failure("backend_rejected", str(error))
            except _RetryError as error:
                message = str(error)
                if number + 1 < self._tries:
                    wait = self._backoff_s * 2**number if error.after_s is None else error.after_s
                    self._sleep(min(wait, _LONGEST_WAIT_S))
        return Failure("backend_failed", f"no answer in {self._tries} tries; the last error: {message}")

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Answer prompts, several at a time."""
        fatal: BackendError | None = None
        left: Iterator[tuple[int, Prompt]] = iter(enumerate(prompts))
        with ThreadPoolExecutor(self._concurrency) as pool:
            # The next request starts only after the caller has taken an answer, so a kill loses at most these requests.
            asked = {pool.submit(self._ask, prompt): position for position, prompt in islice(left, self._concurrency)}
            while asked:
                done, _ = wait(asked, return_when=FIRST_COMPLETED)
                for future in done:
                    position = asked.pop(future)
                    try:
                        answer = future.result()
                    except BackendError as error:
                        fatal = error
                        left = iter(())  # the answers of running requests are still returned
                        continue
                    yield position, answer
                    for further, prompt in islice(left, 1):
                        asked[pool.submit(self._ask, prompt)] = further
        if fatal is not None:
            raise fatal


class _RetryError(Exception):
    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class _RejectedError(Exception):
    pass
