"""Where a user of `scripts/first_hour.py` works: commands, what they printed, and checks of what they left."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SECONDS = 900
_SHOWN_LINES = 30


class CommandFailedError(Exception):
    """A command ended with another exit code than the one that was wanted."""


class Session:
    """A new folder, a clone of the repository, and the interpreter that runs it."""

    def __init__(self, folder: Path, *, source: Path, python: Path) -> None:
        self.folder = folder
        self.source = source
        self.python = python
        self.commands: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        folder.mkdir(parents=True)
        caches = folder.with_name(f"{folder.name}-caches")
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(source),
            "HF_HOME": str(caches / "huggingface"),
            "XDG_CACHE_HOME": str(caches),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_EVALUATE_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "160",
        }

    def path(self, name: str) -> Path:
        """A file or folder of the user."""
        return self.folder / name

    def run(self, command: str, *, code: int = 0, max_lines: int | None = None) -> str:
        """Run a documented command in the user's folder."""
        words = shlex.split(command)
        program = {"captionrl": [str(self.python), "-m", "hf_captionrl.cli"], "python": [str(self.python)]}[words[0]]
        began = time.monotonic()
        try:
            done = subprocess.run(
                [*program, *words[1:]],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired as late:
            raise CommandFailedError(f"`{command}` took more than {_SECONDS} seconds.") from late
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        entry = {
            "command": command,
            "code": done.returncode,
            "seconds": round(time.monotonic() - began, 1),
            "lines": len(lines),
        }
        self.commands.append(entry)
        if done.returncode != code:
            said = "\n".join(f"    | {line}" for line in lines[-_SHOWN_LINES:])
            raise CommandFailedError(f"`{command}` ended with {done.returncode} instead of {code}:\n{said}")
        if max_lines is not None:
            self.check(
                f"lines of `{' '.join(words[:3])}`", len(lines), lambda n: n <= max_lines, f"at most {max_lines}"
            )
            if len(lines) > max_lines:
                print("\n".join(f"    | {line[:200]}" for line in lines[:_SHOWN_LINES]))
        return done.stdout

    def check(self, what: str, found: Any, wanted: Any, words: str = "") -> None:
        """Compare what is there with what should be there; continues either way."""
        passed = bool(wanted(found)) if callable(wanted) else found == wanted
        shown = (
            found if isinstance(found, bool | int | float | str) or found is None else json.dumps(found, default=str)
        )
        self.checks.append({"what": what, "found": shown, "wanted": words or str(wanted), "passed": passed})

    def check_says(self, output: str, *texts: str) -> None:
        """Look for texts in what a command printed."""
        flat = " ".join(output.split())
        for text in texts:
            where = flat.find(text)
            self.check(f"it says {text!r}", where >= 0 or f"no: ...{flat[-160:]}", True)

    def read_lines(self, name: str) -> list[Any]:
        """A JSON Lines file of the user."""
        return [json.loads(line) for line in self.path(name).read_text(encoding="utf-8").splitlines() if line.strip()]

    def read_json(self, name: str) -> Any:
        """A JSON file of the user."""
        return json.loads(self.path(name).read_text(encoding="utf-8"))

    def take_program(self, name: str) -> None:
        """Put a program that the user has written into the user's folder."""
        shutil.copyfile(Path(__file__).with_name(name), self.folder / name)

    def check_source(self) -> None:
        """The package that runs is that of the clone."""
        code = "import hf_captionrl, pathlib; print(pathlib.Path(hf_captionrl.__file__).resolve().parents[1])"
        where = self.run(f"python -c {shlex.quote(code)}").split()[-1]
        self.commands.clear()
        self.check("the clone is what runs", Path(where) == self.source.resolve(), True)

    def check_captions(self, name: str, number: int, ids: Callable[[list[str]], bool] | None = None) -> None:
        """A file of captions has a line with an image and a text for each image."""
        rows = self.read_lines(name)
        self.check(f"lines of {name}", len(rows), number)
        found = [str(row["image_id"]) for row in rows]
        self.check(f"different images in {name}", len(set(found)), number)
        self.check(f"captions with a word in {name}", sum(bool(row["caption"].strip()) for row in rows), number)
        if ids is not None:
            self.check(f"ids of {name}", ids(found) or found[:5], True)
