"""Asserts of test files, which pytest rewrites: once for all workers of a run.

In a new checkout each worker would rewrite every file for itself, all of them the same ones at the
same time. What is done here is what pytest's import hook does, but for running the file; where this
version of pytest does it otherwise, workers do it as ever.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def rewrite(config: pytest.Config, files: Sequence[Path]) -> None:
    """Write the code of test files that have none yet, in as many processes as there are cores."""
    try:
        from _pytest.assertion.rewrite import PYC_TAIL, get_cache_dir
    except ImportError:
        return
    missing = [f for f in files if not (get_cache_dir(f) / f"{f.stem}{PYC_TAIL}").is_file()]
    if sys.dont_write_bytecode or not missing:
        return
    count, context = os.cpu_count() or 1, multiprocessing.get_context("fork")
    started = [
        context.Process(target=_written, args=(config, missing[part::count]))
        for part in range(count)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()


def _written(config: pytest.Config, files: Sequence[Path]) -> None:
    """The same in this process; a file that is no Python is left to who imports it."""
    from _pytest.assertion.rewrite import (
        PYC_TAIL,
        _rewrite_test,
        _write_pyc,
        assertstate_key,
        get_cache_dir,
    )

    for file in files:
        folder = get_cache_dir(file)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            source, code = _rewrite_test(file, config)
        except SyntaxError:
            continue
        _write_pyc(config.stash[assertstate_key], code, source, folder / f"{file.stem}{PYC_TAIL}")
