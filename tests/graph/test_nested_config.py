"""Configs within configs: pydantic models and dataclasses, set by keys with dots."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from pydantic import BaseModel

import rlflow as rf
from rlflow.errors import UsageError
from rlflow.graph.pipeline import make_config


class Sampling(BaseModel):
    temperature: float = 1.0
    tokens: int = 12


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-4
    name: str = "adamw"
    inner: Sampling = field(default_factory=Sampling)


class Config(rf.Config):
    optim: Optim = Optim(lr=3e-4)
    sampling: Sampling = Sampling(tokens=5)


def test_a_key_with_dots_sets_one_value_and_leaves_the_defaults_of_the_field():
    found = make_config(
        Config, ["optim.name=7", "sampling.temperature=0.5", "optim.inner.tokens=3"]
    )
    assert Optim(lr=3e-4, name="7", inner=Sampling(tokens=3)) == found.optim
    assert Sampling(temperature=0.5, tokens=5) == found.sampling
    again = make_config(Config, ["optim.lr=1", "optim.lr=0.25"])
    assert (0.25, "adamw") == (again.optim.lr, again.optim.name)
    assert {"lr": 0.25, "name": "adamw"} == {
        k: v for k, v in again.model_dump(mode="json")["optim"].items() if k != "inner"
    }


@pytest.mark.parametrize(
    ("setting", "code", "part"),
    [
        ("optim.lrr=1", "E304", "did you mean 'lr'"),
        ("optim.inner.token=1", "E304", "did you mean 'tokens'"),
        ("seed.x=1", "E304", "int has no field 'x'"),
        ("optimm.lr=1", "E304", "did you mean 'optim'"),
        ("optim.lr=fast", "E305", "--set optim.lr"),
        ("sampling.tokens=1.5", "E305", "--set sampling.tokens"),
    ],
)
def test_what_cannot_be_set_is_named(setting, code, part):
    with pytest.raises(UsageError) as caught:
        make_config(Config, [setting])
    assert [code] == [finding.code for finding in caught.value.findings]
    assert part in str(caught.value)
