"""Configs of flags that several commands take in the same sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenmill.core.flags import count, setting


@dataclass(frozen=True, slots=True)
class JsonOption:
    json: bool = setting(False, "Print one JSON line instead of text.")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    url: str | None = setting(None, "URL of the server (http://127.0.0.1:8000).")
    control_token: str | None = setting(
        None, "Its secret for calls that change it; that of the same user's server is found."
    )


@dataclass(frozen=True, slots=True)
class VideoModel:
    """The fields of a ModelConfig, in the words of those that make videos."""

    model: str = setting(
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "Folder or hub name of a diffusers pipeline; with --random-weights a shape: "
        "wan2.2-t2v-a14b or wan-tiny.",
    )
    dtype: Literal["auto", "fp32", "int8", "bf16", "fp8"] = setting(
        "auto", "Compute type of the experts; auto: bf16 on a GPU, else fp32."
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the engine runs.")
    share_gpus: bool = setting(
        False, "Let workers and ranks share GPUs, to try a layout; by default each has its own."
    )
    num_threads: int | None = setting(None, "CPU threads; by default all cores.", count(1, 4096))
    random_weights: bool = setting(False, "Random weights: the video is noise.")
    seed: int = setting(0, "Seed of the random weights.", count(0), flag="weights-seed")
    offload: bool = setting(
        False, "Keep the experts in host memory, and the one in use on the GPU."
    )


@dataclass(frozen=True, slots=True)
class RankBatches:
    max_batch_tokens: int = setting(
        160_000, "Rows of a batch of ranking requests: histories and candidates.", count(1)
    )
    candidate_chunk: int | None = setting(
        None, "Most candidates in the layers at a time; exact.", count(1)
    )


@dataclass(frozen=True, slots=True)
class RankTables:
    table: tuple[str, ...] = setting(
        (),
        "Table outside the model's folder: item=PATH of a file or folder; repeat the flag for "
        "user=PATH.",
        repeated=True,
    )
    cache_rows: int = setting(
        0,
        "Rows of such a table that the device caches (on a GPU a tenth; on a CPU none).",
        count(0),
    )
