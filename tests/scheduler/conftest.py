"""Model configs of several sizes in a directory of its own, found by relative paths."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.budget import examples
from tests.scheduler.strategies import CONFIGS

settings.register_profile(
    "rlflow",
    max_examples=examples(100),
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("rlflow")


@pytest.fixture(scope="session")
def models_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `models/NAME/config.json`, which nobody changes."""
    home = tmp_path_factory.mktemp("scheduler")
    write_models(home)
    return home


@pytest.fixture(autouse=True, scope="module")
def models(models_home: Path) -> Iterator[Path]:
    """The working directory is that of the models; the hub cache is empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(models_home)
        patch.setenv("HF_HUB_CACHE", str(models_home / "hub"))
        yield models_home


def write_models(home: Path) -> None:
    for name, config in CONFIGS.items():
        folder = home / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
