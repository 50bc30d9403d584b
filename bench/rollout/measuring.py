"""Measure a cell: a system replays a regime's part of the recorded run, on stock engines or on the platform."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from bench.comparison import Comparison, Responses
from bench.report import cores, say
from bench.rollout.cells import InstanceLoad, StepFigures
from bench.rollout.modelled import InstanceWork, StepReader, assumed_sweep, divided, modelled, passes_of
from bench.rollout.registry import StockSystem
from bench.rollout.replay import Coverage, ReplayedStep, replay
from bench.rollout.stock_engine import StockEngine, StockMeasurement, StockSample, StockSetup, StockStep
from bench.rollout.systems import KV_BYTES, System, platform_of
from bench.rollout.training import TrainedStep, Trajectory
from bench.scrape import Metrics
from examples.tinymath.curriculum import Curriculum, curriculum_of
from examples.tinymath.spans import bubble_seconds, by_instance, step_begin, step_spans
from paceline import KnobSetting, Sample, SampleKey
from services.generation.engine.step_log import LoggedStep
from services.local import Platform, PlatformConfig

Watch = Callable[[StepFigures], None]
_PLANNED = "paceline_planner_steps_total"
_MOVED = "paceline_reallocator_moved_bytes_total"


def measure(
    setup: StockSystem | System,
    trajectory: Trajectory,
    model: Path,
    instances: int,
    update_seconds: float,
    folder: Path,
    watch: Watch,
    drafter: Path | None = None,
    kv_bytes: int = KV_BYTES,
) -> tuple[StepFigures, ...]:
    """Replay the trajectory and return the figures of its steps.

    Args:
        update_seconds: time of the trainer's update, in which the platform may work. Stock engines are idle then.
        folder: folder for the platform's logs and stores.
        drafter: the EAGLE-3 head that the platform's learner begins with, if it has one.
        kv_bytes: memory of an instance for keys and values.

    Raises:
        WorkerFailed, PlatformError, PacelineError: the system failed.
    """
    tasks = curriculum_of(model)
    if isinstance(setup, StockSystem):
        return _on_stock_engines(setup, trajectory, model, tasks, instances, kv_bytes, folder, watch)
    steps = folder / "steps"
    config = replace(platform_of(setup, model, instances, folder, kv_bytes), drafter=drafter)
    options = [*config.instance_options, f"--step-log={steps.absolute()}"]
    if setup.plans_for:
        options.append(f"--assumed-step-times={assumed_sweep(setup.plans_for, folder).absolute()}")
    config = replace(config, instance_options=tuple(options))
    return _on_platform(setup, config, trajectory, tasks, update_seconds, watch, steps)


# Stock engines ------------------------------------------------------------------------------------------


def _on_stock_engines(
    system: StockSystem,
    trajectory: Trajectory,
    model: Path,
    tasks: Curriculum,
    instances: int,
    kv_bytes: int,
    folder: Path,
    watch: Watch,
) -> tuple[StepFigures, ...]:
    machine, found = cores(), list[StepFigures]()
    logs = [folder / "steps" / f"vllm-{i}.jsonl" for i in range(instances)]
    readers = [StepReader(log) for log in logs]
    with ExitStack() as stack:
        setups = [
            StockSetup(
                model, machine[i % len(machine)], kv_bytes, system, folder / "logs" / f"vllm-{i}.log", logs[i]
            )
            for i in range(instances)
        ]
        engines = [stack.enter_context(closing(StockEngine(setup))) for setup in setups]
        for engine in engines:
            engine.wait()
        push_seconds = _push(engines, trajectory.steps[0].weights)
        for place, recorded in enumerate(trajectory.steps):
            parts = _roll_out(engines, recorded, trajectory)
            push_seconds = _push(engines, trajectory.weights_after(place))
            work = [InstanceWork(reader.since()) for reader in readers]
            found.append(stock_figures(recorded, parts, push_seconds, system, work, tasks))
            watch(found[-1])
    return tuple(found)


def _push(engines: Sequence[StockEngine], folder: Path) -> float:
    began = time.monotonic()
    for engine in engines:
        engine.send(folder)
    for engine in engines:
        engine.wait()
    return time.monotonic() - began


def _roll_out(
    engines: Sequence[StockEngine], recorded: TrainedStep, trajectory: Trajectory
) -> list[StockMeasurement]:
    """Return the measurements of a step's parts; prompts are dealt to the engines in turn."""
    parts: list[list[StockSample]] = [[] for _ in engines]
    for place, group in enumerate(recorded.groups):
        for slot in range(group.samples):
            sample = recorded.samples[SampleKey(group.prompt_id, slot)]
            parts[place % len(engines)].append(
                StockSample(
                    f"{recorded.step}/{group.prompt_id}/{slot}",
                    tuple(int(each) for each in group.prompt_token_ids),
                    tuple(sample.token_ids.tolist()),
                )
            )
    options = trajectory.options
    for engine, part in zip(engines, parts, strict=True):
        engine.send(StockStep(part, options.max_tokens, options.temperature))
    return [engine.wait() for engine in engines]


def stock_figures(
    recorded: TrainedStep,
    parts: Sequence[StockMeasurement],
    push_seconds: float,
    system: StockSystem,
    work: Sequence[InstanceWork],
    tasks: Curriculum,
) -> StepFigures:
    """Return the figures of a step from its engines' measurements, in the order of their work."""
    began = min(part.began for part in parts)
    ends = [max(part.ended.values(), default=part.began) for part in parts]
    last = max((part for part in parts), key=lambda part: max(part.ended.values(), default=part.began))
    last_name = max(last.ended, key=lambda name: last.ended[name])
    responses = {_key(name): tokens for part in parts for name, tokens in part.responses.items()}
    steps = [count for part in parts for count in part.decode_steps.values()]
    idle = [max(ends) - end for end in ends]
    compared, differing = _compare(system.name, recorded, responses)
    return StepFigures(
        step=recorded.step,
        rollout_seconds=max(ends) - began,
        push_seconds=push_seconds,
        samples=len(responses),
        tokens=sum(map(len, responses.values())),
        length_max=max(map(len, responses.values())),
        decode_steps_mean=fmean(steps),
        decode_steps_max=max(steps),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        verified=sum(part.verified for part in parts),
        covered=None,
        bubble_seconds_mean=fmean(idle),
        bubble_seconds_max=max(idle),
        moved_bytes=0.0,
        reward=mean_reward(tasks, responses),
        compared=compared,
        differing=differing,
        planned={},
        last_steps=last.decode_steps[last_name],
        last_seconds=last.ended[last_name] - last.began,
        # vLLM schedules ahead on a GPU, but not with n-gram or suffix drafts.
        modelled=modelled(work, host_hidden=system.speculation is None),
        loads=tuple(
            _load(each, end - part.began)
            for each, part, end in zip(work, parts, ends, strict=True)
            if part.ended
        ),
    )


def _key(name: str) -> SampleKey:
    _, prompt_id, slot = name.split("/")
    return SampleKey(prompt_id, int(slot))


# Platform -----------------------------------------------------------------------------------------------


def _on_platform(
    system: System,
    config: PlatformConfig,
    trajectory: Trajectory,
    tasks: Curriculum,
    update_seconds: float,
    watch: Watch,
    logs: Path,
) -> tuple[StepFigures, ...]:
    steps = tuple(replace(step, update_seconds=update_seconds) for step in trajectory.steps)
    by_step, found = {step.step: step for step in steps}, list[StepFigures]()
    readers = dict[str, StepReader]()

    def take(step: ReplayedStep) -> None:
        for name in step.fleet:
            readers.setdefault(name, StepReader(logs / f"{name}.jsonl"))
        logged = {name: readers[name].since() for name in step.fleet}
        found.append(platform_figures(by_step[step.step], step, system.name, logged, tasks))
        watch(found[-1])

    with Platform(config, report=say) as platform, ExitStack() as stack:
        if system.knobs:
            with platform.client() as client:
                client.set_knobs("", KnobSetting(0, system.knobs))
        coverage = stack.enter_context(Coverage(platform)) if system.bubbles else None
        replay(platform, replace(trajectory, steps=steps), system.exactness, coverage, take)
    return tuple(found)


def platform_figures(
    recorded: TrainedStep,
    step: ReplayedStep,
    system: str,
    logged: Mapping[str, Sequence[LoggedStep]],
    tasks: Curriculum,
) -> StepFigures:
    """Return the figures of a step from its samples' provenance, the services' counters, and logged steps."""
    samples = list(step.samples.values())
    provenances = [sample.provenance for sample in samples]
    idle = bubble_seconds(step_spans(samples), step.fleet).values()
    spans, begin = by_instance(step_spans(samples)), step_begin(samples)
    work = [
        replace(
            divided(steps, spans.get(name, ()), begin), passes=passes_of(step.metrics.get(name, Metrics()))
        )
        for name, steps in logged.items()
    ]
    last = max(samples, key=_ended)
    mean_steps, most_steps = step.decode_steps
    compared, differing = _compare(system, recorded, step.responses)
    counted = step.metrics.get("reallocator")
    return StepFigures(
        step=step.step,
        rollout_seconds=step.rollout_seconds,
        push_seconds=step.push_seconds,
        samples=len(samples),
        tokens=sum(len(sample.token_ids) for sample in samples),
        length_max=max(len(sample.token_ids) for sample in samples),
        decode_steps_mean=mean_steps,
        decode_steps_max=most_steps,
        drafted=sum(each.drafted for each in provenances),
        accepted=sum(each.accepted for each in provenances),
        verified=sum(each.verify_steps for each in provenances),
        covered=sum(step.covered),
        bubble_seconds_mean=fmean(idle),
        bubble_seconds_max=max(idle),
        moved_bytes=0.0 if counted is None else counted[_MOVED],
        reward=mean_reward(tasks, step.responses),
        compared=compared,
        differing=differing,
        planned=step.fleet_metrics.labelled(_PLANNED),
        last_steps=last.provenance.decode_steps,
        last_seconds=last.provenance.queue_seconds + last.provenance.generation_seconds,
        modelled=modelled(work),
        loads=tuple(
            _load(each, max(span.end for span in own) - min(span.begin for span in own))
            for each, name in zip(work, logged, strict=True)
            if (own := spans.get(name, []))
        ),
    )


def _ended(sample: Sample) -> float:
    return max((span.end for span in sample.provenance.instance_spans), default=0.0)


# Both ---------------------------------------------------------------------------------------------------


def _load(work: InstanceWork, seconds: float) -> InstanceLoad:
    return InstanceLoad(len(work.steps), sum(step.rows for step in work.steps), seconds)


def _compare(system: str, recorded: TrainedStep, found: Responses) -> tuple[int, int]:
    comparison = Comparison()
    comparison.add(f"{system}, step {recorded.step}", recorded.responses, found)
    return comparison.compared, comparison.differing


def mean_reward(tasks: Curriculum, responses: Responses) -> float:
    """Return the mean reward of the responses to a curriculum's tasks."""
    known = {name: tasks.load(name) for name in {key.prompt_id for key in responses}}
    return fmean(known[key.prompt_id].reward(tasks.text.decode(tokens)) for key, tokens in responses.items())
