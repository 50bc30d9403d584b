"""Options of the learner's benchmark."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from bench.learner.following import FOLLOWERS
from bench.report import cores
from examples.tinymath.train import MODEL
from services.drafter.learning.data import LearningSettings

RUN = ("model", "steps", "prompts", "samples", "pool", "max_tokens", "lr", "instances")
FIRST = ("model", "samples", "max_tokens", "warm_up_prompts")
HEAD = ("warm_up_seconds", "depth", "layers", "batch_tokens", "acceptance_share")
FOLLOWING = ("drafter_lr", "evaluated", "learned", "top_k")


def name_of(model: Path) -> str:
    """Return the name of a model in figures."""
    return "tinymath" if model.absolute() == MODEL.absolute() else model.name


def key_of(given: argparse.Namespace, names: tuple[str, ...]) -> str:
    """Return a short name of the values of some options."""
    return hashlib.sha256(json.dumps([str(getattr(given, name)) for name in names]).encode()).hexdigest()[:8]


def read(about: str) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a model of tinymath")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1, help="recorded runs, each of a seed of its own")
    parser.add_argument("--minutes", type=float, default=1e6, help="after which no follower is begun")
    parser.add_argument("--cpu-rounds", type=int, default=1, help="of decoding on this machine; 0: without")
    parser.add_argument("--live-steps", type=int, default=20, help="of the run on drafts; 0: without it")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--pool", type=int, default=48, help="problems in all; each epoch goes through them")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--lr", type=float, default=5e-4, help="of the recorded run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(cores()), help="of the trainer and of the warm-up")
    parser.add_argument("--warm-up-prompts", type=int, default=64)
    parser.add_argument("--warm-up-seconds", type=float, default=90.0)
    names = [each.name for each in FOLLOWERS]
    parser.add_argument("--followers", nargs="+", choices=names, default=names[:-1])
    parser.add_argument(
        "--evaluated", type=int, default=24, help="samples of a step that drafts are measured on"
    )
    parser.add_argument("--learned", type=int, default=32, help="samples of an update")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 5])
    parser.add_argument(
        "--drafter-lr", type=float, default=1.5e-3, help="of following; the warm-up has the learner's own"
    )
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--acceptance-share", type=float, default=LearningSettings().acceptance_share)
    parser.add_argument("--top-k", type=int, default=5)
    return parser.parse_args()
