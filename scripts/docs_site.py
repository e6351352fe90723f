"""What MkDocs is told beside `mkdocs.yml`: the README is the first page, linked files have pages.

Pages of `docs/` link to each other and to files of the repository as GitHub reads them, by relative
paths. A site knows nothing outside of `docs/`, so every file that a page links to is given a page
under `files/`, and the links are written anew. MkDocs calls the functions named `on_...`.
"""

from __future__ import annotations

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
        return path.removeprefix("docs/")
    return f"files/{path}" if path.endswith((".md", *PICTURES)) else f"files/{path}.md"


def repository_path(page: str) -> str:
    """The file of the repository that a page of the site shows."""
    if page == "index.md":
        return "README.md"
    if not page.startswith("files/"):
        return f"docs/{page}"
    path = page.removeprefix("files/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def linked(path: str) -> set[str]:
    """The files of the repository that a Markdown file links to."""
    text = BLOCK.sub("", (ROOT / path).read_text())
    targets = [match[2] for match in LINK.finditer(text) if "://" not in match[2]]
    found = {posixpath.normpath(posixpath.join(posixpath.dirname(path), t)) for t in targets}
    return {with_readme(target) for target in found}


def with_readme(path: str) -> str:
    """A folder's README in the place of the folder."""
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def shown(path: str) -> str:
    """The page of a file that is not Markdown: its text, as it is."""
    kind = {".py": "python", ".json": "json", ".sh": "bash"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{kind}\n{(ROOT / path).read_text()}\n````\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds the README, and whatever pages link to outside of `docs/`."""
    waiting = ["README.md", *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    known = {f"docs/{file.src_uri}" for file in files}
    while waiting:
        path = waiting.pop()
        if path not in known:
            known.add(path)
            files.append(made(path, config))
        if path.endswith(".md"):
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
