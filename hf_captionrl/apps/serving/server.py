"""`captionrl serve-rewards`: rewards behind HTTP, and the same rewards as a function in process.

Legend: M images of a request, N captions, B groups of captions, R rewards, T tokens.
"""

from __future__ import annotations

import base64
import binascii
import json
import signal
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_captionrl.apps.serving.client import VERSION, rollout_of
from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.data.columns import caption_column, id_column
from hf_captionrl.data.images import ImageError, open_image
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.options import EMBEDDED
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.rewards import REWARDS, Reward, RewardContext, RewardData, WeightedRewards
from hf_captionrl.text.ngrams import encode_words
from hf_captionrl.text.tokenize import ptb_tokenize_all
from hf_captionrl.utils.local_server import LOCAL_NAMES, LocalServer, RequestError
from hf_captionrl.utils.model_files import model_path

if TYPE_CHECKING:
    from hf_captionrl.apps.serving.options import RewardOptions, ServeOptions

# --- Rewards in process ----------------------------------------------------------------------------------------------


def parse_reward(spec: str) -> Reward:
    """A registered reward from `NAME` or `NAME:FIELD=VALUE,FIELD=VALUE`."""
    name, _, settings = spec.partition(":")
    if name not in REWARDS:
        raise ValueError(f"--reward {name!r} is not a reward. Use one of {', '.join(sorted(REWARDS))}.")
    pairs = [setting.split("=", 1) for setting in settings.split(",") if setting]
    try:
        return REWARDS[name](**{field.strip(): yaml.safe_load(value) for field, value in pairs})
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--reward {spec!r} ({error}). Use NAME:FIELD=VALUE,FIELD=VALUE.") from None


class RewardService:
    """Rewards as one function with TRL's signature, from the options of `captionrl serve-rewards`.

    Its numbers depend on the arguments of a call alone, and are those of the server. `column` is that of [`RemoteReward`].
    """

    def __init__(self, options: RewardOptions, specs: Sequence[str], *, column: str = "image_id") -> None:
        self.total = WeightedRewards([parse_reward(spec) for spec in specs], options.reward_weights)
        names, self.column, self.__name__ = self.total.names, column, "_".join(self.total.names)
        name = options.scorer or ("scenes:clip-reward" if options.dataset in EMBEDDED else None)
        if name is None and "self_retrieval" in names:
            raise ValueError("--reward self_retrieval needs a scorer. Use --scorer openai/clip-vit-base-patch32.")
        if not options.dataset and "cider" in names:
            raise ValueError("--reward cider compares captions with references. Use --dataset.")
        self._tokenizer, self._end = None, 0
        if options.tokenizer is not None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(model_path(options.tokenizer), trust_remote_code=False)
            self._end = self._tokenizer.eos_token_id
            if self._end is None:
                raise ValueError(f"--tokenizer {options.tokenizer!r} has no end token. Use the policy's tokenizer.")
        self.scorer = None if name is None else load_scorer(model_path(name), device=options.device)
        self.image_ids: Sequence[str] = []
        references: Sequence[list[str]] = []
        columns: Sequence[str] = []
        if options.dataset:
            rows = load_split(options, quarantine_path=None, require_captions="cider" in names).dataset
            self.image_ids, references = id_column(rows), caption_column(rows)
            self._columns = rows.remove_columns("image")
            columns = self._columns.column_names
        self._rows = RowLookup(self.image_ids)
        self._words = {"": self._end}  # of the references; a call numbers further ones after them
        encode_words(ptb_tokenize_all(text for texts in references for text in texts), self._words)
        self._lock = threading.Lock()  # neither a data set nor a model is thread-safe

        def features(scorer: Any) -> Tensor:
            return scorer_features(scorer, rows, cache_dir=options.cache_dir) if options.dataset else torch.empty(0, 0)

        device = getattr(self.scorer, "device", torch.device("cpu"))
        known = (self.image_ids, references, features, self._encoded, self._end, device, self.scorer)
        self.total.prepare(RewardData(*known, columns=columns))

    def _encoded(self, captions: Sequence[str], ids: Sequence[Sequence[int]] | None = None) -> tuple[Tensor, Tensor]:
        """Ids and mask `(N, T)`: the given ids, or the tokens of the policy or words of captions, with the end token."""
        if ids is None and self._tokenizer is not None:
            found = self._tokenizer([caption.strip() for caption in captions], add_special_tokens=False).input_ids
            ids = [[*row, self._end] for row in found]
        elif ids is None:
            batch = encode_words(ptb_tokenize_all(captions), known=self._words)
            ids = [[*row.tolist(), self._end] for row in batch.tokens.split(batch.lengths.tolist())]
        padded = pad_sequence([torch.tensor(row, dtype=torch.long) for row in ids], batch_first=True)
        return padded, torch.arange(padded.size(1)) < torch.tensor(list(map(len, ids)))[:, None]

    def __call__(self, completions: Sequence[Any], completion_ids: Any = None, **columns: Any) -> list[float]:
        """Weighted sums of the rewards of N texts or lists of chat messages."""
        ids = None if self._tokenizer is None else completion_ids
        found: list[float] = self.score(*rollout_of(completions, columns, self.column), ids)["rewards"]
        return found

    def score(
        self,
        captions: Sequence[str],
        images: Sequence[Any],
        image_of: Sequence[int],
        completion_ids: Sequence[Sequence[int]] | None = None,
        only: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """`rewards`, the weighted sums of N captions, and `parts`, the values of each reward by name.

        The M images are distinct, all ids of the data or all PIL images, and distractors of each other; `image_of` is the
        position of each caption's image. `completion_ids` hold the end token where a caption is not truncated.
        """
        names, by_id = self.total.names, isinstance(images[0], str)
        if unknown := sorted(set(only or ()).difference(names)):
            raise ValueError(f"There is no reward {unknown[0]!r:.60} here. Use {', '.join(names)}.")
        chosen = [index for index, name in enumerate(names) if only is None or name in only]
        if completion_ids is not None and self._tokenizer is None:
            raise ValueError("completion_ids are tokens of the policy. Start the server with its --tokenizer.")
        for reward in (self.total.rewards[index] for index in chosen):
            if reward.name == "truncation" and completion_ids is None:
                raise ValueError(
                    "The reward 'truncation' needs completion_ids. Send them (send_ids=True), or leave it out."
                )
            reads_data = reward.name == "cider" or reward.reads_only_text  # captions or columns
            if not by_id and (reads_data or getattr(reward, "bank_images", "random") != "random"):
                raise ValueError(f"The reward {reward.name!r} needs images of --dataset. Send ids instead of files.")
        known = torch.from_numpy(self._rows.rows(images)) if by_id else torch.arange(len(images))  # (M,)
        if bool((known < 0).any()):
            raise ValueError(f"There is no image {self._rows.missing(images)[0]!r:.60} here. Use ids of --dataset.")
        if len(known.unique()) < len(known):
            raise ValueError("images has an id twice, which would be its own distractor. Send each image once.")
        runs = [(image, len(list(run))) for image, run in groupby(image_of)]
        is_even = len({length for _, length in runs}) == 1  # else each caption is a group
        of_group = [image for image, _ in runs] if is_even else list(image_of)  # (B,)
        rows = known[of_group]
        ids, mask = self._encoded(captions, completion_ids)
        with self._lock:
            columns = self._columns[rows.tolist()] if by_id else {}
            context = RewardContext(
                captions=list(captions),
                ids=ids,
                mask=mask,
                ended=((ids == self._end) & mask).any(1),
                rows=rows,
                image_ids=columns.get("image_id", [f"image {image}" for image in of_group]),
                references=columns.get("captions", [[] for _ in of_group]),
                candidates=known,
                positions=torch.tensor(of_group),
                columns=columns,
                candidate_images=None if by_id else images,
            )
            values = self.total(context, only=chosen)[:, chosen]  # (N, R)
        weights = torch.tensor([self.total.weights[index] for index in chosen], dtype=torch.float64)
        parts = {names[index]: values[:, column].tolist() for column, index in enumerate(chosen)}
        return {"rewards": (values * weights).sum(1).tolist(), "parts": parts}


# --- Rewards behind HTTP: bodies are JSON and images are bytes; no path of a client is opened, nothing is unpickled ---

_ITEMS: dict[str, type] = {"captions": str, "images": dict, "image_of": int, "completion_ids": list, "rewards": str}
_REQUIRED = ("captions", "images", "image_of")


def _are_whole(values: Sequence[Any], below: int) -> bool:
    return all(type(value) is int and 0 <= value < below for value in values)


class RewardServer(LocalServer):
    """Answers requests with a [`RewardService`]; finishes those that have begun before it ends."""

    def __init__(self, service: RewardService, options: ServeOptions) -> None:
        self.service, self.limits = service, options
        super().__init__(options.host, options.port)
        self._server.daemon_threads = False  # closing waits for the requests that have begun

    def health(self) -> dict[str, Any]:
        """What is served."""
        total, scorer = self.service.total, getattr(self.service.scorer, "signature", None)
        served = {"rewards": total.names, "weights": total.weights, "scorer": scorer}
        return {"version": VERSION, "status": "ok", **served, "images": len(self.service.image_ids)}

    def schema(self) -> dict[str, Any]:
        """JSON schemas of a request and its answer, and the limits."""
        kinds: dict[type, Any] = {str: "string", dict: "object", int: "integer", list: "array"}
        listed = {"type": "array", "minItems": 1, "maxItems": self.limits.max_captions}
        fields: dict[str, Any] = {name: {**listed, "items": {"type": kinds[kind]}} for name, kind in _ITEMS.items()}
        fields["images"]["description"] = 'all {"id": TEXT}, or all {"data": a PNG or JPEG file in base64}'
        fields["image_of"]["description"] = "position of each caption's image"
        fields["completion_ids"]["items"]["items"] = {"type": "integer"}
        fields["rewards"]["items"]["enum"] = self.service.total.names
        numbers, version = {"type": "array", "items": {"type": "number"}}, {"version": {"const": VERSION}}
        answer = {"rewards": numbers, "parts": {"type": "object", "additionalProperties": numbers}}
        return {
            "version": VERSION,
            "request": {"type": "object", "required": ["version", *_REQUIRED], "properties": version | fields},
            "answer": {"type": "object", "properties": version | answer},
            "limits": {name: getattr(self.limits, name) for name in ("max_body", "max_captions", "max_pixels")},
        }

    def answer(self, body: Any) -> dict[str, Any]:
        """The answer to a request."""
        version = body.get("version") if isinstance(body, dict) else None
        if type(version) is not int or version != VERSION:
            raise RequestError(400, f'version is {version!r:.40}. Send an object with "version": {VERSION}.')
        if unknown := sorted(set(body).difference(_ITEMS, ["version"])):
            raise RequestError(400, f"There is no field {unknown[0]!r:.40}. Send {', '.join(_ITEMS)}.")
        for name, kind in _ITEMS.items():
            value = body.setdefault(name, None)
            if value is None and name not in _REQUIRED:
                continue
            if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
                raise RequestError(400, f"{name} is {value!r:.40}. Send a list as GET /schema describes it.")
            if len(value) > self.limits.max_captions:
                raise RequestError(
                    413, f"{name} has {len(value)} items. Send {self.limits.max_captions} (--max_captions)."
                )
        captions, images, image_of, ids, only = (body[name] for name in _ITEMS)
        if len(image_of) != len(captions) or not _are_whole(image_of, len(images)):
            raise RequestError(400, f"image_of must have a position in images for each of {len(captions)} captions.")
        if ids is not None and (len(ids) != len(captions) or not all(_are_whole(row, 2**31) for row in ids)):
            raise RequestError(400, f"completion_ids must have whole numbers for each of {len(captions)} captions.")
        return {"version": VERSION, **self.service.score(captions, self._images(images), image_of, ids, only)}

    def _images(self, values: Sequence[dict[str, Any]]) -> list[Any]:
        """Ids, or images whose pixels are limited together."""
        kinds = {tuple(value) for value in values}
        if kinds not in ({("id",)}, {("data",)}) or not all(
            isinstance(v, str) for one in values for v in one.values()
        ):
            raise RequestError(400, 'images must all be {"id": "..."}, or all {"data": "base64"}.')
        if kinds == {("id",)}:
            return [value["id"] for value in values]
        images, left = [], self.limits.max_pixels
        for number, value in enumerate(values):
            try:
                images.append(open_image(base64.b64decode(value["data"], validate=True), max_pixels=left))
            except binascii.Error as error:
                raise RequestError(400, f"images[{number}] is not base64 ({error}).") from None
            except ImageError as error:
                is_large = error.reason == "image_too_large"
                most = f" All images: {self.limits.max_pixels} pixels (--max_pixels)." if is_large else ""
                raise RequestError(413 if is_large else 422, f"images[{number}]: {error}{most}") from None
            left -= images[-1].width * images[-1].height
        return images

    def respond(self, request: BaseHTTPRequestHandler) -> tuple[bytes, str]:
        match request.command, request.path:
            case "POST", "/rewards":
                if request.headers.get_content_type() != "application/json":
                    raise RequestError(415, "The body must be JSON. Send Content-Type: application/json.")
                found = self.answer(self.json_body(request, self.limits.max_body, " (--max_body)"))
            case "GET", "/health":
                found = self.health()
            case "GET", "/schema":
                found = self.schema()
            case _:
                raise RequestError(404, "There are GET /health, GET /schema and POST /rewards.")
        return _json(found)

    def refusal(self, message: str) -> tuple[bytes, str]:
        return _json({"version": VERSION, "error": message})


def _json(value: Any) -> tuple[bytes, str]:
    return json.dumps(value, allow_nan=False).encode("ascii"), "application/json"


def serve(options: ServeOptions) -> None:
    """Serve rewards until SIGTERM or Ctrl-C."""
    server = RewardServer(RewardService(options, options.reward), options)
    before = {number: signal.signal(number, server.stop) for number in (signal.SIGTERM, signal.SIGINT)}
    if options.host not in LOCAL_NAMES:
        print(
            f"captionrl serve-rewards: --host {options.host} lets every machine that reaches this one use the rewards, without a "
            "password. Use 127.0.0.1 for this machine alone.",
            file=sys.stderr,
        )
    found = {"address": server.address, **server.health()}
    text = f"{', '.join(found['rewards'])} at {server.address}; {found['images']:,} images by id; ends with SIGTERM or Ctrl-C"
    print(json.dumps(found) if options.json else text, flush=True)
    try:
        server.serve()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
