"""The whole platform on one machine, as processes: for laptops, tests and benchmarks."""

from services.local.config import PlatformConfig
from services.local.platform import Platform, PlatformError

__all__ = ["Platform", "PlatformConfig", "PlatformError"]
