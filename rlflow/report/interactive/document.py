"""The document that a browser opens: sections, styles, scripts and data in one file.

Its policy lets in the scripts that are in it, by their hashes, and nothing of a network; a page
that is served may ask its own server. This file does not know what a run is.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlflow.report.charts.look import escape
from rlflow.report.page import style, wrapped_section

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("frame", "gantt", "detail", "curves", "samples", "live")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """A section of the page: its name in it, its title, its HTML, and what a script fills in.

    `drawn` names an element that a script draws into, before the HTML.
    """

    name: str
    title: str
    html: str
    drawn: str = ""


@cache
def scripts() -> tuple[str, ...]:
    """The library that draws curves, and what is rlflow's own."""
    own = "\n".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    library = (ASSETS / "uplot.js").read_text(encoding="utf-8")
    licence = (ASSETS / "uplot.LICENSE").read_text(encoding="utf-8")
    return f"/*!\n{licence}*/\n{library}", f'(() => {{\n"use strict";\n{own}\n}})();'


def document(
    title: str,
    head: str,
    parts: Sequence[PagePart],
    data: Sequence[tuple[str, str]],
    *,
    served: bool = False,
) -> str:
    """The page as text; `data` are (name, packed value), `served` says that it may ask for more."""
    allowed = " ".join(f"'sha256-{_digest(each)}'" for each in scripts())
    asked = "'self'" if served else "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'"
    )
    blocks = "\n".join(
        f'<script type="text/plain" id="data-{name}">{value}</script>' for name, value in data
    )
    body = "\n".join(_section(part) for part in parts)
    contents = "".join(
        f'<li><a href="#{part.name}">{escape(part.title)}</a></li>' for part in parts
    )
    code = "\n".join(f"<script>{each}</script>" for each in scripts())
    uplot = (ASSETS / "uplot.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{uplot}\n{style()}</style>\n</head>\n"
        '<body>\n<a class="skip" href="#main">to the report</a>\n'
        f'<header id="head">{head}</header>\n'
        f'<nav aria-label="Sections"><ul>{contents}</ul></nav>\n'
        f'<main id="main">\n{body}\n</main>\n'
        '<div id="tip" role="status" hidden></div>\n'
        f"{blocks}\n{code}\n</body>\n</html>\n"
    )


def _section(part: PagePart) -> str:
    drawn = f'<div id="{part.drawn}" class="drawn"></div>' if part.drawn else ""
    return wrapped_section(part.name, part.title, f'{drawn}<div class="still">{part.html}</div>')


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
