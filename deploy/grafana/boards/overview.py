"""Dashboard of the platform's health and of the steps of its runs."""

from deploy.grafana.board import (
    NAMESPACES,
    NUMBER,
    PER_SECOND,
    PLATFORM,
    RELEASES,
    RUN,
    RUNS,
    SAMPLES,
    SECONDS,
    SHARE,
    TOKENS,
    TOKENS_PER_SECOND,
    TOP,
    Board,
    Chart,
    Limits,
    Query,
    Section,
    gauge,
    heat,
    largest,
    mean,
    quantiles,
    rate,
)

_G = "paceline_gateway_"
_ALERTS = 'alertname=~"Paceline.*",alertstate="firing",namespace=~"$namespace"'


def _number(
    title: str, unit: str, expr: str, meaning: str, limits: Limits | None = None, runbook: str = ""
) -> Chart:
    return Chart(title, unit, (Query(expr),), meaning, kind="stat", limits=limits, runbook=runbook)


def _of_run(title: str, unit: str, name: str, meaning: str, most: float | None = None) -> Chart:
    return Chart(title, unit, (Query(gauge(_G + name, "run", RUN, "max"), "{{run}}"),), meaning, most=most)


_WELL = Section(
    "Is all well?",
    (
        _number(
            "Critical alerts",
            NUMBER,
            f'count(ALERTS{{{_ALERTS},severity="critical"}}) or vector(0)',
            "Alerts that fire now. Each has a section in the runbook.",
            Limits(1, 1),
        ),
        _number(
            "Warnings",
            NUMBER,
            f'count(ALERTS{{{_ALERTS},severity="warning"}}) or vector(0)',
            "Alerts that fire now and can wait for the day.",
            Limits(1, 10),
        ),
        _number(
            "Leading gateways",
            NUMBER,
            f"{gauge(f'{_G}leader')} or vector(0)",
            "One. None: trainers are answered UNAVAILABLE.",
            Limits(1, 1, below=True),
            runbook="PacelineNoLeader",
        ),
        _number(
            "Instances lost",
            NUMBER,
            f"count({_G}instance_up{{{PLATFORM}}} == 0) or vector(0)",
            "Instances that died without leaving. Their samples go on elsewhere.",
            Limits(1, 2),
            runbook="PacelineInstanceDown",
        ),
        _number(
            "Services that reach Redis",
            SHARE,
            f"avg(paceline_redis_up{{{PLATFORM}}})",
            "Nothing is acknowledged or delivered by a gateway that does not.",
            Limits(1, 1, below=True),
            runbook="PacelineRedisUnreachable",
        ),
        _number(
            "Failed samples, last hour",
            SAMPLES,
            f'sum(increase({_G}samples_total{{{PLATFORM},status="failed"}}[1h])) or vector(0)',
            "Samples that were given up after repeated attempts, or for an error.",
            Limits(1, 100),
            runbook="PacelineSamplesFailing",
        ),
        Chart(
            "Alerts",
            NUMBER,
            (Query(f"max by (severity, alertname, instance, instance_id, method) (ALERTS{{{_ALERTS}}})"),),
            "What fires now. docs/runbook.md has a section of each name.",
            kind="table",
        ),
    ),
)

_NOW = Section(
    "Now",
    (
        _number(
            "Serving",
            NUMBER,
            gauge(f"{_G}instances", where=f'{PLATFORM},state="serving"'),
            "Instances that take samples.",
        ),
        _number("Policy version", NUMBER, gauge(f"{_G}policy_version", how="max"), "The published one."),
        _number("Running", SAMPLES, gauge(f"{_G}running_samples"), "Samples on instances."),
        _number("Queued", SAMPLES, gauge(f"{_G}queued_samples"), "Samples that wait for an instance."),
        _number("Tokens", TOKENS_PER_SECOND, rate(f"{_G}tokens_total"), "Response tokens of all instances."),
        _number(
            "Oldest batch",
            SECONDS,
            f"max(time() - ({_G}oldest_batch_timestamp_seconds{{{PLATFORM}}} > 0)) or vector(0)",
            "Since the oldest unfinished batch was accepted.",
            runbook="PacelineStepOverdue",
        ),
    ),
)

_PARTS = 'part:paceline_step_part_seconds:mean1h{namespace=~"$namespace"}'
_STEP_TIME = 'max by (namespace) (namespace:paceline_step_seconds:{which}{{namespace=~"$namespace"}})'
_PARTS_MEANING = (
    "queue, prefill, plain and verified engine steps, moves and between are the time of the sample that ended "
    "last; trainer and weights the time from the step before until this one."
)

_SLOW = Section(
    "Why are steps slow?",
    (
        Chart(
            "Time of a step, by part",
            SECONDS,
            (Query(f"max by (part) ({_PARTS})", "{{part}}"),),
            f"Mean of the steps of an hour. {_PARTS_MEANING} `paceline report` shows every step.",
            kind="area",
            runbook="PacelineStepsSlow",
        ),
        Chart(
            "Longer than usual, by part",
            SECONDS,
            (Query(f"max by (part) ({_PARTS} - quantile_over_time(0.5, {_PARTS}[1d]))", "{{part}}"),),
            "The same, less the median of a day: the part at the top is why steps got slower.",
        ),
        Chart(
            "Step time and the usual one",
            SECONDS,
            (
                Query(_STEP_TIME.format(which="mean1h"), "mean of an hour"),
                Query(_STEP_TIME.format(which="usual1d"), "median of a day"),
            ),
            "More than twice the usual step time for half an hour is an alert. Another run, or longer responses, "
            "change it as well.",
            runbook="PacelineStepsSlow",
        ),
    ),
)

_STEPS = Section(
    "Steps",
    (
        Chart(
            "Step time",
            SECONDS,
            (Query(mean(f"{_G}step_seconds"), "mean"), *quantiles(f"{_G}step_seconds")),
            "From the acceptance of a step's first sample to the end of its last.",
        ),
        Chart(
            "Tokens per second",
            TOKENS_PER_SECOND,
            largest(rate(f"{_G}tokens_total", "instance_id"), "{{instance_id}}"),
            "Response tokens as instances report them.",
        ),
        Chart(
            "Samples ended",
            PER_SECOND,
            (Query(rate(f"{_G}samples_total", "status"), "{{status}}"),),
            "Samples per second by how they ended. failed and aborted need an explanation.",
        ),
        Chart(
            "Samples on instances",
            SAMPLES,
            (
                Query(f"topk($top, {gauge(f'{_G}running_samples', 'instance_id')})", "{{instance_id}}"),
                Query(gauge(f"{_G}queued_samples"), "queued"),
            ),
            "Where the lines fall to nothing one after the other, instances wait for the last of them: a bubble.",
            kind="area",
        ),
        Chart(
            "Wait for an instance",
            SECONDS,
            heat(f"{_G}queue_seconds"),
            "Samples per second by their time from acceptance to placement.",
            kind="heatmap",
        ),
        Chart(
            "Response length",
            TOKENS,
            heat(f"{_G}sample_tokens"),
            "Samples per second by their length. The long tail at the top decides the step time.",
            kind="heatmap",
        ),
        Chart(
            "Bubble",
            SHARE,
            (
                Query(
                    'max by (namespace) (namespace:paceline_bubble:ratio_rate30m{namespace=~"$namespace"})',
                    "share",
                ),
            ),
            "Share of the instances' time within steps in which they had no sample of the step.",
            most=1,
        ),
        Chart(
            "Samples resumed elsewhere",
            PER_SECOND,
            (Query(rate(f"{_G}resubmissions_total", "cause"), "{{cause}}"),),
            "Samples per second that go on from their prefix on another instance.",
        ),
    ),
)

_RUNS = Section(
    "Runs",
    (
        _of_run("Step", NUMBER, "step", "The step of a run that was begun last."),
        _of_run("Mean reward", NUMBER, "reward", "As the trainer reports it."),
        _of_run(
            "KL",
            NUMBER,
            "reported_kl",
            "KL between the policy and the one that sampled, as the trainer reports it.",
        ),
        _of_run(
            "Clip fraction",
            SHARE,
            "reported_clip_fraction",
            "Share of tokens whose ratio the trainer clipped, as it reports it.",
            most=1,
        ),
    ),
)

OVERVIEW = Board(
    uid="paceline-overview",
    title="Paceline / Steps",
    meaning="Health of the platform, its steps and why they are slow, and what the trainer reports.",
    variables=(NAMESPACES, RELEASES, RUNS, TOP),
    sections=(_WELL, _NOW, _SLOW, _STEPS, _RUNS),
)
