"""Wan 2.2 text-to-video: diffusion transformer, UMT5 text encoder and video decoder."""
