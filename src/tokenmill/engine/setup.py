"""What an engine is built from, with every choice made: the same for all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)


@dataclass(frozen=True, slots=True)
class Setup:
    """The configs of one engine."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
