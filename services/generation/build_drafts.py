"""Build the drafts of an instance's samples: cache, drafters and planner, as its configuration names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from services.contracts.knobs import Knobs
from services.generation.config import GenerationConfig
from services.generation.drafters.draft_model.drafter import DraftModelDrafter
from services.generation.drafters.reference import alignment
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.drafters.reference.lenient_reuse import Reuse
from services.generation.drafters.suffix.drafter import SuffixDrafter
from services.generation.engine.model_support import Feature
from services.generation.engine.types import QUANTIZED
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.rollouts.cache import DraftCache
from services.generation.speculation.acceptance import table as acceptance
from services.generation.speculation.active_knobs import OriginOf
from services.generation.speculation.drafter import TokenDrafter
from services.generation.speculation.knob_driven_planner import KnobDrivenPlanner
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.selection import selection
from services.generation.speculation.speculation import Speculation
from services.step_time.estimator import StepTimeEstimator
from services.step_time.estimator import warm_up as warm_up_estimator
from services.step_time.prior import MeasuredStep
from services.step_time.saved_sweep import SavedSweep, SweepSubject

_log = structlog.get_logger(__name__)


def build_drafts(
    config: GenerationConfig, engine: Any, metrics: EngineMetrics, origin_of: OriginOf
) -> SampleDrafts:
    """Build the drafts of an engine's samples: the cache, and the drafters and planner that the config names."""
    cache = DraftCache(engine.limits.vocab_size, config.draft_cache_bytes)
    # Without drafts a sample takes over a cached rollout one token a step.
    reuse = Reuse(config.reuse_chunk if engine.support.allows(Feature.DRAFTS) else 0)
    return SampleDrafts(metrics, cache, _speculation(config, engine, metrics, origin_of), reuse)


def _speculation(
    config: GenerationConfig, engine: Any, metrics: EngineMetrics, origin_of: OriginOf
) -> Speculation | None:
    if config.speculation == "off" or not engine.support.allows(Feature.DRAFTS):
        return None
    branches = config.max_branches if engine.trees else 0
    makers: dict[str, Callable[[], TokenDrafter]] = {
        "reference": lambda: _reference_drafter(metrics),
        "suffix": lambda: _suffix_drafter(config, metrics, branches),
    }
    # These import numba, which vLLM must come before.
    acceptance.warm_up()
    selection.warm_up(branches > 0)
    warm_up_estimator()
    knobs = Knobs(mode=config.speculation, draft_cap=config.draft_window, margin=config.draft_margin)
    fixed = FixedLengthPlanner(config.draft_window, config.draft_floor, config.survival_floor)
    assumed = config.assumed_step_times
    swept = _swept(config, engine) if assumed is None else SavedSweep.read(assumed).steps
    planner = KnobDrivenPlanner(
        knobs,
        StepTimeEstimator(swept),
        origin_of,
        fixed=fixed,
        metrics=metrics.planner,
        graphs=engine.graph_sizes,
        learns=assumed is None,
    )
    drafters: list[TokenDrafter] = [makers[name]() for name in config.drafters]
    drafters += [
        DraftModelDrafter(
            model, planner, metrics=metrics.quantized if model.name == QUANTIZED else metrics.eagle3
        )
        for model in engine.model_drafts.values()
    ]
    return Speculation(drafters, planner, engine.limits.vocab_size, metrics, late=config.steps_ahead)


def _swept(config: GenerationConfig, engine: Any) -> Sequence[MeasuredStep]:
    """Return the saved sweep of this engine, or measure one; nothing if step times are learned as they come."""
    if config.calibration is not None:
        size, dtype = config.tensor_parallel_size, engine.dtype
        subject = SweepSubject.of(Path(config.model), engine.hardware, size, dtype)
        if (saved := SavedSweep.load(config.calibration, subject)) is not None:
            return saved.steps
        _log.warning("no_saved_sweep", path=str(config.calibration), subject=subject.model_dump())
    if not config.sweep_seconds:
        return ()
    from services.generation.engine.sweep import measure_steps

    try:
        return measure_steps(engine, config.sweep_seconds)
    except Exception:
        # An engine that cannot serve says so with its first sample; one that can learns step times as they come.
        _log.exception("sweep_failed")
        return ()


def _reference_drafter(metrics: EngineMetrics) -> TokenDrafter:
    # Imports numba, which vLLM must come before.
    alignment.warm_up()
    return ReferenceDrafter(metrics.drafts.forks_taken.inc)


def _suffix_drafter(config: GenerationConfig, metrics: EngineMetrics, branches: int) -> TokenDrafter:
    # Imports numba, which vLLM must come before.
    from kernels.suffix_index import SuffixIndex, warm_up

    warm_up(branches)
    index = SuffixIndex(max_tokens=config.draft_index_tokens, floor=config.survival_floor)
    return SuffixDrafter(
        index,
        capacity=config.draft_index_tokens,
        branches=branches,
        tokens_per_step=config.draft_index_step_tokens,
        metrics=metrics.rollouts,
    )
