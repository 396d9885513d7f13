"""The backends that `--text` and `--vision` name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.boosting.options import BoostOptions
    from hf_captionrl.language_models import Backend

__all__ = ["check_backend", "is_local", "load_backend"]


def _spec(arguments: BoostOptions, role: str) -> str:
    return getattr(arguments, role) or ("scenes" if arguments.dataset == "scenes" else "")


def is_local(arguments: BoostOptions, role: str) -> bool:
    """Whether `--text` or `--vision` names a model of the process, and not a server or the facts of scenes."""
    return _spec(arguments, role).partition(":")[0] not in ("scenes", "openai")


def check_backend(arguments: BoostOptions, role: str, dataset: datasets.Dataset) -> tuple[str, str]:
    """Kind and name of the backend that `--text` or `--vision` names; checked before a model is loaded."""
    spec = _spec(arguments, role)
    kind, _, name = spec.partition(":")
    kinds = ("transformers", "vllm", "openai", *(("captioner",) if role == "vision" else ()))
    if kind == "scenes" and not name:
        if "facts" not in dataset.column_names:
            raise ValueError(f"--{role} scenes needs the column 'facts', which embedded scenes have. Name a model.")
    elif kind not in kinds or not name:
        raise ValueError(
            f"--{role} is {spec!r}. Use 'scenes', or one of {', '.join(kinds)} with a name after a colon."
        )
    elif kind == "openai" and not (getattr(arguments, f"{role}_url") or arguments.text_url):
        raise ValueError(
            f"--{role} {spec!r} needs an address. Pass one, such as --{role}_url http://127.0.0.1:8000/v1."
        )
    return kind, name


def load_backend(arguments: BoostOptions, role: str, dataset: datasets.Dataset) -> Backend:
    """The backend that `--text` or `--vision` names."""
    from hf_captionrl import language_models
    from hf_captionrl.boosting.scene_backends import SceneDescriber, SceneWriter

    kind, name = check_backend(arguments, role, dataset)
    vision = role == "vision"
    if kind == "scenes":
        if not vision:
            return SceneWriter()
        facts = dict(zip(dataset["image_id"][:], dataset["facts"][:], strict=True))
        rates = {"error_rate": arguments.error_rate, "mention_rate": arguments.mention_rate}
        return SceneDescriber(facts, **rates, seed=arguments.seed)
    revision = getattr(arguments, f"{role}_revision")
    if kind == "openai":
        url = str(getattr(arguments, f"{role}_url") or arguments.text_url)
        return language_models.HTTPBackend(
            url,
            name,
            revision=revision or "",
            api_key_env=arguments.api_key_env,
            is_multimodal=vision,
            max_new_tokens=arguments.max_new_tokens,
            seed=arguments.seed,
            concurrency=arguments.concurrency,
            timeout_s=arguments.timeout_s,
            tries=arguments.tries,
            backoff_s=arguments.backoff_s,
        )
    if kind == "vllm":
        return language_models.VLLMBackend(
            name, revision=revision, is_multimodal=vision, max_new_tokens=arguments.max_new_tokens, seed=arguments.seed
        )
    make: Any = language_models.TransformersVisionBackend if vision else language_models.TransformersTextBackend
    if kind == "captioner":
        make = language_models.CaptionerBackend
    return make(
        name,
        revision=revision,
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
    )
