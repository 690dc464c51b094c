"""What the module of a family declares: its architectures, their config.json, names and layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenmill.core.specs.fields import Settings, fixed
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError

if TYPE_CHECKING:
    from tokenmill.models.decoder import Decoder

Shape = tuple[int, ...]

_COMMON_DEFAULTS: Settings = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": True,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SILU: Settings = {"hidden_act": "silu"}


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """The GGUF files of an architecture."""

    name: str  # their general.architecture
    windowed: Settings  # what config.json would say, too, where the file has a sliding window
    permuted: bool = False  # rows of q and k lie in llama.cpp's order: it rotates adjacent pairs


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read the config.json and the tensor names of an architecture."""

    model_type: str
    defaults: Settings  # what transformers assumes for a key that config.json leaves out
    fixed: Settings = field(default_factory=dict)  # another value would be another architecture
    only: Settings = field(default_factory=_SILU.copy)  # values that are not supported otherwise
    stored_names: Mapping[str, str] = field(default_factory=dict)  # our part of a name -> theirs
    gguf: GGUFSource | None = None
    text_field: str | None = None  # where the text model's settings stand, if not at the top
    prefixes: Mapping[str, str] = field(default_factory=dict)  # of names: theirs -> ours

    def settings(self, name: str, config: Settings) -> Settings:
        """The content of a config.json with all defaults, or an error that names the field."""
        config = self._flat(config)
        for key, value in self.only.items():
            fixed(config, key, value)
        for key, value in self.fixed.items():
            if config.get(key, value) != value:
                raise ModelLoadError(f"{key}: {name} has {value}, got {config[key]!r}")
        return _COMMON_DEFAULTS | self.defaults | self.fixed | config

    def _flat(self, config: Settings) -> Settings:
        """The text model's settings among the others; whether weights are tied stands outside."""
        if self.text_field is None:
            return config
        text = config.get(self.text_field)
        if not isinstance(text, dict):
            raise ModelLoadError(f"{self.text_field}: expected an object, got {text!r}")
        outside = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        return config | text | outside

    def our_name(self, name: str) -> str:
        for theirs, ours in self.prefixes.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


@dataclass(frozen=True, slots=True)
class Family:
    """All of a family; FAMILY at the end of its module."""

    architectures: Mapping[str, Architecture]
    read_spec: Callable[[str, Settings], ModelSpec]  # architecture, Architecture.settings()
    layer_tensors: Callable[[ModelSpec, int], dict[str, Shape]]  # of layer i: short name -> shape
    model: type[Decoder]
    outer_tensors: Callable[[ModelSpec], dict[str, Shape]] = lambda spec: {}  # of no text layer
