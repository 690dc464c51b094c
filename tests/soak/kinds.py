"""The calls of a soak, of each kind of server; a quarter of them is abandoned."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from soak.soaked import Call, Soaked
from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.ranking.model_files import save_model
from vision.pictures import data_url, file_of, photo

THREADS = ("--num-threads", "1")
SMALL = ("--max-model-len", "512", "--kv-cache-memory", "8MiB")
PICTURES = [data_url(file_of(photo(40, 33, seed), "PNG")) for seed in range(8)]
ABANDONED = 0.25
MODEL = "qwen3-vl-tiny"


def leaving(source: random.Random) -> int | None:
    """After how many bytes of the answer the client leaves; None: it stays."""
    return source.choice((0, 1, 600)) if source.random() < ABANDONED else None


def chat(content: Any, source: random.Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    stops = {"stop": ["zz", "yx"]} if source.random() < 0.3 else {}
    stream = source.random() < 0.7
    return {"messages": messages, "max_tokens": 6, "stream": stream, "temperature": 1.0, **stops}


def language(server: Soaked, source: random.Random) -> None:
    text = f"{source.random()} and so on"
    match source.randrange(6):
        case 0:
            server.call(
                "/v1/responses",
                {"input": text, "max_output_tokens": 6, "store": False},
                leaving(source),
            )
        case 1:
            call = chat(text, source) | {"model": MODEL, "stream": False}
            call.pop("stop", None)
            server.call("/v1/messages", call, leaving(source))
        case 2:
            server.call("/tokenize", {"prompt": text}, leaving(source))
        case 3:
            call = {"prompt": text, "max_tokens": 4, "guided_regex": "[0-9]{3}"}
            server.call("/v1/completions", call, leaving(source))
        case _:
            server.call("/v1/chat/completions", chat(text, source), leaving(source))


def images(server: Soaked, source: random.Random) -> None:
    picture = {"type": "image_url", "image_url": {"url": source.choice(PICTURES)}}
    text = {"type": "text", "text": f"{source.random()}"}
    server.call("/v1/chat/completions", chat([picture, text], source), leaving(source))


VIDEO = {"prompt": "a fox", "size": "32x16", "num_frames": 5, "num_inference_steps": 2}


def videos(server: Soaked, source: random.Random) -> None:
    if source.random() < 0.5:
        server.call("/v1/videos/generations", VIDEO, leaving(source))
        return
    made = json.loads(server.call("/v1/videos", VIDEO))
    while source.random() > ABANDONED:  # who stays asks again and again
        state = json.loads(server.call(f"/v1/videos/{made['id']}", None))["status"]
        if state in ("completed", "failed"):
            assert state == "completed", state
            server.call(f"/v1/videos/{made['id']}/content", None, leaving(source))
            break
    server.delete(f"/v1/videos/{made['id']}")


def forget_videos(server: Soaked) -> None:
    """Delete what calls have stored that nobody deleted, once no job runs any more."""
    while listed := json.loads(server.call("/v1/videos?limit=100", None))["data"]:
        for video in listed:
            if video["status"] in ("completed", "failed"):
                server.delete(f"/v1/videos/{video['id']}")


def ranking(server: Soaked, source: random.Random) -> None:
    request = tiny_request(source.randrange(1, 30), source.randrange(1, 9), TINY, 1)
    user = {
        "user_id": request.user_id,
        "history": {
            "item_ids": request.item_ids.tolist(),
            "category_ids": request.category_ids.tolist(),
            "actions": request.actions.tolist(),
        },
        "candidates": {
            "item_ids": request.candidate_ids.tolist(),
            "category_ids": request.candidate_category_ids.tolist(),
        },
    }
    server.call("/v1/rank", {"users": [user]}, leaving(source))


CALLS: dict[str, Call] = {
    "language": language,
    "images": images,
    "video": videos,
    "ranking": ranking,
}


def arguments(kind: str, folder: Path) -> list[str]:
    """What `tokenmill serve` is given for a kind."""
    match kind:
        case "video":
            videos = ("--video-dir", str(folder / "tmp" / "videos"))
            return ["wan-tiny", "--random-weights", "--task", "video", *THREADS, *videos]
        case "ranking":
            save_model(tiny_model(TINY), folder / "model")
            return [str(folder / "model"), "--task", "rank", *THREADS]
        case _:
            return [MODEL, "--random-weights", *THREADS, *SMALL]


def forget(kind: str, server: Soaked) -> None:
    """Remove what is kept on purpose."""
    if kind == "video":
        forget_videos(server)
