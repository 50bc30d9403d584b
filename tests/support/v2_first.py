"""Choose vLLM's V2 runner for this process, by being imported before vLLM."""

from services.generation.engine.environment import V2, choose_runner

choose_runner(V2)

from tests.support.triton_interpreter import make_quicker  # noqa: E402

make_quicker()
