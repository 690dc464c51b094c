"""MTP modules for tiny models that are right often, without training.

The projection passes the embedding of the newest token on, and the layer adds little: the guess is
what the model would say after that token alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.models import spec_of
from tokenmill.models.names import mtp_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUTS = ("o_proj.weight", "down_proj.weight", "down_proj")  # what layers add to the stream


def forgetful(model: PreTrainedModel, share: float = 0.01) -> PreTrainedModel:
    """Let the layers add so little that the newest token decides most of what comes next."""
    for name, parameter in model.named_parameters():
        if name.endswith(OUTPUTS):
            parameter.data.mul_(share)
    return model


def make_head(
    spec: ModelSpec, norm: torch.Tensor, scale: float, inner: int | None = None
) -> dict[str, torch.Tensor]:
    """Tensors under their names in a checkpoint; `scale` is the size of all that is random."""
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, shape in mtp_tensors(spec, inner).items():
        tensor = torch.randn(shape, generator=generator) * scale
        if name.endswith("eh_proj.weight"):
            tensor += torch.cat([torch.eye(shape[0]), torch.zeros(shape[0], shape[0])], dim=1)
        elif name.endswith("shared_head.norm.weight"):
            tensor = norm.clone()
        elif "norm" in name:
            tensor += 1.0
        tensors[name] = tensor
    return tensors


def head_tensors(
    model: PreTrainedModel, scale: float = 0.003, inner: int | None = None
) -> dict[str, torch.Tensor]:
    """The head of a transformers model, its MLP `inner` wide if given."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return make_head(spec_of(config), model.model.norm.weight.data, scale, inner)


def eagle3_tensors(
    model: PreTrainedModel, bias: bool = False, scale: float = 0.2
) -> dict[str, torch.Tensor]:
    """A random EAGLE-3 head under EAGLE's names, for seven of every eight tokens of a model."""
    config, generator = model.config, torch.Generator().manual_seed(13)
    hidden, inner, vocab_size = config.hidden_size, 48, config.vocab_size // 8 * 7
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    rows = {"q": heads * config.head_dim, "k": kv_heads * config.head_dim}
    rows["v"] = rows["k"]
    shapes = {"fc": (hidden, 3 * hidden), "lm_head": (vocab_size, hidden)}
    shapes |= {f"midlayer.self_attn.{x}_proj": (n, 2 * hidden) for x, n in rows.items()}
    shapes["midlayer.self_attn.o_proj"] = (hidden, rows["q"])
    shapes |= {f"midlayer.mlp.{x}_proj": (inner, hidden) for x in ("gate", "up")}
    shapes["midlayer.mlp.down_proj"] = (hidden, inner)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {f"{name}.weight": draw(*shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        tensors[f"{name}.weight"] = 1.0 + draw(hidden)
    if bias:
        for x, n in (rows | {"o": hidden}).items():
            tensors[f"midlayer.self_attn.{x}_proj.bias"] = draw(n)
    places = torch.arange(vocab_size)
    tensors["d2t"] = places // 7
    tensors["t2d"] = torch.arange(config.vocab_size) % 8 != 7
    return tensors


@torch.no_grad()
def look_at_newest(tensors: dict[str, torch.Tensor], model: PreTrainedModel) -> None:
    """Let a head with biases guess what the model would say after the newest token alone.

    Constant queries and keys attend to their own place. Of its embedding values keep what leads to
    the head's row of the guess, as far as so few channels can; the state, made about as large as
    its norm, is taken away.
    """
    config, prefix = model.config, "midlayer.self_attn."
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for name, tensor in tensors.items():
        if "norm" not in name and name not in ("d2t", "t2d"):
            tensor.mul_(0.01)
    for x in ("q", "k"):
        tensors[f"{prefix}{x}_proj.bias"].fill_(5.0)
    embedded = model.model.embed_tokens.weight.double()
    seen = embedded * embedded.pow(2).mean(1, keepdim=True).rsqrt()
    seen = seen * tensors["midlayer.input_layernorm.weight"]
    said = model(torch.arange(config.vocab_size)[:, None]).logits[:, -1].argmax(-1)
    wanted = model.lm_head.weight[said].double()
    wanted *= wanted.pow(2).mean(1, keepdim=True).rsqrt()
    basis = torch.linalg.svd(wanted)[2][: 2 * dim]  # [channels, hidden]
    values = torch.linalg.lstsq(seen, wanted @ basis.T).solution.T
    tensors[f"{prefix}v_proj.weight"][:] = torch.cat([values, -basis], dim=1).float()
    for kv_head in range(2):
        first = kv_head * group * dim
        part = basis[kv_head * dim : (kv_head + 1) * dim].T.float()
        tensors[f"{prefix}o_proj.weight"][:, first : first + dim] = part
    tensors["fc.weight"] *= 1.0 / (tensors["fc.weight"].norm(dim=1, keepdim=True) * embedded.std())
    tensors["norm.weight"].fill_(1.0)
    tensors["midlayer.hidden_norm.weight"].fill_(1.0)
    tensors["lm_head.weight"] = model.lm_head.weight[tensors["t2d"]].clone()


def save_eagle3(
    model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor], **changes: object
) -> Path:
    """The folder of a head: EAGLE's config.json and one file."""
    config = model.config
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else config.vocab_size,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_bias": "midlayer.self_attn.q_proj.bias" in tensors,
        "tie_word_embeddings": False,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(own | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_head(model: PreTrainedModel, file: Path, scale: float = 0.003) -> Path:
    save_file(head_tensors(model, scale), file)
    return file
