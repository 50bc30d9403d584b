"""Dashboard of use, saturation and errors of generation instances, and of the GPUs below them."""

from deploy.grafana.board import (
    BYTES,
    INSTANCE,
    INSTANCES,
    NAMESPACES,
    NUMBER,
    PER_SECOND,
    RELEASES,
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
    each_instance,
    gauge,
    heat,
    largest,
    mean,
    quantile,
    rate,
    ratio,
)

_G = "paceline_generation_"
_D = "paceline_drafts_"
_GPU = 'namespace=~"$namespace",pod=~"$instance"'
"""Selector of the metrics of dcgm-exporter on the pods' GPUs, scraped with honorLabels."""


def _rate(name: str, by: str = "instance") -> str:
    return rate(name, by, INSTANCE)


_OF_INSTANCES = f"and on (instance) {gauge(f'{_G}policy_version', 'instance', INSTANCE)}"
"""Leaves out other services, whose processes have the same metrics."""
_ALONE = rate(f"{_G}background_seconds_total", "instance", f'{INSTANCE},beside="nothing"')


def _gpu(expr: str) -> tuple[Query, ...]:
    return largest(expr, "{{pod}} GPU {{gpu}}")


def _of_gpu(metric: str, how: str = "max") -> str:
    return gauge(f"DCGM_FI_{metric}", "pod, gpu", _GPU, how)


_WORK = Section(
    "Work",
    (
        Chart(
            "Tokens per second",
            TOKENS_PER_SECOND,
            each_instance(_rate(f"{_G}tokens_total")),
            "Response tokens of the steps' samples. Without pre-generation.",
        ),
        Chart(
            "Engine steps per second",
            PER_SECOND,
            each_instance(_rate(f"{_G}step_seconds_count")),
            "A step is one forward pass of the model for all running samples.",
        ),
        Chart(
            "Engine step time of all instances",
            SECONDS,
            heat(f"{_G}step_seconds", INSTANCE),
            "Steps per second by their time. Two bands are often plain and verifying steps.",
            kind="heatmap",
        ),
        Chart(
            "Engine step time, p95",
            SECONDS,
            each_instance(quantile(0.95, f"{_G}step_seconds", "instance", INSTANCE)),
            "An instance far above the median of all is a straggler: look at its GPU's clock.",
        ),
        Chart(
            "Time in engine steps",
            SHARE,
            (
                *each_instance(_rate(f"{_G}step_seconds_sum"), "samples of the step"),
                Query(f"quantile(0.5, {_ALONE})", "pre-generation, median of all"),
            ),
            "With samples of the step, and with pre-generation alone. What is missing to 100 % is idle time.",
            most=1,
        ),
        Chart(
            "Tokens per engine step",
            TOKENS,
            each_instance(ratio(f"{_G}tokens_total", f"{_G}step_seconds_count", "instance", INSTANCE)),
            "Rises with the samples that run together and with accepted drafts.",
        ),
    ),
)

_ROOM = Section(
    "Room",
    (
        Chart(
            "Samples running",
            SAMPLES,
            (
                *each_instance(gauge(f"{_G}running_samples", "instance", INSTANCE)),
                Query(f"max({gauge(f'{_G}max_running_samples', 'instance', INSTANCE)})", "at most"),
            ),
            "Samples in the engine's batch, and the largest limit of any instance (max_num_seqs).",
        ),
        Chart(
            "Samples waiting",
            SAMPLES,
            each_instance(gauge(f"{_G}waiting_samples", "instance", INSTANCE)),
            "Samples that the engine has and does not run, mostly because KV is full.",
        ),
        Chart(
            "KV in use",
            SHARE,
            each_instance(gauge(f"{_G}kv_usage_ratio", "instance", INSTANCE)),
            "Blocks of the KV cache in use. Full, with samples waiting, the engine preempts.",
            limits=Limits(0.9, 0.98),
            most=1,
            runbook="PacelineKvSaturated",
        ),
        Chart(
            "Samples preempted",
            PER_SECOND,
            each_instance(_rate(f"{_G}preemptions_total")),
            "Samples that lost their KV and compute it again: KV was full, or weights were updated in flight.",
            runbook="PacelineKvSaturated",
        ),
        Chart(
            "Prefix cache",
            SHARE,
            each_instance(
                ratio(f"{_G}cached_context_tokens_total", f"{_G}context_tokens_total", "instance", INSTANCE)
            ),
            "Tokens of prompts and resumed responses whose KV was there. Samples of a group share their prompt's.",
            most=1,
        ),
        Chart(
            "Processor cores in use",
            NUMBER,
            each_instance(f"{_rate('process_cpu_seconds_total')} {_OF_INSTANCES}"),
            "Cores that the process is busy on. With a GPU the engine's thread alone should need less than one.",
        ),
        Chart(
            "Memory",
            BYTES,
            each_instance(f"{gauge('process_resident_memory_bytes', 'instance', INSTANCE)} {_OF_INSTANCES}"),
            "Resident memory of the process, staged weights and rollouts for drafts included.",
        ),
    ),
)

_WEIGHTS = Section(
    "Weights",
    (
        Chart(
            "Policy version",
            NUMBER,
            (
                Query(f"max({gauge(f'{_G}policy_version', 'instance', INSTANCE, 'max')})", "newest"),
                Query(f"min({gauge(f'{_G}policy_version', 'instance', INSTANCE, 'max')})", "oldest"),
            ),
            "Versions that instances serve. One that stays behind after an update gets no samples.",
            runbook="PacelinePolicyVersionSkew",
        ),
        Chart(
            "Time to stage and apply weights",
            SECONDS,
            (*largest(mean(f"{_G}weight_seconds", "phase, instance", INSTANCE), "{{phase}} {{instance}}"),),
            "Staging fetches and checks a version while samples run; applying is a pause.",
        ),
    ),
)

_DRAFTS = Section(
    "Rollouts that drafts come from",
    (
        Chart(
            "Fetch from the draft store",
            SECONDS,
            heat(f"{_D}fetch_seconds", INSTANCE),
            "Fetches per second by their time. Only samples of lenient batches wait for them.",
            kind="heatmap",
        ),
        Chart(
            "Failed fetches",
            PER_SECOND,
            each_instance(_rate(f"{_D}fetch_failures_total")),
            "Fetches that a store did not answer. Samples go on with fewer drafts.",
        ),
        Chart(
            "Tokens fetched",
            TOKENS_PER_SECOND,
            each_instance(_rate(f"{_D}fetched_tokens_total")),
            "Tokens of earlier rollouts that came from the stores.",
        ),
        Chart(
            "Rollouts in memory",
            BYTES,
            each_instance(gauge(f"{_D}cache_bytes", "instance", INSTANCE)),
            "Memory of the rollouts that an instance keeps, within a budget of its own.",
        ),
        Chart(
            "Time in the suffix index",
            SHARE,
            largest(_rate(f"{_D}index_seconds_total", "phase, instance"), "{{phase}} {{instance}}"),
            "Share of time for putting rollouts in and for following running samples.",
            most=1,
        ),
        Chart(
            "Tokens without room in the suffix index",
            TOKENS_PER_SECOND,
            largest(_rate(f"{_D}index_refused_tokens_total", "text, instance"), "{{text}} {{instance}}"),
            "Samples without room get no drafts from other texts: raise draft_index_tokens.",
            runbook="PacelineDraftsDriedUp",
        ),
    ),
)

_GPUS = Section(
    "GPUs (needs dcgm-exporter, scraped with honorLabels)",
    (
        Chart(
            "GPU busy",
            "percent",
            _gpu(_of_gpu("DEV_GPU_UTIL")),
            "Share of time in which some kernel ran. It says nothing of how well the kernel used the GPU.",
            most=100,
        ),
        Chart(
            "Tensor cores busy",
            SHARE,
            _gpu(_of_gpu("PROF_PIPE_TENSOR_ACTIVE")),
            "Low while small batches are decoded, which memory bounds. Verified drafts raise it.",
            most=1,
        ),
        Chart(
            "Memory of the GPU in use",
            SHARE,
            _gpu(f"{_of_gpu('DEV_FB_USED')} / ({_of_gpu('DEV_FB_USED')} + {_of_gpu('DEV_FB_FREE')})"),
            "vLLM takes its share at the start, so changes are of others: a trainer on the same card, or graphs.",
            most=1,
        ),
        Chart(
            "Clock of the multiprocessors",
            "hertz",
            _gpu(f"1e6 * {_of_gpu('DEV_SM_CLOCK', 'min')}"),
            "A card below the median of all is throttled by heat or power, and its instance a straggler.",
        ),
        Chart("Power", "watt", _gpu(_of_gpu("DEV_POWER_USAGE")), "Follows the work."),
        Chart(
            "Latest Xid error",
            NUMBER,
            _gpu(_of_gpu("DEV_XID_ERRORS")),
            "0: none. Others are in NVIDIA's list; 48, 63, 64, 74, 79, 94 and 95 call for another GPU.",
            limits=Limits(1, 48),
        ),
    ),
)

INSTANCE_BOARD = Board(
    uid="paceline-instances",
    title="Paceline / Instances",
    meaning="What each generation instance does, and how near it is to what it can.",
    variables=(NAMESPACES, RELEASES, INSTANCES, TOP),
    sections=(_WORK, _ROOM, _WEIGHTS, _DRAFTS, _GPUS),
)
