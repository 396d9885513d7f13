"""The declaration of a metric, from which its `evaluate` module, its Space, its card and its table columns are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import Parameter, signature
from textwrap import dedent, indent
from typing import Any, TypeVar

from hf_captionrl.evaluate_modules.evaluate_load import MODULES
from hf_captionrl.reports.table import Column

__all__ = ["Metric", "all_metrics", "forwards", "load_metric", "table_columns"]

_Compute = TypeVar("_Compute", bound=Callable[..., Mapping[str, Any]])


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of `evaluate.load`, declared once as `METRIC` of `declarations/<name>.py`.

    Args:
        title: Heading of the card.
        summary: What the Hub shows beside the title, at most 60 characters.
        description: What is measured.
        arguments: Arguments of `compute`, written as the `Args:` of a docstring.
        returns: Keys of the result, written as the `Returns:` of a docstring.
        examples: Doctest.
        limitations: What a reader of the number must know.
        citation: BibTeX.
        urls: Addresses of the papers.
        compute: Maps predictions, references and options to a result; options are the keywords of its signature, see
            [`forwards`].
        predictions: Kinds of rows that predictions may be, see `prediction_columns`.
        references: Kinds of rows that references may be; empty if there is no such column.
        references_required: Whether references must be given.
        store_references: Converts references to what a column can store.
        functions: The functions of `hf_captionrl.metrics` that it computes.
        keys: Main keys of the result, in Markdown, for the table of docs/metrics.md.
        columns: How tables show its numbers, and related numbers that only tables have. No other file declares them.
        in_captions_table: Whether `captionrl evaluate` shows the columns below every suite. The metric then needs
            captions only, and returns `per_sample`, one number per caption.
        cases: Arguments of `compute` with the `result` that they must give; the examples of the Space.
        data_arguments: Arguments of the cases that a visitor of the Space may change, in addition to predictions and
            references: numbers and texts that are not opened as files.
        extra: Extra of `pip install hf-captionrl[...]` that the Space needs.
        emoji: Shown on the Hub.
    """

    title: str
    summary: str
    description: str
    arguments: str
    returns: str
    examples: str
    limitations: str
    compute: Callable[..., Mapping[str, Any]]
    cases: tuple[Mapping[str, Any], ...]
    keys: str
    functions: tuple[str, ...] = ()
    citation: str = ""
    urls: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ("text",)
    references: tuple[str, ...] = ()
    references_required: bool = False
    store_references: Callable[[Any], Any] | None = None
    columns: tuple[Column, ...] = ()
    in_captions_table: bool = False
    data_arguments: tuple[str, ...] = ()
    extra: str = ""
    emoji: str = "📏"

    @property
    def inputs_description(self) -> str:
        """Arguments, result and examples as `evaluate` shows them."""
        return f"\nArgs:\n{_indented(self.arguments)}Returns:\n{_indented(self.returns)}Examples:\n\n{_indented(self.examples)}"


def _indented(text: str) -> str:
    return indent(dedent(text).strip("\n") + "\n", "    ")


def forwards(function: Callable[..., Any], *left_out: str) -> Callable[[_Compute], _Compute]:
    """Decorator of `compute(..., **options)`: its signature contains the other keywords of `function` instead of `options`."""

    def decorate(compute: _Compute) -> _Compute:
        own = signature(compute)
        named = [given for given in own.parameters.values() if given.kind is not Parameter.VAR_KEYWORD]
        known = {*left_out, *(given.name for given in named)}
        options = [given for given in signature(function).parameters.values() if given.kind is Parameter.KEYWORD_ONLY]
        more = [given for given in options if given.name not in known]
        compute.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return compute

    return decorate


def load_metric(name: str) -> Metric:
    """The declaration of a metric."""
    return import_module(f"{__package__}.declarations.{name}").METRIC


def all_metrics() -> dict[str, Metric]:
    """All declarations by name."""
    return {name: load_metric(name) for name in MODULES}


def table_columns(*keys: str, short: bool = False) -> tuple[Column, ...]:
    """The declared columns of some keys; `short` for tables with many columns."""
    columns = {column.key: column for metric in all_metrics().values() for column in metric.columns}
    chosen = (columns[key] for key in keys)
    return tuple(
        replace(column, header=column.short_header or column.header) if short else column for column in chosen
    )
