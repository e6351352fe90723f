"""Finding a pipeline in a user's file, and naming what is wrong with the file.

The file is imported as any Python file is; its own error is shown short, with its own
traceback. Nothing of a pipeline is run but the function that declares it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from rlflow.errors import (
    Finding,
    GraphError,
    RlflowError,
    Source,
    UsageError,
    error_text,
    known_names,
    near_names,
)
from rlflow.graph.pipeline import MODULE, Pipeline, validation_findings
from rlflow.graph.placement import Placement
from rlflow.graph.source import raised_at
from rlflow.userfiles import kept_alive, package_of


def load_pipeline(target: str | Pipeline) -> Pipeline:
    """The pipeline of `file.py`, of `file.py:name` where a file has several, or a pipeline itself.

    Raises UsageError where there is no such file or pipeline, or the file does not
    import; GraphError where a declaration in it is wrong.
    """
    if isinstance(target, Pipeline):
        return target
    path_text, _, name = target.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise UsageError(_no_file(path))
    module = _import(path)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Pipeline)}
    if name:
        if name not in found:
            raise UsageError(
                Finding(
                    code="E306",
                    what=f"{path} has no pipeline {name!r}",
                    expected=known_names(list(found)),
                    near=near_names(name, found),
                )
            )
        return found[name]
    if len(found) != 1:
        raise UsageError(_not_one(path, list(found)))
    return next(iter(found.values()))


def named_placement(pipeline: Pipeline, name: str | Placement | None) -> tuple[str, Placement]:
    """The placement of that name, or the first one; that of a file, `best.py`, by its stem.

    A value stands for itself, under the name that the pipeline has for it, else `placement`.

    A file holds it under the name `placement`, as `rlflow tune -o` writes it. Raises UsageError
    E201 for an unknown name, E316 for a file without one, and what importing a file raises.
    """
    if isinstance(name, Placement):
        own = [known for known, placed in pipeline.placements.items() if placed is name]
        return (own or ["placement"])[0], name
    if name is None or not name.endswith(".py"):
        return pipeline.placement(name)
    path = Path(name)
    if not path.is_file():
        raise UsageError(_no_file(path))
    found = vars(_import(path)).get("placement")
    if not isinstance(found, Placement):
        raise UsageError(
            Finding(
                code="E316",
                what=f"{path} holds no placement",
                got="nothing named placement" if found is None else f"{type(found).__name__}",
                expected="a file that `rlflow tune -o FILE.py` wrote, or one such as it",
                fix='placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})',
            )
        )
    return path.stem, found


def _import(path: Path) -> ModuleType:
    """Import a user's file, as a module of the package that it lies in if it lies in one."""
    root, package = package_of(path)
    name = f"{package}.{MODULE}{path.stem}" if package else f"{MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(
            Finding(code="E306", what=f"{path} is not a Python file", fix=f"{path.stem}.py")
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with kept_alive(), _first(root):
            if package:
                _import_package(package, path)
            with _first(path.resolve().parent):
                spec.loader.exec_module(module)
    except RlflowError:
        raise
    except ValidationError as error:
        where = _where(path, error)
        raise UsageError(*validation_findings(error, "E301", where=where)) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and classes of one's own beside Exception too
        raise UsageError(
            Finding(
                code="E307",
                what=f"{path} does not import: {error_text(error)}",
                where=_where(path, error),
                got=own_traceback(path, error),
                fix=_no_parent(path, error) if not package else "",
            )
        ) from None
    return module


@contextlib.contextmanager
def _first(folder: Path) -> Iterator[None]:
    """Imports inside look into a folder first."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's file has taken it away
            sys.path.remove(entry)


def _import_package(package: str, path: Path) -> None:
    """Import the package of a file; UsageError E317 where another one of its name is loaded."""
    folders = getattr(importlib.import_module(package), "__path__", ())
    folder = path.resolve().parent
    if folder in [Path(each).resolve() for each in folders]:
        return
    top = package.partition(".")[0]
    file = getattr(sys.modules[top], "__file__", None) or "this interpreter"
    raise UsageError(
        Finding(
            code="E317",
            what=f"{path} lies in package {package!r}, and another one is imported by that name",
            got=f"{top} from {file}",
            expected=f"{package} from {folder}",
            fix="rename the folder; without an __init__.py it is no package",
        )
    )


def _no_parent(path: Path, error: BaseException) -> str:
    """What to do about a relative import in a file that lies in no package."""
    if not isinstance(error, ImportError) or "no known parent package" not in str(error):
        return ""
    beside = "`import name` for a file beside this one"
    folder = path.resolve().parent
    if not folder.name.isidentifier():
        return beside
    return f"{beside}, or make the folder a package: touch {folder / '__init__.py'}"


def own_traceback(path: Path, error: BaseException) -> str:
    """The traceback from the user's file on, rlflow's own frames left out."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_ours(frame.filename)]
    return "".join(traceback.format_list(own)).rstrip()


def _is_ours(filename: str) -> bool:
    package = str(Path(__file__).resolve().parents[1])
    return filename.startswith((package, "<frozen"))


def _where(path: Path, error: BaseException) -> Source:
    """The deepest line of the user's file, or the line a syntax error names."""
    if isinstance(error, SyntaxError) and error.lineno:
        return Source(path=str(path), line=error.lineno, text=(error.text or "").strip())
    return raised_at(error, path) or Source(path=str(path), line=1)


def _no_file(path: Path) -> Finding:
    folder = path.parent
    found = folder.glob("*.py") if folder.is_dir() else ()
    names = [entry.name for entry in found if entry.is_file()]
    near = tuple(str(folder / name) for name in near_names(path.name, names))
    return Finding(
        code="E306",
        what=f"there is no file {path}",
        near=near,
        got=f"Python files in {folder}: {known_names(sorted(names))}",
    )


def _not_one(path: Path, names: list[str]) -> Finding:
    if not names:
        return Finding(
            code="E306",
            what=f"{path} has no pipeline",
            expected="one function decorated with @rf.pipeline",
            fix="@rf.pipeline()\ndef my_pipeline(cfg: rf.Config): ...",
        )
    return Finding(
        code="E306",
        what=f"{path} has {len(names)} pipelines: {', '.join(names)}",
        expected="the name of one of them",
        fix=f"{path}:{names[0]}",
    )


def trace_error(pipeline: Pipeline, error: BaseException) -> GraphError:
    """What a user's declaring function raised, at its own line."""
    path = pipeline.path or Path("pipeline")
    unknown = _unknown_keyword(error)
    if unknown is not None:
        finding = replace(unknown, where=_where(path, error))
        return GraphError(finding, summary="Nothing was started.")
    return GraphError(
        Finding(
            code="E308",
            what=f"pipeline {pipeline.name!r} raised {error_text(error)}",
            where=_where(path, error),
            got=own_traceback(path, error),
        ),
        summary="Nothing was started.",
    )


def _unknown_keyword(error: BaseException) -> Finding | None:
    """A finding for a call of a function of rlflow with an option that it does not have."""
    said = re.match(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'", str(error))
    function = _called(said[1], error) if isinstance(error, TypeError) and said else None
    if said is None or function is None:
        return None
    known = [
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.kind != p.VAR_POSITIONAL
    ]
    near = near_names(said[2], known)
    return Finding(
        code="E135",
        what=f"{said[1]} has no option {said[2]!r}",
        expected=", ".join(known),
        near=near,
        fix=f"{near[0]}=..." if near else "",
    )


def _called(name: str, error: Exception) -> Callable[..., object] | None:
    """The function of rlflow of that name, as a line that the error passed could call it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        known = {**frame.f_globals, **frame.f_locals}
        modules = [each for each in known.values() if isinstance(each, ModuleType)]
        named = [known.get(name), *(getattr(module, name, None) for module in modules)]
        for found in named:
            if callable(found) and str(getattr(found, "__module__", "")).startswith("rlflow."):
                function: Callable[..., object] = found
                return function
    return None
