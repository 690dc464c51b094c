"""Small pictures of a video: of its middle frame, or of its latents while it is being made."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.core.tasks import VideoFrames
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_files import png_file

_WIDTH = 320  # pixels at most


def frame_picture(video: VideoFrames) -> bytes:
    """The middle frame as a PNG file; of large ones every n-th pixel."""
    stride = -(-video.width // _WIDTH)
    frame = np.frombuffer(video.frame(video.num_frames // 2), np.uint8)
    small = frame.reshape(video.height, video.width, 3)[::stride, ::stride]
    return png_file(small.shape[1], small.shape[0], small.tobytes())


def latents_picture(engine: VideoEngine) -> bytes:
    """The latents of the job that runs as a PNG file, or nothing.

    Red, green and blue are the first three channels of the middle latent frame, each stretched to
    its own range: shapes and motion blur can be seen, colours mean nothing.
    """
    latents = None if engine.running is None else engine.running.latents
    if latents is None:
        return b""
    channels = latents[:3, latents.shape[1] // 2].detach().float().cpu()
    low, high = channels.amin((1, 2), keepdim=True), channels.amax((1, 2), keepdim=True)
    pixels = ((channels - low) / (high - low).clamp_min(1e-6) * 255.0).round().to(torch.uint8)
    rgb = pixels.permute(1, 2, 0).contiguous().numpy()
    return png_file(rgb.shape[1], rgb.shape[0], rgb.tobytes())
