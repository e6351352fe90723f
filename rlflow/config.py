"""Finding a pipeline in a user's file, and naming what is wrong with the file.

The file is imported as any Python file is; its own error is shown short, with its own
traceback. Nothing of a pipeline is run but the function that declares it.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from rlflow.errors import (
    Finding,
    GraphError,
    RlflowError,
    Source,
    UsageError,
    known_names,
    near_names,
)
from rlflow.graph.pipeline import MODULE, Pipeline
from rlflow.graph.trace import raised_at


def load_pipeline(target: str) -> Pipeline:
    """The pipeline of `file.py`, or of `file.py:name` where a file has several.

    Raises UsageError where there is no such file or pipeline, or the file does not
    import; GraphError where a declaration in it is wrong.
    """
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


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{MODULE}{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(
            Finding(code="E306", what=f"{path} is not a Python file", fix=f"{path.stem}.py")
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except RlflowError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            Finding(
                code="E307",
                what=f"{path} does not import: {type(error).__name__}: {error}",
                where=_where(path, error),
                got=own_traceback(path, error),
            )
        ) from None
    finally:
        sys.path.pop(0)
    return module


def own_traceback(path: Path, error: BaseException) -> str:
    """The traceback from the user's file on, rlflow's own frames left out."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_ours(frame.filename)]
    return "".join(traceback.format_list(own)).rstrip()


def _is_ours(filename: str) -> bool:
    package = str(Path(__file__).resolve().parent)
    return filename.startswith((package, "<frozen"))


def _where(path: Path, error: BaseException) -> Source:
    """The deepest line of the user's file, or the line a syntax error names."""
    if isinstance(error, SyntaxError) and error.lineno:
        return Source(path=str(path), line=error.lineno, text=(error.text or "").strip())
    return raised_at(error, path) or Source(path=str(path), line=1)


def _no_file(path: Path) -> Finding:
    folder = path.parent
    names = [entry.name for entry in folder.glob("*.py")] if folder.is_dir() else []
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


def trace_error(pipeline: Pipeline, error: Exception) -> GraphError:
    """What a user's declaring function raised, at its own line."""
    path = pipeline.path or Path("pipeline")
    return GraphError(
        Finding(
            code="E308",
            what=f"pipeline {pipeline.name!r} raised {type(error).__name__}: {error}",
            where=_where(path, error),
            got=own_traceback(path, error),
        ),
        summary="Nothing was started.",
    )
