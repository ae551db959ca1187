"""EMBEDDINGS.md: what was asked, what was found, and what it rests on."""

from __future__ import annotations

import re
from math import isfinite
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from equiport.content import content_dir
from equiport.experiment.atomic import write_text
from equiport.stages.embeddings import EmbeddingResult

PAGE_NAME = "EMBEDDINGS.md"


def write_embeddings_page(folder: Path, result: EmbeddingResult) -> Path:
    """Write the summary into `folder`, atomically."""
    templates = Environment(
        loader=FileSystemLoader(content_dir("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(figure=_figure, cosine=_cosine, cell=_cell)
    text = templates.get_template("embeddings.md.j2").render(result=result, headline=headline(result))
    return write_text(folder / PAGE_NAME, re.sub(r"\n{3,}", "\n\n", text))


def headline(result: EmbeddingResult) -> str:
    """The verdict in one line."""
    found = result.comparison
    if not found.prompts:
        return f"{result.verdict.value}: the vectors cannot be compared"
    lowest = min(row.cosine for row in found.prompts)
    return (
        f"{result.verdict.value}: {len(found.prompts)} prompts, lowest cosine with the source {lowest:.6f} "
        f"({found.precision}, {result.pooling.mode.value} pooling)"
    )


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isfinite(value) else str(value)


def _cosine(distance: float | None) -> str:
    return "-" if distance is None else f"{1 - distance:.7f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
