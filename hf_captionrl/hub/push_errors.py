"""Errors of the Hub: whether to retry, and their explanation for users."""

from __future__ import annotations

import json

from hf_captionrl.console import error_chain

__all__ = ["PushError", "explain", "is_transient"]

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# The client's HTTP library is httpx in one major version and httpx2 in the next.
_TRANSIENT_KINDS = frozenset({"TransportError", "ConnectionError", "TimeoutError", "JSONDecodeError"})


class PushError(RuntimeError):
    """A push that the Hub refused or that failed; the folder is unchanged."""


def _status(error: BaseException) -> int | None:
    """HTTP status of an error, from anywhere in its chain."""
    for link in error_chain(error):
        status = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed."""
    if any(type(link).__name__ == "OfflineModeIsEnabled" for link in error_chain(error)):
        return False
    status = _status(error)
    if status is not None and status != 200:
        return status in _TRANSIENT_STATUS
    return any(
        isinstance(link, json.JSONDecodeError) or {kind.__name__ for kind in type(link).__mro__} & _TRANSIENT_KINDS
        for link in error_chain(error)
    )


def explain(error: BaseException, repo_id: str, *, has_token: bool) -> str:
    """Explanation of an error, with the remedy."""
    status = _status(error)
    if any(type(link).__name__ == "OfflineModeIsEnabled" for link in error_chain(error)):
        return "HF_HUB_OFFLINE is set, so nothing is sent. Unset it."
    if status == 401:
        if not has_token:
            return "The Hub needs a token, but there is none. Log in with `hf auth login`, or set HF_TOKEN."
        return "The Hub does not accept the token (401). Create a new one and log in with `hf auth login`."
    if status == 403:
        return f"The token may not write to {repo_id!r} (403). Use a token with write permission for it."
    if status == 404:
        return f"{repo_id!r} does not exist on the Hub, or this token has no access to it (404). Check name and token."
    if status is not None and status != 200:
        return f"The Hub answered {status}."
    last = list(error_chain(error))[-1]
    return f"{type(last).__name__}: {' '.join(str(last).split()) or 'the connection was lost'}"
