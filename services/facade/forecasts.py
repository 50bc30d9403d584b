"""Hints of steps that come in the order of the epoch before, for trainers that announce nothing themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

import structlog

from paceline import AsyncClient, convert
from paceline import types as t
from paceline.epoch_order import EpochOrders
from paceline.errors import PacelineError
from paceline.split import MAX_SAMPLES, runs_of
from paceline.transport import Unary
from paceline.v1 import rollout_pb2
from services.facade.metrics import FacadeMetrics
from services.platform.tasks import end

log = structlog.get_logger(__name__)


class Forecasts:
    """Looks at the samples that are asked for, and announces what is forecast. Nothing waits for it."""

    def __init__(
        self, client: Callable[[], AsyncClient], most_prompts: int, most_samples: int, metrics: FacadeMetrics
    ) -> None:
        """Remember at most `most_prompts` prompts, 0 for none, and announce at most `most_samples` of a step."""
        self._client = client
        self._orders = EpochOrders(most_prompts) if most_prompts else None
        self._most_samples = min(most_samples, MAX_SAMPLES)
        self._metrics = metrics
        self._announcing: dict[str, asyncio.Task[None]] = {}
        """The one hint of each run that is on its way."""

    def asked(self, requests: Iterable[t.SampleRequest]) -> None:
        """Note samples that are asked for, in order."""
        if self._orders is None:
            return
        missed = self._orders.missed
        for request in requests:
            hint = self._orders.ask(request)
            if hint is not None and hint.run_id not in self._announcing:
                # In the context of the request, so that the call to the gateway names its caller.
                self._announcing[hint.run_id] = asyncio.create_task(self._announce(hint))
        self._metrics.forecasts.labels("missed").inc(self._orders.missed - missed)

    def announced(self, run_id: str, step: int) -> None:
        """Note that a trainer announces a step itself: what is forecast must not replace that."""
        if self._orders is not None:
            self._orders.announced(run_id, step)

    async def close(self) -> None:
        """End the hints that are on their way."""
        await end(self._announcing.values())

    async def _announce(self, hint: t.BatchHint) -> None:
        try:
            # Some large prompts may be millions of tokens, which are not to hold up requests.
            request = await asyncio.to_thread(self._request, hint)
            answer = await self._client().call(Unary("Rollout", "HintNextBatch", request))
        except PacelineError as error:
            self._metrics.forecasts.labels("failed").inc()
            log.warning("forecast_not_announced", run=hint.run_id, step=hint.step, error=error.message)
        except Exception:
            self._metrics.forecasts.labels("failed").inc()
            log.exception("forecast_failed", run=hint.run_id, step=hint.step)
        else:
            self._metrics.forecasts.labels("announced").inc()
            log.info("forecast_announced", run=hint.run_id, step=hint.step, samples=answer.samples)
        finally:
            del self._announcing[hint.run_id]

    def _request(self, hint: t.BatchHint) -> rollout_pb2.HintNextBatchRequest:
        groups = next(runs_of(hint.groups, self._most_samples))
        return convert.hint_to_proto(replace(hint, groups=groups))
