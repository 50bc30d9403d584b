"""Local platform: all services as processes of one machine, for laptops, tests and benchmarks."""

from services.local.config import PlatformConfig
from services.local.platform import Platform, PlatformError

__all__ = ["Platform", "PlatformConfig", "PlatformError"]
