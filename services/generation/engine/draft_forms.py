"""Registry of forms of drafts other than chains, all of them experiments, and what an engine asks of a form.

A form is a line of `FORMS`, a field of `EngineOptions` and a feature of the same name, and its rules in
model_support.py. The engine, the planner and the drafters import its parts by name, and know them only by the
interfaces here. A draft of a form is a sequence of tokens like any other, and of a class that its form knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Protocol

from services.generation.engine.model_support import Feature
from services.generation.engine.types import EngineOptions


class CoreForm(Protocol):
    """Part of a form in the process of the engine's core."""

    def put(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Send what the workers must know of the next step's drafts; return the tokens to schedule, by sample."""


class WorkerForm(Protocol):
    """Part of a form in a worker. For V1's runner only."""

    @property
    def pending(self) -> bool:
        """True if some drafts of the next step have this form."""

    def put(self, known: Any) -> None:
        """Take what the core's part has sent of the next step's drafts."""

    def clear(self) -> None:
        """Forget what was sent, because the next step has no drafts."""

    def lay_out(self, batch: Any, rows: Any, starts: Any, positions: Any) -> None:
        """Lay out the step that vLLM has prepared as one of chains, if it is `pending`.

        Args:
            batch: vLLM's batch.
            rows: layout by sample, with the drafts that were scheduled (`sampling.rows.Rows`).
            starts: index of each sample's first token in the step, and the number of its tokens, [n + 1].
            positions: positions of the step's tokens, which the model reads, as a tensor to be changed.
        """

    def computed(self) -> None:
        """End the step's forward pass."""

    def sample(self, logits: Any, rows: Any, *given: Any) -> Any:
        """Do as `sampling.sampler.sample`, for drafts of any form."""

    def refusal(self) -> str:
        """Return why the model, which is built by now, verifies only chains; "" if it verifies this form."""


class FormMasks(Protocol):
    """Attention of a form's steps by our kernel (attention_backend.py): a mask of what each query token sees."""

    longest: int
    """Most query tokens of a request with a mask."""
    wanted: bool
    """True if steps may need a mask, so that the kernels for them are compiled with the others."""

    @property
    def active(self) -> bool:
        """True in the forward pass of a step that needs a mask."""

    def keep(self, cache: Any, slots: Any) -> None:
        """Remember a layer's cache [blocks, heads, block, content], and the slots of the step's tokens."""

    def masked(self, step: Any) -> Any:
        """Return the attention of the whole step (an `AttentionStep`) with its mask."""

    def apart(self, step: Any) -> tuple[Any, Any]:
        """Return the indices of the tokens that need a mask, and their attention as a separate step."""


@dataclass(slots=True)
class _Process:
    masks: FormMasks | None = None


_PROCESS = _Process()


def masks_in_use() -> FormMasks | None:
    """Return the masks of this process; None if its drafts are chains. There is one engine per process."""
    return _PROCESS.masks


def use_masks(own: FormMasks | None) -> None:
    """Let our attention kernel take the masks of a form, or of none."""
    _PROCESS.masks = own


@dataclass(frozen=True, slots=True)
class DraftForm:
    """A form of drafts by the name of its feature. The other fields are places, as `module:name`.

    `core` makes a `CoreForm` of an engine core and whether it may use the form. `cpu` and `gpu` make a `WorkerForm`
    of a worker before its model is built. `trial` makes a draft from right and wrong tokens, for the check before
    serving. `modes` and `drafters` replace registered classes, by name, where an engine has the form.
    """

    name: str
    core: str
    cpu: str
    gpu: str
    trial: str
    modes: Mapping[str, str] = field(default_factory=dict)
    drafters: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Key in vLLM's additional_config that is true if drafts may have this form."""
        return f"paceline_{self.name}"

    @property
    def feature(self) -> Feature:
        """Feature that a model may not allow."""
        return Feature(self.name)

    def in_core(self, core: Any, *, allowed: bool) -> CoreForm:
        """Return the core's part; where it is not `allowed`, it cuts drafts to chains."""
        made: CoreForm = resolve_name(self.core)(core, allowed=allowed)
        return made

    def in_worker(self, worker: Any, *, cpu: bool) -> WorkerForm:
        """Return the part of a worker whose model is not built yet."""
        made: WorkerForm = resolve_name(self.cpu if cpu else self.gpu)(worker)
        return made

    def try_out(self, right: Sequence[int], wrong: Sequence[int]) -> Sequence[int]:
        """Return a draft of right tokens of a response, and wrong ones for the same places."""
        made: Sequence[int] = resolve_name(self.trial)(right, wrong)
        return made


_ENGINE, _PLANNED = "services.generation.engine.experiments", "services.generation.experiments"
FORMS = (
    DraftForm(
        "trees",
        core=f"{_ENGINE}.trees.steps:CoreTrees",
        cpu=f"{_ENGINE}.trees.steps:on_cpu",
        gpu=f"{_ENGINE}.trees.steps:on_gpu",
        trial=f"{_ENGINE}.trees.tree:tree_with_fork",
        modes={"planner": f"{_PLANNED}.trees.planning:TreeMode"},
        drafters={"suffix": f"{_PLANNED}.trees.planning:ForkingSuffixDrafter"},
    ),
)
"""Forms of drafts. An engine has one of them at most."""


def form_of(options: EngineOptions) -> DraftForm | None:
    """Return the form that an engine should verify in addition to chains."""
    return next((form for form in FORMS if getattr(options, form.name)), None)


def form_in(additional_config: Mapping[str, Any]) -> DraftForm | None:
    """Return the form by its key in vLLM's configuration."""
    return next((form for form in FORMS if additional_config.get(form.key)), None)
