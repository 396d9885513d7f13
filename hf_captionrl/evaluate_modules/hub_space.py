"""The files of a metric's Space, generated from its declaration."""

import re
import textwrap

from hf_captionrl.evaluate_modules.metric import Metric, load_metric

__all__ = ["class_name", "render_card", "space_files"]

_MODULE = '''\
"""{title} as a module of `evaluate`. Generated from hf_captionrl/evaluate_modules/declarations/{name}.py."""

import evaluate

from hf_captionrl.evaluate_modules.adapter import DeclaredMetric

__all__ = ["{kind}"]


class {kind}(DeclaredMetric, evaluate.Metric):
    """{title}."""

    declaration = "{name}"
'''

_APP = '''\
"""Page of the Space."""

from pathlib import Path

from hf_captionrl.evaluate_modules.page import build_page

if __name__ == "__main__":
    build_page("{name}", Path(__file__).parent).launch()
'''

_TESTS = '''\
"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

from hf_captionrl.evaluate_modules.metric import load_metric

test_cases = load_metric("{name}").cases
'''

_CARD = """\
---
title: "{title}"
emoji: {emoji}
colorFrom: blue
colorTo: green
sdk: gradio
sdk_version: 6.31.0
app_file: app.py
pinned: false
license: apache-2.0
tags:
- evaluate
- metric
short_description: "{summary}"
---

# Metric Card for {title}

## Metric description

{description}
## How to use

If the package is installed, `import hf_captionrl` makes the name known to `evaluate`, online and offline:

```python
import evaluate
import hf_captionrl

metric = evaluate.load("{name}")
```

From this Space: `evaluate.load("ORGANISATION/{name}")`, with the packages of `requirements.txt` installed. `compute`, `add`,
`add_batch`, `evaluate.combine` and several processes (`num_process`, `process_id`, `experiment_id`) work. Arguments other
than `predictions` and `references` are keywords of `compute`.

### Inputs

{inputs}

### Output values

{returns}

### Examples

```python
{examples}```

## Limitations and bias

{limitations}"""

_CITATION = """
## Citation

```bibtex
{citation}```
"""

_PARENTHESES_OR_NAME = re.compile(r"\((?:[^()]|\([^()]*\))*\)|\w+")


def class_name(name: str) -> str:
    """Name of the class of a metric's module, from which `evaluate` derives the metric's name."""
    return "".join(part.title() for part in name.split("_"))


def space_files(name: str) -> dict[str, str]:
    """File names and contents of a metric's Space."""
    metric, names = load_metric(name), {"name": name, "kind": class_name(name)}
    extra = f"[{metric.extra}]" if metric.extra else ""
    return {
        f"{name}.py": _MODULE.format(title=metric.title, **names),
        "README.md": render_card(name, metric),
        "app.py": _APP.format(**names),
        "requirements.txt": f"hf-captionrl{extra}>=0.1.0\n",
        "tests.py": _TESTS.format(**names),
    }


def render_card(name: str, metric: Metric) -> str:
    """The card of a metric, for a Space whose owner is not known yet."""
    card = _CARD.format(
        name=name,
        title=metric.title,
        emoji=metric.emoji,
        summary=metric.summary,
        description=metric.description,
        inputs="\n".join(_input_items(metric.arguments)),
        returns=textwrap.dedent(metric.returns).strip(),
        examples=textwrap.dedent(metric.examples),
        limitations=metric.limitations,
    )
    return card + _CITATION.format(citation=metric.citation) if metric.citation else card


def _input_items(arguments: str) -> list[str]:
    """The arguments of a docstring as a Markdown list."""
    items = []
    for item in re.split(r"\n(?=\S)", textwrap.dedent(arguments).strip()):
        head, _, text = " ".join(item.split()).partition(": ")
        names = _PARENTHESES_OR_NAME.sub(lambda found: found[0] if found[0][0] == "(" else f"`{found[0]}`", head)
        items.append(textwrap.fill(f"- {names}: {text}", 110, subsequent_indent="  ", break_on_hyphens=False))
    return items
