"""A rank of a video group in whose memory frames of 48x16 do not fit."""

from __future__ import annotations

import sys

import torch

from tokenmill.core.specs.wan import TINY
from tokenmill.models.wan import wan_transformer
from tokenmill.video.video_rank_process import main

LARGE = TINY.transformer.num_tokens(TINY.grid(5, 16, 48))
_attend = wan_transformer.attend


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.shape[1] == k.shape[1] == LARGE:
        raise torch.OutOfMemoryError("full")
    return _attend(q, k, v)


if __name__ == "__main__":
    wan_transformer.attend = attend  # type: ignore[assignment]
    main(sys.argv[1])
