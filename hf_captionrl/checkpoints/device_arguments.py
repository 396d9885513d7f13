"""Arguments of `from_pretrained` that need a GPU or a library: quantization and implementations of attention."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

__all__ = ["check_attention", "with_quantization"]

_BITS = ("load_in_4bit", "load_in_8bit")


def with_quantization(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with `load_in_4bit` or `load_in_8bit` as a `quantization_config`; raises where bitsandbytes cannot run."""
    asked = [name for name in _BITS if kwargs.get(name)]
    kwargs = {name: value for name, value in kwargs.items() if name not in _BITS}
    config = kwargs.get("quantization_config")
    if len(asked) > 1 or (asked and config is not None):
        names = " and ".join([*asked, *(["quantization_config"] if config is not None else [])])
        raise ValueError(f"{names} are given together. Use one of them.")
    settings = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    in_config = [name for name in _BITS if settings.get(name) or settings.get(f"_{name}")]
    for name in (*asked, *in_config):
        _check_bitsandbytes(name)
    if asked:
        from transformers import BitsAndBytesConfig

        dtype = kwargs.get("dtype")
        compute = {} if dtype in (None, "auto") else {"bnb_4bit_compute_dtype": dtype}
        kwargs["quantization_config"] = BitsAndBytesConfig(
            **{asked[0]: True}, **(compute if asked == ["load_in_4bit"] else {})
        )
    return kwargs


def _check_bitsandbytes(name: str) -> None:
    import torch

    missing = [
        *(["bitsandbytes, which is not installed"] if find_spec("bitsandbytes") is None else []),
        *(["a GPU, which torch does not see"] if not torch.cuda.is_available() else []),
    ]
    if missing:
        raise ValueError(
            f"{name} is set, but needs {' and '.join(missing)}. Use dtype='bfloat16' for a frozen base in 16 bits, or run on a "
            "GPU with bitsandbytes (pip install bitsandbytes)."
        )


def check_attention(value: Any) -> None:
    """Refuse an implementation of attention that transformers does not have, or that needs a GPU where there is none.

    `value` is a name, or names by part of the model. Names with a slash are kernels on the Hub and are not checked.
    """
    if value is None:
        return
    if isinstance(value, dict):
        for name in value.values():
            check_attention(name)
        return
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ["eager", *sorted(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name)]
    if not isinstance(value, str) or (value not in known and "|" not in value and "/" not in value):
        raise ValueError(f"attn_implementation is {value!r}. Use one of {', '.join(map(repr, known))}.")
    if value.startswith("flash_attention") and not torch.cuda.is_available():
        raise ValueError(
            f"attn_implementation is {value!r}, which needs a GPU, but torch does not see one. Use 'sdpa' or 'eager'."
        )
