"""The backends that `--text` and `--vision` name."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_captionrl.scenes.scene_claims import SceneClaims, blend_claims, combine_claims, read_claims, write_claims
from hf_captionrl.scenes.world import EMOJI_KINDS, FACT_VALUES, SHAPE_KINDS, Facts
from hf_captionrl.utils.prompts import Backend, Failure, Prompt

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.apps.boosting.options import BoostOptions


# --- Backends of the embedded world: rules that blend and combine, and a describer with a known error rate -----------
# The rules read only the prompt, like a language model. The describer knows the facts of a scene and gets some of them wrong.

_REFERENCE = re.compile(r"^Reference caption \d+: (.*)$", re.M)
_PAIR = re.compile(r"^Correct caption: (.*)\nNew noisy caption: (.*)$")


class SceneWriter:
    """Blends references and combines captions of the embedded world by rule, using only the text of the prompt."""

    model = "scenes:writer"
    revision = "1"
    is_multimodal = False

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str | Failure]]:
        """Answer prompts of the stages `blend` and `holistic`."""
        for position, prompt in enumerate(prompts):
            pair = _PAIR.match(prompt.user)
            texts = list(pair.groups()) if pair else _REFERENCE.findall(prompt.user)
            claims = [claim for claim in map(read_claims, texts) if claim is not None]
            if not claims or (pair and len(claims) < 2):
                detail = f"not a caption of the embedded world: {prompt.user[:80]!r}; use another text backend"
                yield position, Failure("backend_rejected", detail)
            else:
                yield position, write_claims(combine_claims(*claims) if pair else blend_claims(claims))


class SceneDescriber:
    """Describes scenes like a vision model: in detail, and partly wrong.

    Each fact is mentioned with probability `mention_rate` (the kind always), and each mentioned fact gets a wrong value with
    probability `error_rate`, independently. A value without a word, such as `upright`, can only be mentioned by error. The
    draws depend on seed, image and attempt, not on the order of questions.
    """

    model = "scenes:describer"
    is_multimodal = True

    def __init__(
        self,
        facts: Mapping[str, Facts | Mapping[str, Any]],
        *,
        error_rate: float = 0.15,
        mention_rate: float = 0.85,
        seed: int = 0,
    ) -> None:
        self._facts = facts
        self._error_rate, self._mention_rate, self._seed = error_rate, mention_rate, seed
        self.revision = f"error_rate={error_rate:g} mention_rate={mention_rate:g} seed={seed}"

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str | Failure]]:
        """Describe the scenes of prompts."""
        for position, prompt in enumerate(prompts):
            facts = self._facts.get(prompt.image_id)
            if facts is None:
                yield position, Failure("backend_rejected", f"image {prompt.image_id!r} has no facts of a scene")
                continue
            if not isinstance(facts, Facts):
                facts = Facts(**{name: facts[name] for name in Facts.__dataclass_fields__})
            key = f"{self._seed}/{prompt.image_id}/{prompt.attempt}".encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(key, digest_size=8).digest()
            yield position, write_claims(self._describe(np.random.default_rng(int.from_bytes(digest, "big")), facts))

    def _describe(self, rng: np.random.Generator, facts: Facts) -> SceneClaims:
        def see(truth: Any, values: tuple[Any, ...]) -> Any:
            """The value, or a wrong one."""
            others = [value for value in values if value != truth]
            wrong = others[int(rng.integers(len(others)))]  # always drawn, so that the rates do not change later draws
            return wrong if rng.random() < self._error_rate else truth

        kinds = EMOJI_KINDS if facts.kind in EMOJI_KINDS else SHAPE_KINDS
        kind = see(facts.kind, tuple(k for k in kinds if k != facts.second))
        seen = {name: see(getattr(facts, name), values) for name, values in FACT_VALUES.items()}
        # A wrong second object is another object, or an invented one if there is none.
        seen["second"] = see(facts.second, tuple(k for k in kinds if k not in (kind, facts.kind)))
        mentioned = dict(zip(seen, rng.random(len(seen)) < self._mention_rate, strict=True))
        # A value without a word cannot be said, and what belongs to the second object needs it.
        if not (seen["second"] and mentioned["second"]):
            mentioned["relation"] = mentioned["second_colour"] = False
        claims = {name: value for name, value in seen.items() if mentioned[name] and value not in ("", "upright")}
        if "count" not in claims:  # a noun is always singular or plural
            claims |= {"several": True} if seen["count"] > 1 else {"count": 1}
        return SceneClaims(kind=kind, **claims)


# --- The backends that `--text` and `--vision` name ------------------------------------------------------------------


def choose_backend(arguments: BoostOptions, role: str, dataset: datasets.Dataset) -> Callable[[], Backend]:
    """What loads the backend that `--text` or `--vision` names, which is checked before any model is loaded."""
    from hf_captionrl.captioners.language_model_clients import (
        CaptionerBackend,
        HTTPBackend,
        TransformersTextBackend,
        TransformersVisionBackend,
    )

    spec = getattr(arguments, role) or ("scenes" if arguments.dataset == "scenes" else "")
    kind, _, name = spec.partition(":")
    if spec == "scenes" and "facts" in dataset.column_names:
        if role == "text":
            return SceneWriter
        facts = dict(zip(dataset["image_id"][:], dataset["facts"][:], strict=True))
        return functools.partial(SceneDescriber, facts, error_rate=arguments.error_rate, seed=arguments.seed)
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens}
    url = getattr(arguments, f"{role}_url") or arguments.text_url
    if kind == "openai" and name and url:
        options |= {"seed": arguments.seed, "is_multimodal": role == "vision", **arguments.requests}
        return functools.partial(HTTPBackend, url, name, **options)
    local: dict[str, Any] = {"transformers": TransformersTextBackend}
    if role == "vision":
        local = {"transformers": TransformersVisionBackend, "captioner": CaptionerBackend}
    if kind in local and name:
        return functools.partial(local[kind], name, batch_size=arguments.batch_size, **options)
    raise ValueError(
        f"--{role} is {spec!r}. Use 'scenes' (for embedded scenes), or one of {', '.join(('openai', *local))} with a name "
        f"after a colon; openai also needs --{role}_url http://127.0.0.1:8000/v1."
    )
