"""What a node is in its graph, as values: it averages, drafts, ends a loop, goes on with a rollout.

An op says which roles its options may spell, and a node reads them once, where it is made. Options
of a user's own function spell none, whatever they are called. Whoever asks what a node is asks for
a role; this file alone knows by which option each is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, Self

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a node is. It is that where all options are said that have no default here.

    An option has the name of its field, unless `WORDS` has another for it.
    """

    WORDS: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self | None:
        """The role as a node's options spell it; None where they do not."""
        said = {}
        for each in fields(cls):
            word = cls.WORDS.get(each.name, each.name)
            if word in options:
                said[each.name] = options[word]
            elif each.default is MISSING:
                return None
        return cls(**said) if said else None

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """The options that spell it."""
        return tuple(cls.WORDS.get(each.name, each.name) for each in fields(cls))

    def written(self, params: Options) -> Options:
        """Options of a node that spell it: those that did in their places, further ones behind."""
        said = {self.WORDS.get(e.name, e.name): getattr(self, e.name) for e in fields(self)}
        known = {name for name, _ in params}
        more = ((name, value) for name, value in self.options().items() if name not in known)
        return (*((name, said.get(name, value)) for name, value in params), *more)

    def options(self) -> dict[str, Any]:
        """The options that spell it, without those that are at their defaults."""
        found = ((each, getattr(self, each.name)) for each in fields(self))
        return {
            self.WORDS.get(each.name, each.name): value
            for each, value in found
            if each.default is MISSING or value != each.default
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Role):
    """It takes rows of `data`: `batch` of them, or at most `limit`.

    They are those of the iteration that is `ahead` of its own; the first time also all before.
    """

    data: Any
    batch: int | None = None
    limit: int | None = None
    ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(Role):
    """It samples, or hands on what was: `n` responses a prompt, of so many tokens at most.

    `max_tokens` bounds the response of a whole episode. With `ignore_eos` all are equally long.
    """

    n: int | None = None
    max_new_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    chat: Any = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted(Role):
    """The model `by` proposes so many `tokens` at a time to its own.

    It does where at most so many `rows` go on; None: however many do. With "auto" the scheduler
    chooses, and may say 0: it never does.
    """

    WORDS: ClassVar[Mapping[str, str]] = {
        "by": "drafter",
        "tokens": "draft_tokens",
        "rows": "draft_rows",
    }
    by: str
    tokens: int = 0
    rows: int | Literal["auto"] | None = None

    @property
    def most(self) -> int | None:
        """The most rows that it drafts for; None for any number, or before one is chosen."""
        return None if self.rows == "auto" else self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversampled(Role):
    """It begins more groups than it makes: the `first_groups` groups that are complete first."""

    first_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced(Role):
    """Its replicas move live rows to each other after every so many turns, until all are even.

    What a row brings is its `cache`, or its tokens alone, which are read again (`reread`): the
    scheduler chooses; empty before it has.
    """

    WORDS: ClassVar[Mapping[str, str]] = {"every": "balance"}
    every: int
    moves: Literal["cache", "reread", ""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Role):
    """A rollout that leaves rows unfinished after so many tokens, for another node to go on."""

    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Role):
    """It goes on with the unfinished rows of a `rollout`, from token `first` on."""

    WORDS: ClassVar[Mapping[str, str]] = {"rollout": "resumes"}
    rollout: str
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion(Role):
    """It draws a part of what a `rollout` draws: of its `of` prompts those from `first` to `last`.

    `first` counts from 0, and `last` is not among them.

    One that `helps` has devices that idle otherwise: it waits for the update that they make, and
    has its weights. The node that puts the rows of all parts together has the rollout's name.
    """

    WORDS: ClassVar[Mapping[str, str]] = {
        "rollout": "portion_of",
        "first": "from_prompt",
        "last": "to_prompt",
        "of": "of_prompts",
    }
    rollout: str
    first: int
    last: int
    of: int
    helps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsTogether(Role):
    """It has the rows of all the `parts` of a rollout, in the place of that."""

    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring(Role):
    """A forward that scores tokens at a temperature, or at one for each of what it makes."""

    temperature: Any
    top_k: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed(Role):
    """It keeps which experts its tokens chose (`record`), or has them chosen again (`replay`)."""

    routing: Literal["record", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersOff(Role):
    """A forward of the weights below its model's adapters: no update changes what it reads."""

    adapters: str = "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning(Role):
    """It trains by a `loss`, in `epochs` passes of `mini_batches` steps; `old` is whose log-probs.

    Its rows are up to `staleness` updates old. In the `background` nothing waits for it.
    """

    loss: Any
    epochs: int = 1
    mini_batches: int = 1
    shuffle: bool = True
    old: str = ""
    temperature: float | None = None
    background: bool = False
    staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged(Role):
    """It takes the weights of model `source` into the average of them that its own model is."""

    WORDS: ClassVar[Mapping[str, str]] = {"source": "averages"}
    source: str
    every: int = 1
    decay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEnd(Role):
    """It has what the trips of a loop have made, which ends `when` that field says so.

    With `batch` it gathers so many groups, and of `surplus` rows "keep" leaves those of further
    groups to the next iteration. `carried` has the state that goes round: of each field where it
    begins, and what takes its place. `expected` trips are counted with, `assumed` where nobody
    said how many.
    """

    at_most: int
    when: str = ""
    expected: float = 1.0
    assumed: bool = False
    batch: int | None = None
    surplus: str = "drop"
    carried: tuple[tuple[str, str, str, str], ...] = ()

    @property
    def keeps_surplus(self) -> bool:
        """Whether rows are left over for the next iteration."""
        return self.surplus == "keep"

    @property
    def goal(self) -> float:
        """What its gates add up to before no trip follows."""
        return float(1 if self.batch is None else self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopGate(Role):
    """It says, after each trip of its loop, how much of the `goal` that has reached."""

    when: str = ""
    goal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalling(Role):
    """Rows of `keep` earlier iterations are among its own: it keeps them from run to run."""

    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing(Role):
    """What it keeps from call to call has the name `state`; others that name it share it.

    `weights` says how prompts are drawn by what it keeps.
    """

    state: str
    weights: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizing(Role):
    """It reads text with the tokenizer of the model at a path."""

    tokenizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Role):
    """It reads from the `record` of a run, a directory, what node `edge` made there.

    Tokens among it were `sampled_by` that model, whose rollouts may run `ahead` of its updates.
    """

    record: str
    edge: str
    sampled_by: str = ""
    ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling(Role):
    """It calls a function of the user's, one of its options; a `policy` may limit its calls."""

    function: Any
    policy: Any = None


ALL: tuple[type[Role], ...] = (
    *(Drawn, SamplingOptions, Drafted, Oversampled, Balanced, Paused, Resumed, Portion),
    *(PartsTogether, Scoring, AdaptersOff, Learning, Averaged),
    *(LoopEnd, LoopGate, Recalling, Sharing, Tokenizing, Recorded, Calling),
)


def roles_of(kinds: tuple[type[Role], ...], params: Options) -> tuple[Role, ...]:
    """The roles of those kinds that a node's options spell."""
    if not kinds or not params:
        return ()
    options = dict(params)
    found = (kind.read(options) for kind in kinds)
    return tuple(role for role in found if role is not None)
