"""Logits and greedy tokens of every family variant against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model, save
from transformers import PreTrainedModel

from tokenmill import LLM, SamplingParams
from tokenmill.core.config import CacheConfig
from tokenmill.engine.runner import allocate_kv_cache
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.models.llama import Llama
from tokenmill.models.weights import open_checkpoint
