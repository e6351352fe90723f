"""What MkDocs is told beside `mkdocs.yml`: the README is the first page, linked files have pages.

Pages of `docs/` link to each other and to files of the repository as GitHub reads them, by relative
paths. A site knows nothing outside of `docs/`, so every file that a page links to is given a page
under `files/`, and the links are written anew. MkDocs calls the functions named `on_...`.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
FENCE = re.compile(r"^(`{3,}\w+) [^\n`]+$", re.MULTILINE)
BLOCK = re.compile(r"^(`{3,}).*?^\1$", re.DOTALL | re.MULTILINE)
PICTURES = (".svg", ".png")


def page_of(path: str) -> str:
    """Where the site has a file of the repository: both are relative paths with slashes."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    return f"files/{path}" if path.endswith((".md", *PICTURES)) else f"files/{path}.md"


def repository_path(page: str) -> str:
    """The file of the repository that a page of the site shows."""
    if page == "index.md":
        return "README.md"
    if not page.startswith("files/"):
        notebook = f"docs/{page}".replace(".md", ".ipynb")
        return notebook if (ROOT / notebook).is_file() else f"docs/{page}"
    path = page.removeprefix("files/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def linked(path: str) -> set[str]:
    """The files of the repository that a Markdown file, or a notebook, links to."""
    text = BLOCK.sub("", notebook_text(path) if path.endswith(".ipynb") else source_of(path))
    targets = [match[2] for match in LINK.finditer(text) if "://" not in match[2]]
    found = {posixpath.normpath(posixpath.join(posixpath.dirname(path), t)) for t in targets}
    return {with_readme(target) for target in found}


def source_of(path: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / path).read_text()


def notebook_text(path: str) -> str:
    """A notebook as Markdown: its prose, its cells as Python, and where the file is."""
    parts = []
    for cell in json.loads(source_of(path))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    title, *rest = parts
    return "\n\n".join([title, f"A notebook: `{path}`, executed by the tests.", *rest, ""])


def with_readme(path: str) -> str:
    """A folder's README in the place of the folder."""
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def shown(path: str) -> str:
    """The page of a file that is not Markdown: its text, as it is."""
    kind = {".py": "python", ".json": "json", ".sh": "bash"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{kind}\n{(ROOT / path).read_text()}\n````\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds the README, pages of notebooks, and whatever pages link to outside of `docs/`."""
    notebooks = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/notebooks/*.ipynb"))
    for path in notebooks:
        files.append(File.generated(config, page_of(path), content=notebook_text(path)))
    pages = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    waiting = ["README.md", *(page for page in pages if (ROOT / page).is_file()), *notebooks]
    known = {f"docs/{file.src_uri}" for file in files}
    while waiting:
        path = waiting.pop()
        if path not in known:
            known.add(path)
            files.append(made(path, config))
        if path.endswith((".md", ".ipynb")):
            waiting += sorted(
                target for target in linked(path) - known if (ROOT / target).is_file()
            )
    return files


def made(path: str, config: Any) -> Any:
    """A file of the site that `docs/` does not hold."""
    if path.endswith(PICTURES):
        return File.generated(config, page_of(path), abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text() if path.endswith(".md") else shown(path)
    return File.generated(config, page_of(path), content=text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site needs them; of a fence's info string the language alone."""
    here = page.file.src_uri
    folder = posixpath.dirname(repository_path(here))
    start = posixpath.dirname(here)

    def rewritten(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        target = with_readme(posixpath.normpath(posixpath.join(folder, link[2])))
        return f"{link[1]}{posixpath.relpath(page_of(target), start or '.')}{link[3]}"

    parts = re.split(r"(^(?:`{3,}).*?^`{3,}$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        FENCE.sub(r"\1", part) if part.startswith("```") else LINK.sub(rewritten, part)
        for part in parts
    )
