"""Interface of a drafter: anything that can propose the next tokens of a sample.

Under coupled sampling verification keeps exactly the tokens that the policy samples anyway, whatever was proposed.
A drafter therefore cannot break correctness; it only has to predict well how likely its tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict

from services.contracts.rollout import StoredRollout
from services.generation.engine.types import EngineSampleState
from services.platform.observability.metrics import MetricSet

if TYPE_CHECKING:
    from services.generation.config import GenerationConfig
    from services.generation.engine.draft_models.interface import DraftModelClient
    from services.generation.speculation.plan import LengthChooser


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Description of a sample when it enters the engine.

    `reference` is a position-aligned guess of the whole response, empty if there is none, and `source` its origin:
    reference (given by the caller), pregenerated or history. `forks` are other guesses of the whole response, for
    where it leaves the reference. For drafters that keep history, run and prompt id name the prompt, and seed and
    policy version name the sample among the samples of the prompt; without a run the sample is known by its id
    only. `carried` is the state of the drafters of its last engine, by drafter (see `TokenDrafter.carry`).
    """

    sample_id: str
    prompt: Sequence[int]
    reference: Sequence[int] = ()
    prompt_id: str = ""
    run_id: str = ""
    seed: int = 0
    version: int = 0
    source: str = "reference"
    carried: Mapping[str, bytes] = field(default_factory=dict)
    forks: Sequence[ArrayLike] = ()


@dataclass(frozen=True, slots=True)
class NewRollouts:
    """Rollouts that arrived between two steps, and new references and forks of samples, by sample id."""

    rollouts: Sequence[StoredRollout] = ()
    references: Mapping[str, StoredRollout] = field(default_factory=dict)
    forks: Mapping[str, Sequence[ArrayLike]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens [k] for one sample, and the probability of each [k] to be accepted if all before it are.

    `source` names their origin in results and metrics; if empty, the drafter's name does.
    """

    tokens: Sequence[int]
    acceptance: Sequence[float]
    source: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Proposals:
    """Proposals of one drafter for the n samples of a step, of at most w tokens each.

    tokens [n, w] are integers; acceptance [n, w] float64 is the probability that a token is accepted if all before
    it are. The first 0 ends a proposal: tokens from there on do not count. sources [n] name the origins in results
    and metrics; an empty one, or none at all, stands for the drafter's name.
    """

    tokens: NDArray[np.int32]
    acceptance: NDArray[np.float64]
    sources: Sequence[str] = ()

    @classmethod
    def of(cls, made: Sequence[Proposal | None]) -> Self:
        """Return the arrays of one proposal per sample, None where there is none."""
        width = max((len(each.tokens) for each in made if each is not None), default=0)
        tokens, acceptance = np.zeros((len(made), width), np.int32), np.zeros((len(made), width))
        for i, each in enumerate(made):
            if each is not None:
                tokens[i, : len(each.tokens)] = each.tokens
                acceptance[i, : len(each.tokens)] = each.acceptance
        return cls(tokens, acceptance, ["" if each is None else each.source for each in made])

    def only(self, wanted: Sequence[bool]) -> Self:
        """Return the proposals for the wanted samples [n] and none for the others."""
        return replace(self, acceptance=self.acceptance * np.asarray(wanted)[:, None])

    def check(self, samples: int, vocab_size: int) -> None:
        """Raise ValueError if a subclass has more than tokens for `samples` samples, and that is not valid."""


Samples = Sequence[EngineSampleState]
"""Samples of a step."""
ProposalsByName = Mapping[str, Proposals]
"""Proposals for the samples of a step, by drafter."""


class DrafterOptions(BaseModel):
    """Base class of the options of a drafter; an unknown option is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def ignore_lack(samples: int) -> None:
    """Do nothing with the number of samples that a drafter had no room for."""


@dataclass(frozen=True, slots=True)
class DrafterSetting:
    """Arguments that a drafter is built from.

    `options` is of the drafter's class `Options`. A proposal has at most `config.draft_window` tokens.
    `draft_models` are the models in the engine by name, and `worth` says how much is worth drafting with one of
    them. A drafter calls `lacked` while it proposes for a step, with the number of the step's samples that it has
    no room for.
    """

    config: GenerationConfig
    options: Any
    vocab_size: int
    registry: CollectorRegistry
    draft_models: Mapping[str, DraftModelClient]
    worth: LengthChooser
    lacked: Callable[[int], None] = ignore_lack


class TokenDrafter:
    """Interface of a source of draft tokens, called from the engine thread only.

    A subclass is registered by name, in services/contracts/drafters.py or as an entry point. Each sample is begun,
    proposed for and verified any number of times, and ended; `add_rollouts` and `idle_work` are called at any time
    between two steps. Methods that a drafter does not need do nothing. A drafter that raises or makes invalid
    proposals is left out of that step, and after some such steps it is switched off.
    """

    name: str
    """Name in the registry."""
    sources: ClassVar[tuple[str, ...]] = ()
    """Other names that its drafts have in results and metrics (see `Proposal.source`)."""
    Options: ClassVar[type[BaseModel]] = DrafterOptions
    """Class of its options, which the setting `drafter_options` has by drafter."""
    Metrics: ClassVar[type[MetricSet] | None] = None
    """Class of its metrics, if it has any; `build` makes them in `DrafterSetting.registry`."""
    uses_forks = False
    """True if it proposes from forks (`DraftContext.forks`); else pre-generation makes none for it."""
    sequential = False
    """True if tokens cost the drafter time, so that it is queried after the others and gets their proposals."""

    @classmethod
    def build(cls, setting: DrafterSetting) -> Self:
        """Return a drafter for an engine; it is built once, before the first sample."""
        return cls()

    def begin(self, context: DraftContext) -> None:
        """Register a sample that enters the engine."""

    def carry(self, sample_id: str) -> bytes:
        """Return state beyond the tokens, if any; `begin` gets it as `DraftContext.carried` on another engine."""
        return b""

    def add_rollouts(self, arrival: NewRollouts) -> None:
        """Add rollouts; running samples may be anywhere in their responses."""

    def propose(self, samples: Samples, window: int, others: ProposalsByName) -> Proposals | None:
        """Return proposals for the samples, in their order; None if there are none.

        Args:
            samples: of the next step.
            window: most tokens of a proposal.
            others: proposals of the drafters that were queried before, by name.
        """
        raise NotImplementedError

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Learn that `accepted` of the `drafted` tokens were accepted for this sample in the last step."""

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Release a sample that left the engine with this response."""

    def idle_work(self) -> bool:
        """Do a slice of deferred work while the engine idles; return True if there is more."""
        return False
