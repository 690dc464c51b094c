"""config.json of a ranking model; without torch, for clients that only need to know its ids."""

from __future__ import annotations

import json
from pathlib import Path

from tokenmill.core.specs.hstu import HstuSpec, read_hstu
from tokenmill.core.types import ModelLoadError

CONFIG = "config.json"


def read_spec(folder: Path) -> HstuSpec:
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ModelLoadError("expected an object")
        return read_hstu(settings)
    except FileNotFoundError:
        wrong_path = f"{path}: there is no such file; examples/rank_train.py writes a small model"
        raise ModelLoadError(wrong_path) from None
    except (OSError, json.JSONDecodeError, ModelLoadError) as wrong:
        raise ModelLoadError(f"{path}: {wrong}") from None
