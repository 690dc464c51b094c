"""CUDA graphs of one rank's part of a step: pieces that end at attention and where ranks meet."""

from __future__ import annotations

import logging

import torch

from tokenmill.core.config import Setup
from tokenmill.engine.graphs.capture import CaptureLimits, capture_all
from tokenmill.engine.graphs.piecewise_graphs import (
    PiecewiseGraphs,
    most_tokens,
    piecewise_sizes,
)
from tokenmill.engine.model import KVCache, RankModel
from tokenmill.kernels.product_trials import trials

_log = logging.getLogger(__name__)


def rank_graphs(
    setup: Setup, model: RankModel, kv_cache: KVCache, num_sliding: int
) -> PiecewiseGraphs:
    """What can capture a rank's part of all steps, those that only decode among them."""
    sizes = piecewise_sizes(most_tokens(model.spec, setup.scheduler.budget), least=1)
    layers, max_len = kv_cache[: model.spec.num_layers], setup.scheduler.max_model_len
    return PiecewiseGraphs(model, layers, sizes, num_sliding, max_len, model.layout.ranks)


@torch.inference_mode()
def capture_part(
    setup: Setup, model: RankModel, kv_cache: KVCache, num_sliding: int
) -> PiecewiseGraphs:
    """The same, captured, whatever other ranks do meanwhile: nothing is done together here."""
    graphs, execution = rank_graphs(setup, model, kv_cache, num_sliding), setup.execution
    limits = CaptureLimits(execution.graph_capture_s, execution.graph_memory_bytes)
    with trials():  # each size runs once before its capture
        report = capture_all(graphs.jobs(torch.cuda.graph_pool_handle()), limits)
    torch.cuda.empty_cache()
    report.piecewise_tokens = graphs.start()
    _log.info("%s", report.describe())
    return graphs
