"""`RemoteReward`: a reward function with TRL's signature that asks a server of `captionrl serve-rewards`."""

from __future__ import annotations

import base64
import io
import itertools
import json
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from hf_captionrl.rewards.base import completion_text

VERSION = 1
"""Of the JSON of requests and answers."""

_RETRIED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)


def rollout_of(
    completions: Sequence[Any], columns: dict[str, Any], column: str
) -> tuple[list[str], list[Any], list[int]]:
    """N captions, the distinct images of a column (ids, or RGB images where it is not `image_id`), and the image of each caption."""
    if columns.get(column) is None:
        known = sorted(name for name in columns if columns[name] is not None)
        raise ValueError(f"column is {column!r}, and the data have {known}. Use column='image' or 'image_id'.")
    keyed: dict[Any, Any] = {}
    keys = []
    for value in columns[column]:
        if column == "image_id":
            key = item = str(value)
        else:
            from hf_captionrl.data.images import open_image

            if isinstance(value, (list, tuple)):  # TRL's column `images`
                if len(value) != 1:
                    raise ValueError(f"A row of the column {column!r} has {len(value)} images. Use one image per row.")
                value = value[0]
            item = open_image(value)
            key = (item.size, item.tobytes())
        keyed.setdefault(key, item)
        keys.append(key)
    number = {key: row for row, key in enumerate(keyed)}
    captions = [completion_text(completion).strip() for completion in completions]
    return captions, list(keyed.values()), [number[key] for key in keys]


def _sent(image: Any) -> dict[str, str]:
    if isinstance(image, str):
        return {"id": image}
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return {"data": base64.b64encode(buffer.getvalue()).decode("ascii")}


class RemoteReward:
    """The rewards of a server of `captionrl serve-rewards`, as a function for `reward_funcs` of TRL's trainers.

    The numbers are bit-identical to those of the server's process. It can be pickled.

    Args:
        url (`str`): Address of the server, such as `"http://127.0.0.1:8787"`.
        column (`str`): Column of the data that names the images: `"image_id"` for ids of the server's data set, any other for
            images, which are sent as PNG.
        rewards (`Sequence[str]`, *optional*): Some of the served rewards. None: all.
        send_ids (`bool`): Send TRL's `completion_ids`, for a server with the policy's `--tokenizer`.
        timeout_s (`float`): Longest wait for a connection, and for an answer, in seconds.
        tries (`int`): Attempts to connect; refused and dropped connections are repeated, an answer never is.
        backoff_s (`float`): Seconds before the second attempt, doubled for each further one.

    Example:
        >>> reward = RemoteReward("http://127.0.0.1:8787")  # doctest: +SKIP
        >>> trainer = GRPOTrainer(model, reward_funcs=reward, train_dataset=train)  # doctest: +SKIP
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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {url!r}. Use the address that the server prints, such as http://127.0.0.1:8787.")
        if tries < 1:
            raise ValueError(f"tries is {tries}. Use 1 or more.")
        self.url, self.column, self.send_ids = url.rstrip("/"), column, send_ids
        self.rewards = None if rewards is None else list(rewards)
        self.timeout_s, self.tries, self.backoff_s = timeout_s, tries, backoff_s
        self.__name__ = "_".join(self.rewards or ["remote_reward"])  # under which TRL logs it

    @cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=self.timeout_s, trust_env=False, follow_redirects=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_client"}

    def __call__(self, completions: Sequence[Any], completion_ids: Any = None, **columns: Any) -> list[float]:
        """Weighted sums of the rewards of N texts or lists of chat messages."""
        captions, images, image_of = rollout_of(completions, columns, self.column)
        found: list[float] = self.score(captions, images, image_of, completion_ids if self.send_ids else None)[
            "rewards"
        ]
        return found

    def score(
        self, captions: Sequence[str], images: Sequence[Any], image_of: Sequence[int], completion_ids: Any = None
    ) -> dict[str, Any]:
        """`rewards`, N weighted sums, and `parts`, N values of each reward by name, of N captions of M images or ids.

        Raises:
            ValueError: If the server refuses the request, with its reason.
            ConnectionError: If it does not answer, or fails.
        """
        body = {"version": VERSION, "captions": captions, "images": list(map(_sent, images)), "image_of": image_of}
        if completion_ids is not None:
            body["completion_ids"] = [list(map(int, ids)) for ids in completion_ids]
        if self.rewards is not None:
            body["rewards"] = self.rewards
        response = self._post(json.dumps(body))
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
        headers = {"Content-Type": "application/json"}
        for attempt in itertools.count(1):
            try:
                return self._client.post(f"{self.url}/rewards", content=body, headers=headers)
            except httpx.HTTPError as error:
                if attempt == self.tries or not isinstance(error, _RETRIED):
                    raise ConnectionError(
                        f"{self.url} does not answer ({type(error).__name__}: {error}; attempt {attempt}, timeout_s "
                        f"{self.timeout_s:g}). Start `captionrl serve-rewards`, or raise timeout_s."
                    ) from None
            time.sleep(self.backoff_s * 2 ** (attempt - 1))
        raise AssertionError  # unreachable
