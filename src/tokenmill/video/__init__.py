"""The video engine: jobs in, denoising steps, frames out."""
