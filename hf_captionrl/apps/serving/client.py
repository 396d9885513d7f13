"""`RemoteReward`: a reward function with TRL's signature that asks a server of `captionrl serve-rewards`."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from hf_captionrl.data.images import open_image
from hf_captionrl.rewards.base import completion_text

VERSION = 1
"""Of the JSON of requests and answers."""

_RETRIED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)


def rollout_of(
    completions: Sequence[Any], columns: Mapping[str, Any], column: str
) -> tuple[list[str], list[Any], list[int]]:
    """N captions, the distinct images of a column (ids of `image_id`, else RGB images), and the position of each caption's."""
    if columns.get(column) is None:
        raise ValueError(f"column is {column!r}, and the data have {sorted(columns)}. Name that of ids or images.")
    if column == "image_id":
        keys: list[Any] = [str(value) for value in columns[column]]
        items = keys
    else:  # a row of TRL's column `images` is a list
        single = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in columns[column]]
        items = [open_image(value) for value in single]
        keys = [(item.size, item.tobytes()) for item in items]
    distinct = dict(zip(keys, items, strict=True))
    number = {key: row for row, key in enumerate(distinct)}
    captions = [completion_text(completion).strip() for completion in completions]
    return captions, list(distinct.values()), [number[key] for key in keys]


def _sent(image: Any) -> dict[str, str]:
    if isinstance(image, str):
        return {"id": image}
    image.save(buffer := io.BytesIO(), "PNG", compress_level=1)
    return {"data": base64.b64encode(buffer.getvalue()).decode("ascii")}


class RemoteReward:
    """The rewards of a server of `captionrl serve-rewards`, for `reward_funcs` of TRL's trainers; can be pickled.

    The numbers are bit-identical to those of the server's process.

    Args:
        url (`str`): Address of the server, such as `"http://127.0.0.1:8787"`.
        column (`str`): Column of the data with the images: `"image_id"` for ids of the server's data, else images, sent as PNG.
        rewards (`Sequence[str]`, *optional*): Some of the served rewards. None: all.
        send_ids (`bool`): Send TRL's `completion_ids`, for a server with the policy's `--tokenizer`.
        timeout_s (`float`): Longest wait for a connection and for an answer, in seconds.
        tries (`int`): Attempts if the connection is refused or drops. An answer is never asked for again.
        backoff_s (`float`): Seconds before the second attempt, doubled for each further one.
    """

    def __init__(
        self,
        url: str,
        *,
        column: str = "image_id",
        rewards: Sequence[str] | None = None,
        send_ids: bool = False,
        timeout_s: float = 300.0,
        tries: int = 5,
        backoff_s: float = 1.0,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"url is {url!r}. Use the address that the server prints, such as http://127.0.0.1:8787.")
        self.url, self.column, self.rewards, self.send_ids = url.rstrip("/"), column, rewards, send_ids
        self.timeout_s, self.tries, self.backoff_s = timeout_s, tries, backoff_s
        self.__name__ = "_".join(rewards or ["remote_reward"])  # under which TRL logs it

    @cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=self.timeout_s, trust_env=False, follow_redirects=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_client"}

    def __call__(self, completions: Sequence[Any], completion_ids: Any = None, **columns: Any) -> list[float]:
        """Weighted sums of the rewards of N texts or lists of chat messages."""
        ids = completion_ids if self.send_ids else None
        found: list[float] = self.score(*rollout_of(completions, columns, self.column), ids)["rewards"]
        return found

    def score(
        self, captions: Sequence[str], images: Sequence[Any], image_of: Sequence[int], completion_ids: Any = None
    ) -> dict[str, Any]:
        """`rewards`, the weighted sums of N captions of M images, and `parts`, the values of each reward by name.

        Raises:
            ValueError: If the server refuses the request, with its reason.
            ConnectionError: If it does not answer, or fails.
        """
        body = {"version": VERSION, "captions": captions, "images": list(map(_sent, images)), "image_of": image_of}
        ids = None if completion_ids is None else [list(map(int, row)) for row in completion_ids]
        response = self._post(json.dumps(body | {"completion_ids": ids, "rewards": self.rewards}))
        try:
            found: dict[str, Any] = response.json()
            if response.is_success and found["version"] == VERSION and len(found["rewards"]) == len(captions):
                return found
            said = str(found["error"])
        except (ValueError, KeyError, TypeError):
            raise ConnectionError(f"{self.url} is not a reward server of version {VERSION}. Check url.") from None
        kind = ValueError if response.is_client_error else ConnectionError
        raise kind(f"{self.url} answers {response.status_code}: {said}")

    def _post(self, body: str) -> httpx.Response:
        headers, attempt = {"Content-Type": "application/json"}, 1
        while True:
            try:
                return self._client.post(f"{self.url}/rewards", content=body, headers=headers)
            except httpx.HTTPError as error:
                if attempt >= self.tries or not isinstance(error, _RETRIED):
                    raise ConnectionError(
                        f"{self.url} does not answer ({type(error).__name__}: {error}; attempt {attempt}, timeout_s "
                        f"{self.timeout_s:g}). Start `captionrl serve-rewards`, or raise timeout_s."
                    ) from None
            time.sleep(self.backoff_s * 2 ** (attempt - 1))
            attempt += 1
