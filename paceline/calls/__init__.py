"""Every call of a gateway, once, as coroutines over a transport; one module for each service.

`AsyncClient` makes them on an event loop. `Client` makes the same ones without a loop: see `paceline.blocking`.
"""

from paceline.calls.fleet import FleetCalls
from paceline.calls.rollouts import RolloutCalls
from paceline.calls.weights import WeightUpdateCalls


class GatewayCalls(RolloutCalls, WeightUpdateCalls, FleetCalls):
    """The calls of all services of a gateway.

    A call that finds the gateway unreachable is repeated by the retry policy; a stream continues where it was cut.
    All methods raise `PacelineError`.
    """


__all__ = ["GatewayCalls"]
