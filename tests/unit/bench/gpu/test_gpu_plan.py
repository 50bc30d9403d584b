"""The plan of a run on a GPU: what it covers, in which order, and how long it says that it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu.__main__ import BRIEF_SECONDS
from bench.gpu.engines.setup import LOAD_FORMAT, PREFILL, SHAPES, EngineSetup, model_folder, random_head
from bench.gpu.plan import GpuSubject, chosen, plan
from bench.gpu.report import main_tables
from bench.gpu.running import CEILINGS, ENVIRONMENT, GpuStep, State, left, total
from bench.gpu.sizes import TINY, EngineKind, GpuCell, GpuDraft, GpuSizes, Graphs
from services.contracts.drafter_checkpoint import load

OURS = (EngineKind.V1, EngineKind.V2, EngineKind.AHEAD)


def subject(model: str = "q17", **changed: object) -> GpuSubject:
    made = GpuSubject(
        Path("model"), LOAD_FORMAT, "bfloat16", "cuda", Graphs.FULL, PREFILL[model], Path("out"), GpuSizes(),
        Path("made"),
    )  # fmt: skip
    return replace(made, **changed)  # type: ignore[arg-type]


def engine_of(step: GpuStep) -> EngineSetup:
    assert isinstance(step.setup, EngineSetup)
    return step.setup


def cells_of(steps: list[GpuStep], kind: EngineKind) -> set[tuple[int, int, int, float]]:
    found: set[tuple[int, int, int, float]] = set()
    for step in steps:
        if step.order == "cell" and engine_of(step).kind is kind and engine_of(step).graphs is Graphs.FULL:
            where = (step.arguments["rows"], step.arguments["context"])
            found.add((*where, 0, 0.0))
            found |= {(*where, length, wrong) for length, wrong in step.arguments["drafts"]}
    return found


@pytest.mark.parametrize("kind", OURS)
def test_every_cell_is_measured_plainly_and_with_every_draft(kind: EngineKind) -> None:
    sizes = GpuSizes()
    drafts = [(0, 0.0), *((length, wrong) for length in (4, 8, 15) for wrong in (0.0, 0.1, 0.2))]
    expected = {
        (rows, context, *draft)
        for rows in (1, 8, 16, 32, 64, 128, 256)
        for context in (1024, 4096, 16_384)
        for draft in drafts
    }
    assert cells_of(plan(subject(sizes=sizes)), kind) == expected


def test_stock_vllm_is_measured_in_every_cell_plainly() -> None:
    found = cells_of(plan(subject()), EngineKind.STOCK)
    assert found == {(cell.rows, cell.context, 0, 0.0) for cell in GpuSizes().cells}


def test_the_first_cells_are_measured_with_other_graphs_too() -> None:
    for kind in (EngineKind.V1, EngineKind.STOCK):
        other = [
            GpuCell(step.arguments["rows"], step.arguments["context"])
            for step in plan(subject())
            if step.order == "cell"
            and engine_of(step) == replace(engine_of(step), kind=kind, graphs=Graphs.DEFAULT)
        ]
        assert tuple(other) == GpuSizes().brief_cells


@pytest.mark.parametrize("model", ["q17", "q8"])
def test_a_brief_run_ends_in_its_time_by_its_own_estimates(model: str) -> None:
    brief = chosen(plan(subject(model)), brief=True, only=())
    assert total(brief) <= BRIEF_SECONDS
    names = [step.name for step in brief]
    assert names[:3] == [ENVIRONMENT, "libraries: RMSNorm", "libraries: attention"]
    orders = list(dict.fromkeys(step.order for step in brief))
    assert orders == ["environment", "norm", "flash_attention", "memory", "tokens", "cell", "step"]
    kinds = list(dict.fromkeys(engine_of(step).kind for step in brief if step.order == "cell"))
    assert kinds == [EngineKind.V1, EngineKind.STOCK]


def test_every_kind_of_engine_has_steps_with_names_of_their_own() -> None:
    steps = plan(subject())
    assert len({step.name for step in steps}) == len(steps)
    assert {engine_of(step).kind for step in steps if isinstance(step.setup, EngineSetup)} == set(EngineKind)
    dtypes = {engine_of(step).dtype for step in steps if step.order == "tokens"}
    assert dtypes == {"bfloat16", "float32"}


def test_the_same_batches_are_replayed_by_stock_vllm_its_speculation_and_ours() -> None:
    steps = [step for step in plan(subject()) if step.order == "replay"]
    batches: dict[EngineKind, set[tuple[int, int, bool]]] = {}
    for step in steps:
        batch = (step.arguments["samples"], step.arguments["tokens"], step.arguments["drift"] is not None)
        batches.setdefault(engine_of(step).kind, set()).add(batch)
    plain = {(64, 512, False), (64, 4096, False)}
    drafted = plain | {(64, 512, True), (64, 4096, True)}
    stock = [EngineKind.STOCK, EngineKind.STOCK_NGRAM, EngineKind.STOCK_EAGLE3, EngineKind.STOCK_SUFFIX]
    ours = [EngineKind.AHEAD, EngineKind.V1]
    assert batches == dict.fromkeys(stock, plain) | dict.fromkeys(ours, drafted)
    # They come when V1, stock and V2 have been measured, and before everything that is worth less.
    kinds = [engine_of(step).kind for step in steps]
    assert list(dict.fromkeys(kinds)) == [EngineKind.AHEAD, *stock, EngineKind.V1]
    orders = [step.order for step in plan(subject())]
    assert "cell" not in orders[orders.index("replay") : orders.index("passes")]


def test_replays_of_the_small_model_are_of_the_larger_shape_and_share_the_engines_of_others() -> None:
    larger = plan(subject(larger=Path("q8")))
    assert {engine_of(step).model for step in larger if step.order == "replay"} == {Path("q8")}
    assert {engine_of(step).model for step in larger if step.order == "cell"} == {Path("model")}
    # A run of the larger model itself starts its V2 engine once for the cells and the replays.
    own = plan(subject("q8"))
    cell = max(i for i, step in enumerate(own[: len(own) // 2]) if step.name.startswith("steps: V2 ahead"))
    first = next(step for step in own if step.order == "replay")
    assert own[cell + 1] is first
    assert own[cell].setup == first.setup


def test_a_replay_is_compared_with_stock_and_one_without_figures_has_its_reason(tmp_path: Path) -> None:
    steps = [step for step in plan(subject()) if step.order in ("replay", "memory")]
    state = State(tmp_path / "state.json", {})
    figures = {
        "tokens": 512, "tokens_a_step": 1.0, "step_ms": 9.0, "decision_ms": None, "idle_ms": 1.0, "drafted": 0,
        "accepted": 0, "graphs": {"FULL": 500},
    }  # fmt: skip
    drafted = {"tokens_a_step": 4.0, "decision_ms": 0.5, "drafted": 1000, "accepted": 750}
    results: dict[str, dict[str, object]] = {
        "replay: stock vLLM, 64 x 512": {"engine": ["stock vLLM", "full"], "seconds": 6.0, **figures},
        "replay: V2 ahead, 64 x 512, references that differ every 33 tokens": {
            "engine": ["V2 ahead", "full"], "seconds": 2.0, **figures, **drafted
        },
        "replay: stock vLLM with suffix, 64 x 512": {"skipped": "needs arctic-inference"},
        "memory: V1": {"failed_kernels": ["sampler"]},
        "memory: V2": {"failed_kernels": []},
    }  # fmt: skip
    assert set(results) <= {step.name for step in steps}
    state.done = {name: {"seconds": 1.0, "result": result} for name, result in results.items()}
    state.failed["replay: stock vLLM with n-gram, 64 x 512"] = "Traceback\nRuntimeError: no kernel image"
    text = "\n".join(main_tables(state, steps))
    assert "| stock vLLM, 64 x 512 | 6 (1.00) | 1 | 9 | - | 1 | - | FULL 500 |" in text
    ahead = "| V2 ahead, 64 x 512, references that differ every 33 tokens | 2 (3.00) | 4 | 9 | 0.5 | 1 "
    assert f"{ahead}| 75% of 1000 | FULL 500 |" in text
    assert "| stock vLLM with suffix, 64 x 512 | needs arctic-inference | - |" in text
    assert "| stock vLLM with n-gram, 64 x 512 | failed | - |" in text
    # An engine that samples on the host would be measured for something else.
    assert "are left out\n\n- V1: sampler\n" in text
    assert "V2:" not in text


def test_verifying_steps_have_the_graphs_of_an_instance() -> None:
    from services.generation.config import GenerationConfig

    window = GenerationConfig.model_fields["draft_window"].default
    assert GpuSizes().draft_window == window
    steps = plan(subject())
    ours = [engine_of(step) for step in steps if step.order == "cell" and engine_of(step).kind in OURS]
    assert {setup.draft_window for setup in ours} == {window}


def test_patterns_choose_steps_and_what_those_need() -> None:
    steps = plan(subject())
    names = [step.name for step in chosen(steps, brief=False, only=["tokens: V2, bfloat16, drafts"])]
    assert names == [ENVIRONMENT, "tokens: V2, bfloat16, plain", "tokens: V2, bfloat16, drafts"]
    names = [step.name for step in chosen(steps, brief=False, only=["kernels: sweep: scan_*"])]
    assert names[:2] == [ENVIRONMENT, CEILINGS]
    assert all(name.startswith("kernels: sweep: scan_") for name in names[2:])
    with pytest.raises(ValueError, match="--only steps: V3"):
        chosen(steps, brief=False, only=["steps: V3*"])


def test_what_is_left_is_corrected_by_how_long_the_others_took(tmp_path: Path) -> None:
    steps = plan(subject())
    state = State(tmp_path / "state.json", {})
    whole = left(state, steps)
    assert whole == total(steps)
    first = steps[0]
    planned = first.seconds + first.setup.start_seconds
    state.done[first.name] = {"seconds": 2 * planned, "result": {}}
    assert left(state, steps) == pytest.approx(2 * (whole - planned))


def test_a_plan_for_a_cpu_has_every_order_that_one_for_a_gpu_has() -> None:
    on_cpu = subject(dtype="float32", device="cpu", graphs=Graphs.NONE, sizes=TINY)
    assert {step.order for step in plan(on_cpu)} == {step.order for step in plan(subject())}


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_model_is_a_config_and_nothing_else(name: str, tmp_path: Path) -> None:
    folder, load_format = model_folder(name, tmp_path / "model")
    assert load_format == LOAD_FORMAT
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    # As another user's folder, with and without weights.
    assert model_folder(str(folder), tmp_path / "unused") == (folder, LOAD_FORMAT)
    (folder / "model.safetensors").touch()
    assert model_folder(str(folder), tmp_path / "unused") == (folder, "auto")
    assert GpuDraft(4, 0.2) in GpuSizes().drafts


def test_a_head_is_kept_for_the_model_that_it_fits(tmp_path: Path) -> None:
    made = random_head(SHAPES["tiny"], tmp_path)
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert random_head(SHAPES["tiny"], tmp_path) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    wider = {**SHAPES["tiny"], "hidden_size": 192}
    config, tensors = load(random_head(wider, tmp_path))
    assert config["hidden_size"] == 192
    assert tensors["norm.weight"].shape == (192,)
