"""SkyRL on Paceline: its trainer samples from a facade, and pushes weights by a folder.

    paceline up --model Qwen/Qwen2.5-1.5B-Instruct
    python -m paceline_server services.facade --port 8000 --model DIR --token-file runs/local/token \
        --anonymous-scopes rollouts,weights --served-model-name Qwen/Qwen2.5-1.5B-Instruct
    uv run --isolated --extra fsdp -m skyrl_on_paceline \
        trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
        trainer.placement.colocate_all=false \
        trainer.export_path=/shared/skyrl \
        generator.inference_engine.run_engines_locally=false \
        generator.inference_engine.external_proxy_url=http://127.0.0.1:8000 \
        generator.inference_engine.external_server_urls="['http://127.0.0.1:8000']" \
        data.train_data="['$HOME/data/gsm8k/train.parquet']" \
        trainer.algorithm.advantage_estimator=grpo environment.env_class=gsm8k

DIR is the folder of the model, with its tokenizer. SkyRL sends no token, so it needs this second facade, on the
trainer's own machine. `trainer.export_path` is at the same path for trainer and instances. SkyRL's own weight
transfers (NCCL, CUDA IPC, delta) return 501; this file replaces them.

Names: SkyRL 0.3.0 (commit a956457). Not run: this file and SkyRL's trainer, which need GPUs. Run: `generate`,
`detokenize` and `finish_session` of its client, replayed against a facade.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import aiohttp
import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import initialize_ray, validate_cfg


class PacelineTrainer(RayPPOTrainer):
    """SkyRL's trainer, with weights that go by a folder."""

    def init_weight_sync_state(self) -> None:
        """Do nothing: trainer and instances form no process group."""

    def build_models(self, *workers: Any) -> None:
        """Build the models, and replace the call that sends weights."""
        super().build_models(*workers)
        self.dispatch.save_weights_for_sampler = self.push

    async def push(self, model_id: str | None = None) -> None:
        """Write the policy in Hugging Face layout, and publish the folder as the next version."""
        folder = Path(self.cfg.trainer.export_path) / f"paceline-{self.global_step}"
        self.dispatch.save_hf_model("policy", str(folder), self.tokenizer)
        url = self.cfg.generator.inference_engine.external_server_urls[0]
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            await session.post(f"{url}/update_weights", json={"weight_dir": str(folder)})
        self.inference_engine_client.increment_weight_version()
        shutil.rmtree(folder)  # The instances have copies of their own.


class PacelineExperiment(BasePPOExp):
    """SkyRL's experiment, with the trainer above."""

    def get_trainer(self, **arguments: Any) -> PacelineTrainer:
        """Return the trainer."""
        return PacelineTrainer(**arguments)


@ray.remote(num_cpus=1)
def train(config: SkyRLTrainConfig) -> None:
    """Run the training off the head node."""
    PacelineExperiment(config).run()


if __name__ == "__main__":
    settings = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(settings)
    initialize_ray(settings)
    ray.get(train.remote(settings))
