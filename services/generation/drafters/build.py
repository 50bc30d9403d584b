"""Build the drafters of an engine by name, and keep the faults of other packages' drafters from the instance.

Verification keeps exactly the policy's tokens for any proposals, and `Speculation` checks each proposal and counts
faults. This module adds what a foreign drafter needs: it gets read-only views of the engine's tokens, its proposals
are copied, and it is not called again after some slow calls. A call that never returns is treated like a hung
device: the process ends after `step_timeout_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast, overload

import msgspec
import numpy as np
import structlog
from numpy.typing import ArrayLike, NDArray

from services.contracts.drafters import RegisteredDrafter, registered
from services.contracts.rollout import StoredRollout
from services.generation.speculation.drafter import (
    DraftContext,
    DrafterSetting,
    NewRollouts,
    Proposals,
    ProposalsByName,
    Samples,
    TokenDrafter,
)

_log = structlog.get_logger(__name__)
MAX_SLOW = 3
"""Number of slow calls after which a drafter is not called again."""
FORGIVEN = 1000
"""Number of quick calls in a row after which slow ones no longer count: a busy machine may stop for a moment."""
MAX_CARRIED = 1 << 20
"""Most bytes of a sample's state that are sent to another engine."""
P = ParamSpec("P")
T = TypeVar("T")


class GuestFault(Exception):
    """A drafter of another package broke a rule; the message says which."""


class ReadOnlyTokens(Sequence[int]):
    """Tokens that belong to the engine: they grow with each step and cannot be changed."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        """Return a token, or a copy of several."""
        return self._tokens[place]

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the tokens as a new array."""
        return np.array(self._tokens, dtype)


class GuestDrafter(TokenDrafter):
    """A drafter of another package, with the interface of any drafter."""

    def __init__(
        self, name: str, drafter: Any, most_seconds: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Wrap a drafter.

        Args:
            name: its name in the registry, which the drafter itself cannot change.
            drafter: a `TokenDrafter`.
            most_seconds: longest time of a call.
            clock: seconds.
        """
        self.name = name
        self.sequential = bool(drafter.sequential)
        self.uses_forks = bool(drafter.uses_forks)
        self._sources = {"", name, *drafter.sources}
        self._drafter = drafter
        self._most_seconds = most_seconds
        self._clock = clock
        self._slow, self._quick = 0, 0

    def begin(self, context: DraftContext) -> None:
        """Register a sample that enters the engine."""
        own = replace(
            context,
            prompt=ReadOnlyTokens(context.prompt),
            reference=ReadOnlyTokens(context.reference),
            carried={self.name: state} if (state := context.carried.get(self.name)) else {},
            forks=[_fixed(each) for each in context.forks],
        )
        self._call(self._drafter.begin, own)

    def carry(self, sample_id: str) -> bytes:
        """Return state beyond the tokens."""
        state = self._call(self._drafter.carry, sample_id)
        if type(state) is not bytes or len(state) > MAX_CARRIED:
            raise GuestFault(f"a state that is not bytes, or more than {MAX_CARRIED} of them")
        return state

    def add_rollouts(self, arrival: NewRollouts) -> None:
        """Add rollouts."""
        rollouts = [_fixed_rollout(each) for each in arrival.rollouts]
        references = {name: _fixed_rollout(each) for name, each in arrival.references.items()}
        forks = {name: [_fixed(each) for each in texts] for name, texts in arrival.forks.items()}
        self._call(self._drafter.add_rollouts, NewRollouts(rollouts, references, forks))

    def propose(self, samples: Samples, window: int, others: ProposalsByName) -> Proposals | None:
        """Return a copy of the drafter's proposals."""
        own = [
            msgspec.structs.replace(
                each,
                prompt=cast("list[int]", ReadOnlyTokens(each.prompt)),
                response=cast("list[int]", ReadOnlyTokens(each.response)),
            )
            for each in samples
        ]
        earlier: Mapping[str, Proposals] = {
            name: Proposals(_fixed(made.tokens), _fixed(made.acceptance), tuple(made.sources))
            for name, made in others.items()
        }
        return self._call(self._proposed, own, window, earlier)

    def _proposed(self, samples: Samples, window: int, others: ProposalsByName) -> Proposals | None:
        """Return a copy of the drafter's proposals; copying may run code of the drafter, too."""
        made = self._drafter.propose(samples, window, others)
        if made is None:
            return None
        if type(made) is not Proposals:
            raise GuestFault(f"{type(made).__name__} instead of proposals")
        sources = tuple(made.sources)
        if unknown := [each for each in sources if each not in self._sources]:
            raise GuestFault(f"a source {unknown[0]!r} that is not among its `sources`")
        return Proposals(np.array(made.tokens), np.array(made.acceptance), sources)

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Pass on how many tokens of a draft were accepted."""
        self._call(self._drafter.learn, sample_id, drafted, accepted)

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Release a sample that left the engine with this response."""
        self._call(self._drafter.end, sample_id, ReadOnlyTokens(response))

    def idle_work(self) -> bool:
        """Do a slice of deferred work; return True if there is more."""
        return bool(self._call(self._drafter.idle_work))

    def _call(self, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Return the function's result, and count the call if it was slow.

        Raises:
            GuestFault: calls were too slow before, or this one tried to end the process.
        """
        if self._slow >= MAX_SLOW:
            raise GuestFault(f"{self._slow} calls that took longer than {self._most_seconds} s")
        began = self._clock()
        try:
            return function(*given, **named)
        except Exception:
            raise
        except BaseException as error:
            # Such as SystemExit, which would end the engine's thread.
            raise GuestFault(repr(error)) from error
        finally:
            if self._clock() - began > self._most_seconds:
                self._slow, self._quick = self._slow + 1, 0
            elif self._slow:
                self._quick += 1
                if self._quick >= FORGIVEN:
                    self._slow = self._quick = 0


def build_guest(drafter: RegisteredDrafter, setting: DrafterSetting) -> GuestDrafter:
    """Import and build a drafter of another package, with options as the configuration has them.

    What is wrong with the package is raised as an exception, never as SystemExit or the like.
    """
    try:
        made = drafter.load()
        if not (isinstance(made, type) and issubclass(made, TokenDrafter)):
            raise TypeError(f"{drafter.place} is no subclass of TokenDrafter")
        own = made.build(replace(setting, options=made.Options.model_validate(setting.options)))
        return GuestDrafter(drafter.name, own, setting.config.drafter_seconds)
    except Exception:
        raise
    except BaseException as error:
        raise GuestFault(repr(error)) from error


def _fixed(array: ArrayLike) -> NDArray[Any]:
    """Return a read-only view of an array, or a read-only array of other tokens."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def _fixed_rollout(rollout: StoredRollout) -> StoredRollout:
    return replace(rollout, tokens=_fixed(rollout.tokens), logprobs=_fixed(rollout.logprobs))


def build_drafters(
    names: Iterable[str],
    setting: DrafterSetting,
    left_out: Callable[[str], None],
    places: Mapping[str, str] = MappingProxyType({}),
) -> list[TokenDrafter]:
    """Return the drafters of these names, which are registered; building some of them imports numba.

    A drafter of another package that cannot be built is left out: the fault is logged, and `left_out` is called
    with its name. Faults of other drafters are raised. `places` replaces the registered class of some drafters.
    """
    known, found = registered(), list[TokenDrafter]()
    for name in names:
        drafter = known[name]
        if name in places:
            drafter = replace(drafter, place=places[name])
        try:
            found.append(_built(drafter, setting))
        except Exception as error:
            if drafter.own:
                raise
            _log.error("drafter_left_out", drafter=name, place=drafter.place, fault=repr(error))
            left_out(name)
    return found


def _built(drafter: RegisteredDrafter, setting: DrafterSetting) -> TokenDrafter:
    setting = replace(setting, options=setting.config.drafter_options.get(drafter.name, {}))
    if not drafter.own:
        return build_guest(drafter, setting)
    made: type[TokenDrafter] = drafter.load()
    return made.build(replace(setting, options=made.Options.model_validate(setting.options)))
