"""Turning DOT into a picture: by the `dot` program on the PATH, else by `pygraphviz`.

The wheel of `pygraphviz` carries Graphviz with Pango and Cairo, so svg, png and pdf need
no system package. It brings no fonts; matplotlib's DejaVu Sans is lent to it, so that
pictures come out the same on a machine without any. Either one runs in a process of its
own: what it says and how it ends cannot harm this one. This file does not know what is drawn.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from rlflow.errors import Finding, UsageError
from rlflow.report.charts.look import FONT, SVG_FONT, escape

FORMATS = ("svg", "png", "pdf")
DPI = {"svg": "72", "png": "144", "pdf": "72"}
DRAW_SECONDS = 120.0
# The program that draws keeps its folder itself: it ends well where whoever asked was killed.
BY_LIBRARY = """
import os, sys, tempfile
with tempfile.TemporaryDirectory(prefix="rlflow-fonts-") as folder:
    if sys.argv[3]:
        config = os.path.join(folder, "fonts.conf")
        with open(config, "w") as file:
            file.write(sys.argv[3].replace("FOLDER", folder))
        os.environ["FONTCONFIG_FILE"] = config
    import pygraphviz
    graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
    graph.graph_attr["dpi"] = sys.argv[2]
    picture = graph.draw(format=sys.argv[1], prog="dot")
sys.stdout.buffer.write(picture)
"""


def draw(source: str, form: str) -> bytes:
    """The picture of DOT text as svg, png (144 dots an inch) or pdf.

    Raises UsageError where there is neither `dot` nor `pygraphviz`, or where what there is
    cannot draw.
    """
    program = shutil.which("dot")
    if program is None and importlib.util.find_spec("pygraphviz") is None:
        raise UsageError(
            Finding(
                code="E662",
                what=f"nothing here draws {form}",
                got="no dot on the PATH and no pygraphviz",
                expected="one of them; text, mermaid, dot and json need neither",
                fix="pip install pygraphviz   (or: apt install graphviz)",
            )
        )
    return _drawn(program, source, form)


# A run, its report and a notebook draw the same graph; a process costs half a second of a core.
@lru_cache(maxsize=32)
def _drawn(program: str | None, source: str, form: str) -> bytes:
    if program is not None:
        command = [program, f"-T{form}", f"-Gdpi={DPI[form]}"]
        picture = _run(command, source, form, os.environ)
    else:
        command = [sys.executable, "-c", BY_LIBRARY, form, DPI[form], _fonts()]
        picture = _run(command, source, form, os.environ)
    return plain_svg(picture) if form == "svg" else picture


def plain_svg(picture: bytes) -> bytes:
    """An svg with fonts that browsers have too, and without the name of its maker."""
    text = picture.decode()
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = text.replace(f'font-family="{FONT}"', f'font-family="{SVG_FONT}"')
    return text.encode()


def inline_svg(picture: bytes) -> str:
    """The svg element alone, to be put into a page: no XML declaration, no doctype."""
    text = picture.decode()
    return text[text.index("<svg") :]


def _run(command: Sequence[str], source: str, form: str, environment: Mapping[str, str]) -> bytes:
    try:
        done = subprocess.run(  # noqa: S603 - dot or this Python, with fixed arguments
            command,
            input=source.encode(),
            env=dict(environment),
            capture_output=True,
            timeout=DRAW_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _cannot_draw(form, command, f"not done after {DRAW_SECONDS:.0f} s") from error
    if done.returncode != 0 or not done.stdout:
        raise _cannot_draw(form, command, done.stderr.decode(errors="replace"))
    return done.stdout


def _cannot_draw(form: str, command: Sequence[str], said: str) -> UsageError:
    tool = "pygraphviz" if command[0] == sys.executable else command[0]
    return UsageError(
        Finding(
            code="E663",
            what=f"{tool} cannot draw {form}",
            got="\n".join(said.strip().splitlines()[-3:]) or "no output",
            fix="pip install --force-reinstall pygraphviz   (or: apt install graphviz)",
        )
    )


def _fonts() -> str:
    """Matplotlib's fonts lent to a drawing library that has none; empty where there are none.

    `FOLDER` stands for the folder of what is kept meanwhile.
    """
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return ""
    fonts = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    return (
        '<?xml version="1.0"?>\n<fontconfig>'
        f"<dir>{escape(str(fonts))}</dir><cachedir>FOLDER</cachedir>"
        f"<selectfont><rejectfont><glob>{escape(str(fonts))}/[!D]*</glob></rejectfont>"
        "</selectfont></fontconfig>\n"
    )
