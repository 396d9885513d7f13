"""Uploads a folder to the Hub, after checks and with retries. A failed push can be repeated."""

from __future__ import annotations

import contextlib
import glob
import html
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import yaml
from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_captionrl.utils.console import error_chain
from hf_captionrl.utils.io import atomic_write_text, installed_versions, is_secret, plain_config, write_json
from hf_captionrl.utils.model_files import adapter_base, check_checkpoint, load_pretrained, read_object

# --- Rejects content that must not be published: placeholders, secrets, HTML, local paths, and links out of the folder ---

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""`owner/name`."""

_PLACEHOLDER = re.compile(
    # TODO only in capitals: "todo" is a Spanish word.
    r"\b(TODO|TBD|FIXME|XXX|ORGANISATION)\b|(?i:more information needed|lorem ipsum|<your|\byour[-_ ](name|org|model|username)\b)"
    r"|\{\{|\{%|^\W*$"
)
_MACHINE_PATH = re.compile(r"^(/|~|[A-Za-z]:[\\/]|\\\\|file:)|(^|/)\.\.(/|$)")
# A local path within a sentence: two parts or more after a space, a quote or a bracket, or a drive.
_DRIVE = r"(?<![\w/])[A-Za-z]:(?:\\{1,2}|/(?!/))\w|(?<![\w\\])\\{2,4}[\w.-]+\\{1,2}\w|\bfile:/"
_PATH_IN_PROSE = re.compile(rf"(?<![\w/:.~)\]}}$-])/(?:[\w@+~.-]|\\_)+/[\w@+~.-]|(?<![\w~])~\w*/[\w.]|{_DRIVE}")
_HOME = re.compile(rf"(?<![\w/:.])/(?:home|Users|root)/[\w.]|{_DRIVE}")
# Prefixes of keys: Hugging Face, OpenAI-like endpoints, GitHub, AWS, and private keys.
# Every part is bounded or starts only once per word, so that the time is linear.
_TOKEN = re.compile(
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b|(?<![A-Za-z0-9])sk-(?=[\w-]{0,99}?\w{16})(?=[\w-]{0,99}\d)[\w-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}\b|\bgithub_pat_\w{20,}|\bA(?:KIA|SIA|ROA|IDA)[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|.*)",
    re.DOTALL,
)
# On one line, without spaces next to the dollars: "from $5 to $6" is not a formula.
_FORMULA = re.compile(r"\$\$.*?\$\$|\$(?!\s)[^$\n]+(?<!\s)\$(?!\d)", re.DOTALL)
# Also what CommonMark shows as text, because other renderers complete it: an unclosed tag.
_HTML = re.compile(r"<(?:[A-Za-z]|/|!--|\?)[^>\n]*>?")


def check_name(value: str, name: str = "repo_id") -> None:
    """Raise if the Hub does not accept a name of a repository."""
    try:
        validate_repo_id(value)
    except HFValidationError as error:
        raise ValueError(
            f"{name} is {value!r}, not a name that the Hub accepts ({error}). Use owner/name, with letters, digits, '-', "
            "'_' and '.'."
        ) from None


def check_secret(name: str, text: str, token: str | None = None) -> None:
    """Raise if a text contains an access token or a private key."""
    # In JSON, Python and YAML, a line break before a key is a backslash and a letter.
    if _TOKEN.search(re.sub(r"\\[nrtbf]", " ", text)) or (token and token in text):
        raise ValueError(
            f"{name} contains an access token or a private key. Remove it, and revoke it if anyone has seen it."
        )


def redact(text: str, token: str | None = None) -> str:
    """The text without tokens."""
    return _TOKEN.sub("[removed]", text.replace(token, "[removed]") if token else text)


def check_text(name: str, value: str) -> None:
    """Raise if a text contains a placeholder, a local path or a secret."""
    check_secret(name, value)
    if _PLACEHOLDER.search(value):
        raise ValueError(f"{name} is {value!r}, a placeholder. Replace it, because cards are published.")
    if _MACHINE_PATH.search(value) or _PATH_IN_PROSE.search(value):
        raise ValueError(f"{name} is {value!r}, which contains a local path. Use a name instead.")


def check_card(text: str) -> Mapping[str, Any]:
    """Check that a generated or edited card may be published.

    Args:
        text: Content of a `README.md`: Markdown that begins with metadata.

    Returns:
        `Mapping`: The metadata.

    Raises:
        ValueError: If it lacks metadata or a licence, or contains a placeholder, a token, HTML, a local path, or a link
            to a place outside its folder.
    """
    check_secret("The card", text)
    parts = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)
    if len(parts) != 3 or parts[0].strip():
        raise ValueError(
            "The card does not begin with metadata between two lines of '---'. Write it with `captionrl card`."
        )
    try:
        metadata = yaml.safe_load(parts[1])
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(
            f"The card's metadata are not valid YAML ({str(error).splitlines()[0]}). Correct them."
        ) from None
    if not isinstance(metadata, dict) or not metadata.get("license"):
        raise ValueError(
            "The card has no licence. Add `license:` to its metadata, or write the card with `captionrl card`."
        )
    # Check what a browser would execute or follow: not code, which is shown verbatim, and not formulas.
    card = _parsed(parts[2])
    if not _FORMULA.sub("", card.text).strip():
        raise ValueError("The card is empty. Write it with `captionrl card`.")
    if found := _PLACEHOLDER.search("\n".join([_FORMULA.sub("", card.text), *card.targets])):
        raise ValueError(f"The card contains {found.group(0)!r}, a placeholder. Replace it, or remove the sentence.")
    # Complete tags are rejected in formulas too, because not all renderers support formulas.
    unescaped = _HTML.search(_FORMULA.sub("", card.unescaped))
    if html_parts := card.html or ([unescaped.group(0)] if unescaped else []):
        raise ValueError(f"The card contains HTML, {html_parts[0][:60]!r}. Use Markdown, or escape the '<'.")
    for target in card.targets:
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", target)
        # A link without a scheme is relative to the folder.
        if _MACHINE_PATH.search(target) or (scheme and scheme[1].lower() not in ("http", "https", "mailto")):
            raise ValueError(
                f"The card links to {target[:60]!r}, which is outside its folder. Put the file into the folder, or use a "
                "URL that begins with https://."
            )
    if found := _PATH_IN_PROSE.search(_FORMULA.sub("", card.text)) or _HOME.search(text):
        part = found.string[found.start() : found.start() + 60].split()[0]
        raise ValueError(f"The card contains {part!r}, a local path. Use the name of the file, or a relative path.")
    return metadata


class _Parsed(NamedTuple):
    """Markdown as a browser reads it, without code."""

    text: str
    unescaped: str  # the text without the characters that were escaped
    html: list[str]
    targets: list[str]  # of links and images: entities, escapes and spaces are resolved


def _parsed(markdown: str) -> _Parsed:
    from markdown_it import MarkdownIt

    # Beyond the maximum of nesting, the parser would leave text out. `text_join` would hide what was escaped.
    parser: Any = MarkdownIt("commonmark", {"maxNesting": 10**6}).enable("table").disable("text_join")
    # By default, dangerous links are rendered as text, but other renderers do not do this.
    parser.validateLink = lambda url: True
    parser.normalizeLink = lambda url: url
    references: dict[str, Any] = {}
    try:
        blocks = parser.parse(markdown, references)
    except RecursionError:
        raise ValueError("The card is nested too deeply. Use fewer levels of quotes, lists and brackets.") from None
    found = _Parsed("", "", [token.content for token in blocks if token.type == "html_block"], [])
    text, unescaped, targets = [], [], [reference["href"] for reference in references.get("references", {}).values()]
    for block in blocks:
        rest = list(reversed(block.children or []))
        while rest:
            token = rest.pop()
            rest += reversed(token.children or [])  # of an image: its description
            targets.append(token.attrs.get("href") or token.attrs.get("src") or "")
            if token.type == "html_inline":
                found.html.append(token.content)
            content = {"text": token.content, "text_special": token.content, "code_inline": " "}.get(token.type, "")
            text.append(content or "\n" * token.type.endswith("break"))
            unescaped.append(text[-1] if token.type != "text_special" else "")
        text.append("\n\n")
        unescaped.append("\n\n")
    for target in filter(None, targets):
        # Browsers ignore spaces and control characters within a scheme.
        resolved = html.unescape(unquote(str(target)))
        found.targets.append(re.sub(r"[\x00-\x20\x7f-\xa0\u200b-\u200f\u2028-\u202e\ufeff]", "", resolved))
    return found._replace(text="".join(text), unescaped="".join(unescaped))


# --- The training manifest: versions, command, data and configuration of a published model, without local paths ------

MANIFEST_FILE = "training_manifest.json"
"""File name in a published repository; it identifies repositories that this package has pushed."""

_ABSOLUTE = re.compile(r"(?:/|~|[A-Za-z]:[\\/]|\\\\)[^\s]")


def public_values(value: Any) -> Any:
    """A configuration (a dataclass or mappings) for publication: without secrets, names instead of local paths."""
    value = plain_config(value)
    if isinstance(value, Mapping):
        return {key: public_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public_values(item) for item in value]
    return _public_text(value) if isinstance(value, str) else value


def _public_text(text: str) -> str:
    """Text without tokens; a local path is reduced to its last part."""
    if _ABSOLUTE.match(text) or ".." in re.split(r"[\\/]", text):
        text = re.split(r"[\\/]", text.rstrip("\\/"))[-1]
    return redact(text)


def public_command(argv: Sequence[str]) -> list[str]:
    """The arguments of a program for publication: `***` instead of secrets, names instead of local paths."""
    command: list[str] = []
    option = ""  # the option whose value is the next argument
    for part in argv:
        name, equals, value = part.partition("=")
        if option and is_secret(option, part):
            command.append("***")
        elif equals and name.startswith("-"):
            command.append(f"{name}={'***' if is_secret(name, value) else _public_text(value)}")
        else:
            command.append(_public_text(part))
        option = part if part.startswith("-") and not equals else ""
    return command


def public_versions(versions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions, by default the installed ones, without the revision of a private checkout."""
    versions = installed_versions() if versions is None else versions
    return {name: version for name, version in versions.items() if name != "git_revision"}


def write_manifest(
    folder: str | os.PathLike[str],
    *,
    command: Sequence[str],
    seeds: Mapping[str, int | None],
    data: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write `training_manifest.json`: versions, command, data (name, revision, fingerprints), seeds and configuration."""
    manifest = {
        "made_with": "hf_captionrl",
        "versions": public_versions(),
        "command": public_command(command),
        "data": public_values(data),
        "seeds": dict(seeds),
        "config": public_values(config or {}),
    }
    return write_json(Path(folder) / MANIFEST_FILE, manifest)


# --- Selects the files of a folder that are published ----------------------------------------------------------------

_PUBLISHED = {
    "model": (
        *("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.html", "*.png"),
        *("adapter/*.safetensors", "adapter/*.json", "adapter/*.md", ".eval_results/*.yaml"),
    ),
    "space": ("*.py", "*.md", "*.txt"),
    "dataset": ("*.parquet", "*.json", "*.jsonl", "*.csv", "*.md", "*.safetensors", "data/*.parquet"),
}
"""Patterns of the files that are published. All other files are omitted."""

_NEVER = (
    "checkpoint-*",
    "push_state.json",
    "card.json",
    "trainer_state.json",
    "training_images.json",
    "*.run.json",
    "quarantine.jsonl",
    "journal-*",
)
"""Names of files that are not published, in any folder: checkpoints, and the state of a push, a run or a Trainer."""

PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files of an image processor."""
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")


class Contents(NamedTuple):
    """Files of a folder that are uploaded, and those that are not; relative to it, with `/`."""

    published: Sequence[str]
    left_out: Sequence[str]


def folder_contents(
    folder: str | os.PathLike[str],
    repo_type: str = "model",
    *,
    token: str | None = None,
    gallery: bool | None = None,
) -> Contents:
    """Select and check the files of a folder before anything is uploaded.

    `gallery` is whether to publish HTML pages of a model, which contain the test images; by default only if these are public
    according to the manifest.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}. Use the folder of a finished model.")
    published: list[str] = []
    left_out: list[str] = []
    shows_images = _has_public_images(folder) if gallery is None else gallery
    for path in sorted(folder.rglob("*")):
        if not (path.is_file() or path.is_symlink()):
            continue
        name = path.relative_to(folder).as_posix()
        # fnmatch lets * match a slash, so compare only patterns with the same number of slashes.
        kinds = [kind for kind in _PUBLISHED[repo_type] if kind.count("/") == name.count("/")]
        allowed = any(fnmatch(name, kind) for kind in kinds) and not any(fnmatch(path.name, no) for no in _NEVER)
        if repo_type == "model" and path.suffix == ".html":
            allowed = allowed and shows_images
        (published if allowed else left_out).append(name)
    for name in published:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{name} in {folder} is a link to a place outside the folder. Replace it with the file, or remove it."
            )
        check_secret("The name of a file", name, token)
        if path.suffix == ".parquet":
            _check_image_paths(name, path)
        elif path.suffix not in (".safetensors", ".png", ".model"):
            check_secret(name, path.read_text(encoding="utf-8", errors="replace"), token)
    _check_complete(folder, repo_type, published)
    return Contents(published, left_out)


def _has_public_images(folder: Path) -> bool:
    """Whether the images of the run are public according to the manifest."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        return manifest["data"]["public_images"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_image_paths(name: str, path: Path) -> None:
    """Raise if a table refers to images by local paths."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = [file.schema.column(i).path for i in range(len(file.schema.names))]
        for batch in file.iter_batches(columns=[column for column in columns if column.endswith(".path")]):
            values = [value for column in batch.columns for value in column.to_pylist()]
            if found := next((v["path"] for v in values if v and v.get("path") and os.path.isabs(v["path"])), None):
                raise ValueError(
                    f"{name} refers to images by local paths, such as {os.path.basename(found)!r}, which others cannot "
                    "access. Embed the images, or omit them (`captionrl boost ... --embed_images`, or --no_images)."
                )


def _check_complete(folder: Path, repo_type: str, published: Sequence[str]) -> None:
    if "README.md" not in published:
        raise FileNotFoundError(f"{folder} has no README.md. Write the card first: captionrl card {folder}")
    metadata = check_card((folder / "README.md").read_text(encoding="utf-8"))
    if repo_type != "model":
        return
    if not any(fnmatch(name, "*.safetensors") for name in published):
        raise FileNotFoundError(
            f"{folder} has no *.safetensors. Other formats are not uploaded, because pickles can execute code when "
            "they are opened. Save with save_pretrained."
        )
    needed: dict[str, tuple[str, ...]] = {"tokenizer": _TOKENIZERS}
    if metadata.get("pipeline_tag") != "text-generation":
        needed = {"image processor": PROCESSORS, **needed}
    for what, parts in needed.items():
        if not any(part in published for part in parts):
            raise FileNotFoundError(
                f"{folder} has no {what} ({', '.join(parts)}), so the model cannot be used. "
                "Save it with captioner.save_pretrained."
            )
    if MANIFEST_FILE not in published:
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST_FILE}, which describes the training. Write it with "
            f"hf_captionrl.hub.write_manifest, or write card and manifest: captionrl card {folder}"
        )
    rows = read_object(folder / "results.json").get("rows", []) if "results.json" in published else []
    if not any(row.get(key) is not None for row in rows for key in ("rd100_recall_at_1", "pool_recall_at_1")):
        return
    results = [result for model in metadata.get("model-index") or [] for result in model.get("results", [])]
    metrics = [metric for result in results for metric in result.get("metrics", [])]
    if not any("recall_at" in str(m.get("type")) and isinstance(m.get("value"), int | float) for m in metrics):
        raise ValueError(
            f"The card in {folder} has no retrieval number in its model-index. Write it from results.json with `captionrl "
            "card`."
        )


def local_base_model(folder: str | os.PathLike[str]) -> str | None:
    """The base model of an adapter if it is a local folder, which others cannot load; else None."""
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        return None
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
    return base if os.path.isabs(base) or base.startswith((".", "~")) or os.path.isdir(base) else None


# --- Errors of the Hub: whether to retry, and their explanation for users --------------------------------------------

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# The client's HTTP library is httpx in one major version and httpx2 in the next.
_TRANSIENT_KINDS = frozenset({"TransportError", "ConnectionError", "TimeoutError", "JSONDecodeError"})


class PushError(RuntimeError):
    """A push that the Hub refused or that failed; the folder is unchanged."""


def _status(error: BaseException) -> int | None:
    """HTTP status of a refused request, from anywhere in the chain of an error."""
    statuses = (getattr(getattr(link, "response", None), "status_code", None) for link in error_chain(error))
    found = next((status for status in statuses if isinstance(status, int)), None)
    return None if found == 200 else found


def _is_offline(error: BaseException) -> bool:
    return any(type(link).__name__ == "OfflineModeIsEnabled" for link in error_chain(error))


def _is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed."""
    if (status := _status(error)) is not None:
        return status in _TRANSIENT_STATUS
    kinds = {kind.__name__ for link in error_chain(error) for kind in type(link).__mro__}
    return bool(kinds & _TRANSIENT_KINDS) and not _is_offline(error)


def _explained(error: BaseException, repo_id: str, *, has_token: bool) -> tuple[type[Exception], str]:
    """The class of the error for users, and its explanation with the remedy."""
    status = _status(error)
    refused = {
        401: "The Hub does not accept the token (401). Create a new one and log in with `hf auth login`.",
        403: f"The token may not write to {repo_id!r} (403). Use a token with write permission for it.",
    }
    if not has_token:
        refused[401] = "The Hub needs a token, but there is none. Log in with `hf auth login`, or set HF_TOKEN."
    if _is_offline(error):
        return PushError, "HF_HUB_OFFLINE is set, so nothing is sent. Unset it."
    if status in refused:
        return PermissionError, refused[status]
    if status == 404:
        what = f"{repo_id!r} does not exist on the Hub, or this token has no access to it (404)."
        return PushError, f"{what} Check name and token."
    if status is not None:
        return PushError, f"The Hub answered {status}."
    last = list(error_chain(error))[-1]
    return PushError, f"{type(last).__name__}: {' '.join(str(last).split()) or 'the connection was lost'}"


# --- Merges an adapter into its base model, for users who do not have the base model ---------------------------------

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def write_merged(folder: str | Path, target: str | Path, names: Sequence[str]) -> None:
    """Write a folder with the merged model, and the adapter in `adapter/`."""
    import transformers
    from peft import PeftModel

    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.captioners.captioner import SETTINGS_FILE

    folder, target = Path(folder), Path(target)
    for name in names:
        place = target / "adapter" / name if name in _ADAPTER else target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, place)
    if (folder / SETTINGS_FILE).is_file():
        captioner = load_captioner(str(folder))
        captioner.model = captioner.model.merge_and_unload()
        captioner.save_pretrained(target)
    else:  # of TRL's trainers
        loader = getattr(transformers, check_checkpoint(str(folder))["config"].architectures[0])
        base, _ = load_pretrained(loader, adapter_base(str(folder), None))
        PeftModel.from_pretrained(base, str(folder)).merge_and_unload().save_pretrained(target)
    # The base model was a local folder: keep only its name.
    path = target / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = Path(config.get("base_model_name_or_path") or "").name
    write_json(path, config)


# --- Uploads a folder to the Hub, after checks and with retries. A failed push can be repeated -----------------------

STATE_FILE = "push_state.json"
"""State and destination of the last push; saved in the folder of the model, never uploaded."""

_LONGEST_WAIT_S = 60.0
_STALE = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "adapter/*")
"""Files of an earlier push that are deleted, because they would be loaded together with the new weights."""


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    repo_type: str = "model",
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Add captioner",
    merged: bool | None = None,
    overwrite: bool = False,
    marker: str | None = None,
    gallery: bool | None = None,
    attempts: int = 5,
    first_wait_s: float = 1.0,
    sleep: Callable[[float], object] = time.sleep,
    again: str | None = None,
) -> str:
    """Upload a finished folder with its card, in one commit. The model files are not modified.

    A second commit writes the id of the first one as `revision` into the code examples of the card. In the folder, only the
    card and `push_state.json` are written.

    Args:
        folder: Folder with weights in safetensors, processor, card and manifest; or a Space, or a data set.
        repo_id: `owner/name`, or `name` for the owner of the token; created if missing.
        repo_type: `model`, `space` or `dataset`.
        private: Whether a new repository is private; existing ones are not changed.
        token: Access token; by default the one stored by `hf auth login`.
        revision: Branch to push to, created if missing; by default `main`.
        commit_message: Message of the commit.
        merged: Upload an adapter merged into its base model, with the adapter in `adapter/`. By default only if the
            base model is a local folder, which others cannot load.
        overwrite: Also push to a repository that has other content.
        marker: File that identifies repositories of this package; by default that of the repository type.
        gallery: Whether to upload the HTML pages of a model, which contain the test images. By default only if these
            are public according to the manifest.
        attempts: Maximum number of attempts.
        first_wait_s: Seconds before the second attempt; each further wait is twice as long, at most a minute.
        sleep: Function that waits, for tests.
        again: Remedy after a failure, in one sentence; by default to push the folder again.

    Returns:
        `str`: URL of the commit.

    Raises:
        FileNotFoundError: If the folder is not complete.
        ValueError: If the name is invalid, or something in the folder must not be published.
        FileExistsError: If the repository has other content.
        PermissionError: If the token is missing, invalid, or has no write permission.
        PushError: If the Hub cannot be reached, or the push fails for another reason.
    """
    folder = Path(folder)
    check_name(repo_id)
    if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
        # In a header, such a token would fail with a message that contains it.
        raise ValueError("The token contains a space, a line break or another invalid character. Copy it again.")
    sent = token or get_token()
    check_secret("commit_message", commit_message, sent)
    contents = folder_contents(folder, repo_type, token=sent, gallery=gallery)
    state = {"repo_id": repo_id, "repo_type": repo_type, "private": private, "revision": revision}
    state |= {"commit_message": commit_message, "merged": merged, "marker": marker, "gallery": gallery}
    _save_state(folder, {**state, "state": "started"})
    merge = repo_type == "model" and (local_base_model(folder) is not None if merged is None else merged)
    try:
        with contextlib.ExitStack() as stack:
            source = folder
            if merge and (folder / "adapter_config.json").is_file():
                source = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                write_merged(folder, source, contents.published)
                contents = folder_contents(source, repo_type, token=sent, gallery=gallery)
            for attempt in range(1, attempts + 1):
                try:
                    made, address = _upload(HfApi(token=token), folder, source, contents.published, state, overwrite)
                    break
                except Exception as error:  # the client raises a dozen unrelated types for a failed connection
                    if attempt == attempts or not _is_transient(error):
                        raise
                    sleep(min(first_wait_s * 2 ** (attempt - 1), _LONGEST_WAIT_S))
    except BaseException as error:
        kind, reason = _explained(error, repo_id, has_token=bool(sent))
        reason = reason if isinstance(error, Exception) else "interrupted"
        _save_state(folder, {**state, "state": "failed", "reason": reason})
        if not isinstance(error, Exception) or isinstance(error, FileExistsError):
            raise
        again = again or (
            f"Nothing is lost: all files are still in {folder}. Repeat with `captionrl push {folder}` or "
            f"hf_captionrl.hub.push_folder({str(folder)!r}, {repo_id!r})."
        )
        # Without the client's error, whose text may contain headers with the token.
        raise kind(f"Pushing to {repo_id!r} failed: {reason} {again}") from None
    _save_state(folder, {**state, "repo_id": made, "state": "pushed", "commit": address})
    return address


def _upload(
    api: HfApi, folder: Path, source: Path, published: Sequence[str], state: Mapping[str, Any], overwrite: bool
) -> tuple[str, str]:
    """One attempt, which does not send uploaded files again; name of the repository and address of the commit."""
    repo_type, branch = state["repo_type"], state["revision"]
    kind = {} if repo_type == "model" else {"repo_type": repo_type}
    space = {"space_sdk": "gradio"} if repo_type == "space" else {}
    repo_id = api.create_repo(state["repo_id"], private=state["private"], exist_ok=True, **kind, **space).repo_id
    where: dict[str, Any] = {"repo_id": repo_id, **kind}
    if branch not in (None, "main"):
        api.create_branch(branch=branch, exist_ok=True, **where)
        where["revision"] = branch
    before = api.repo_info(**where)
    marker = state["marker"] or {"model": MANIFEST_FILE, "dataset": "README.md"}.get(repo_type)
    files = {file.rfilename for file in before.siblings or []} - {".gitattributes"}
    if files and marker not in files and not overwrite:
        raise FileExistsError(
            f"{repo_id!r} exists and has other content ({', '.join(sorted(files)[:3])}). Use another name, or "
            "allow overwriting (`captionrl push --overwrite`). Nothing was sent."
        )
    commit = api.upload_folder(
        folder_path=source,
        commit_message=state["commit_message"],
        allow_patterns=[glob.escape(name) for name in published],
        delete_patterns=list(_STALE) if repo_type == "model" else None,
        **where,
    )
    card = (source / "README.md").read_text(encoding="utf-8")
    oid = getattr(commit, "oid", None)
    # Without changes, keep the pinned revision.
    pinned = pin_examples(card, repo_id, oid, again=oid != before.sha)
    if pinned == card:
        return repo_id, str(commit)
    second = api.upload_file(
        path_or_fileobj=pinned.encode(), path_in_repo="README.md", commit_message="Pin the examples", **where
    )
    # Last, so that after a failure a repeated push finds the original card and pins it.
    with contextlib.suppress(OSError):
        atomic_write_text(folder / "README.md", pinned)
    return repo_id, str(second)


def pin_examples(card: str, repo_id: str, commit: str | None, *, again: bool = False) -> str:
    """Make the code examples of a card load the repository at a commit; None: the revisions stay.

    Its code may contain `revision="main"`, and `"."` or the name of the repository without the owner. `again` also replaces a
    commit that an earlier push has pinned.
    """

    def pin(block: re.Match[str]) -> str:
        text = block.group(0)
        for local in (".", repo_id.rpartition("/")[2]):
            text = text.replace(f'"{local}"', f'"{repo_id}"')
        pattern = r'("' + re.escape(repo_id) + r'".*?revision=)' + (r'"(?:main|[0-9a-f]{40})"' if again else '"main"')
        return text if commit is None else re.sub(pattern, rf'\1"{commit}"', text)

    return re.sub(r"^```python\n.*?^```$", pin, card, flags=re.MULTILINE | re.DOTALL)


def read_push_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Destination, `state` (`started`, `failed` or `pushed`) and reason of a failure of a folder's last push; or empty."""
    path = Path(folder) / STATE_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _save_state(folder: Path, state: Mapping[str, Any]) -> None:
    # A full disk or a read-only folder must not prevent the push.
    with contextlib.suppress(OSError):
        write_json(folder / STATE_FILE, state)
