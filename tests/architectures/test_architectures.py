"""`check` says of every architecture what happens: the page, and the walk over all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.architectures.page import page

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_of_models_says_what_the_table_says() -> None:
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        PAGE.write_text(page())

    assert PAGE.read_text() == page()


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.timeout(3600)
def test_check_and_load_agree_on_every_architecture() -> None:
    from tests.architectures.walk import kinds, walk

    chosen = os.environ.get("RLFLOW_ARCHITECTURES", "").split() or kinds()
    wrong = {found.kind: found.disagreements() for found in walk(chosen)}

    assert {kind: each for kind, each in wrong.items() if each} == {}
