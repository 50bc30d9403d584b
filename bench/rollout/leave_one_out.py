"""Systems with all mechanisms but one, for the rows that tell what each of them brings. Pure."""

from __future__ import annotations

from dataclasses import replace

from bench.systems import System


def each_left_out(everything: System) -> tuple[System, ...]:
    """Return the system without each of its mechanisms in turn; names begin with `without`."""

    def without(mechanism: str, about: str, **changes: object) -> System:
        return replace(everything, name=f"without {mechanism}", about=about, **changes)  # type: ignore[arg-type]

    options = everything.instance_options
    return (
        without(
            "pre-generation", "nothing is generated ahead; drafts come from earlier steps", bubbles=False
        ),
        without(
            "forks",
            "what is generated ahead has no forks at near-ties",
            instance_options=(*options, "--forks=0"),
        ),
        without(
            "history",
            "drafts come from what was pre-generated for the step, and from the step itself",
            gateway_options=(*everything.gateway_options, "--no-history"),
        ),
        without(
            "suffix index",
            "drafts of a sample are the cached rollout of its own seed only",
            instance_options=(*options, "--drafters=reference"),
        ),
        without(
            "references",
            "drafts come from the suffix index only, not from the cached rollout of the sample's own seed",
            instance_options=(*options, "--drafters=suffix"),
        ),
        without(
            "planner",
            "every draft is verified at its full length: the mode is fixed",
            instance_options=(
                *(each for each in options if "--speculation" not in each),
                "--speculation=fixed",
            ),
        ),
        without("reallocator", "samples stay where they began", reallocator=False),
        without("policy service", "no service sets knobs or watches the fleet", policy=False),
    )
