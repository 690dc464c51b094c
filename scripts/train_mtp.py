"""Train a multi-token-prediction module for a Llama-family model on text that the model writes.

The model first writes user turns (sampled, from its own chat template), then answers them, mostly
greedily. The module learns the model's own next-token distributions over that text, for a chain of
drafts: draft k sees the module's hidden state of draft k - 1, as it will when it is used.

usage: python scripts/train_mtp.py --out FOLDER [--generate-s 150 --train-s 300]     (one GPU)
The last line is one JSON object: acceptance of each draft on conversations left out of training.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig
from tokenmill.core.spec import ModelSpec
from tokenmill.core.types import Request, SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.layers.rotary import rotary_table
from tokenmill.models.store import resolve
from tokenmill.models.weights import open_checkpoint
from tokenmill.serve.tokenizer import load_tokenizer

OPENERS = (
    "", "", "", "", "How", "What", "Why", "When", "Who is", "Which", "Write", "Explain", "Describe",
    "Give me", "Tell me", "Can you", "Could you", "I", "I want to", "My", "Is it", "Summarize",
    "List", "Create", "Compare", "Suggest", "Help me", "Please", "Translate", "Hello", "Hi",
    "In", "The", "Imagine", "If", "Make", "Write a story", "Write a poem", "Write an email",
    "Write a Python", "Solve", "Calculate", "Name", "Plan", "Teach me", "Should I",
)  # fmt: skip
LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
MAX_LEN = 640
Weights = dict[str, torch.Tensor]


def write_conversations(args: argparse.Namespace) -> list[list[int]]:
    """Conversations as token ids, each a prompt and the model's answer."""
    path = str(resolve(args.model))
    tokenizer = load_tokenizer(path)
    built = build_engine(
        ModelConfig(path, "auto", args.device, max_model_len=2048),
        CacheConfig(memory_bytes=args.kv_gib * 2**30),
        SchedulerConfig(max_num_seqs=args.batch, max_waiting=2**31),
    )
    marker = "\ue000"
    whole = tokenizer.encode_chat([{"role": "user", "content": marker}])
    inner = tokenizer.encode(marker)
    at = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
    head, tail = whole[:at], whole[at + len(inner) :]
    dice, seen, done = random.Random(args.seed), set[tuple[int, ...]](), list[list[int]]()
    end = time.monotonic() + args.generate_s
    while time.monotonic() < end:
        starts = [tokenizer.encode(dice.choice(OPENERS)) for _ in range(4 * args.batch)]
        asked = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=160)
        turns = complete(built, [head + s for s in starts], [asked] * len(starts), dice)
        prompts = []
        for start, turn in zip(starts, turns, strict=True):
            user = (*start, *turn[:-1])
            if turn and turn[-1] in tail[:1] and len(user) > 2 and user not in seen:
                seen.add(user)
                prompts.append([*head, *user, *tail])
        greedy = SamplingParams(temperature=0.0, max_tokens=args.answer)
        drawn = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=args.answer)
        how = [greedy if dice.random() < 0.75 else drawn for _ in prompts]
        answers = complete(built, prompts, how, dice)
        done += [p + a for p, a in zip(prompts, answers, strict=True)]
        print(f"{len(done)} conversations, {sum(map(len, done))} tokens", flush=True)
    return [ids[:MAX_LEN] for ids in done]


def complete(
    built: BuiltEngine, prompts: list[list[int]], how: list[SamplingParams], dice: random.Random
) -> list[list[int]]:
    """What the engine adds to each prompt."""
    answers: dict[str, list[int]] = {}
    for i, (prompt, sampling) in enumerate(zip(prompts, how, strict=True)):
        own = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p,
            max_tokens=sampling.max_tokens, seed=dice.randrange(2**31),
        )  # fmt: skip
        answers[str(i)] = []
        built.engine.submit(Request(str(i), prompt, own))
    while built.engine.has_work():
        for output in built.engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


class Target:
    """The frozen model, densely: hidden states after the final norm."""

    def __init__(self, spec: ModelSpec, tensors: Weights, device: str) -> None:
        self.spec, self.device = spec, device
        self.weights = {name: t.to(device, torch.bfloat16) for name, t in tensors.items()}
        self.table = rotary_table(spec.rope, spec.head_dim, MAX_LEN + 8).to(device)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embedding)

    def layer(self, index: int) -> Weights:
        return {n: self.weights[f"model.layers.{index}.{n}.weight"] for n in LAYER}

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, self.embedding)
        for index in range(self.spec.num_layers):
            weights = self.layer(index)
            q, k, v = project(self.spec, weights, x, self.table, 0)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = finish(self.spec, weights, x, out)
        return norm(x, self.weights["model.norm.weight"], self.spec.rms_eps)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def project(
    spec: ModelSpec, weights: Weights, x: torch.Tensor, table: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated q and k, and v, [batch, heads, tokens, channels]; the first token is at `first`."""
    normed = norm(x, weights["input_layernorm"], spec.rms_eps)
    q, k, v = (
        F.linear(normed, weights[f"self_attn.{n}_proj"].to(x.dtype))
        .unflatten(-1, (-1, spec.head_dim))
        .transpose(1, 2)
        for n in "qkv"
    )
    cos, sin = table[first : first + x.shape[1]].to(x.dtype).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def finish(spec: ModelSpec, weights: Weights, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The layer after its attention."""
    x = x + F.linear(out.transpose(1, 2).flatten(2), weights["self_attn.o_proj"].to(x.dtype))
    normed = norm(x, weights["post_attention_layernorm"], spec.rms_eps)
    gate = F.silu(F.linear(normed, weights["mlp.gate_proj"].to(x.dtype)))
    up = F.linear(normed, weights["mlp.up_proj"].to(x.dtype))
    return x + F.linear(gate * up, weights["mlp.down_proj"].to(x.dtype))


class Module(torch.nn.Module):
    """The MTP module; it starts as the model's last layer."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        size = target.spec.hidden_size
        weights = {
            n: t.float().clone() for n, t in target.layer(target.spec.num_layers - 1).items()
        }
        weights["enorm"] = torch.ones(size)
        weights["hnorm"] = torch.ones(size)
        weights["eh_proj"] = torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], dim=1)
        weights["shared_head.norm"] = target.weights["model.norm.weight"].float().clone()
        self.target = [target]  # not a submodule: it is frozen
        self.names = {name: name.replace(".", "_") for name in weights}
        for name, key in self.names.items():
            tensor = weights[name].to(target.device)
            self.register_parameter(key, torch.nn.Parameter(tensor))

    @property
    def weights(self) -> Weights:
        return {name: getattr(self, key) for name, key in self.names.items()}

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Hidden states of each draft; entry i of draft k predicts token i + k + 2."""
        (target,), weights = self.target, self.weights
        spec, eps = target.spec, target.spec.rms_eps
        count = ids.shape[1] - 1 - depth
        mask = torch.ones(count, count, dtype=torch.bool, device=ids.device).tril()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        hidden = hidden[:, :count]
        for k in range(depth):
            embedded = F.embedding(ids[:, k + 1 : k + 1 + count], target.embedding)
            pair = [norm(embedded, weights["enorm"], eps), norm(hidden, weights["hnorm"], eps)]
            x = F.linear(torch.cat(pair, dim=-1), weights["eh_proj"].to(hidden.dtype))
            q, key, value = project(spec, weights, x, target.table, k)
            group = q.shape[1] // key.shape[1]
            keys.append(key.repeat_interleave(group, dim=1))
            values.append(value.repeat_interleave(group, dim=1))
            scores = (q @ keys[0].mT).masked_fill(~mask, -torch.inf)
            own = [(q * later).sum(-1, keepdim=True) for later in keys[1:]]
            scores = torch.cat([scores, *own], dim=-1).float() * spec.head_dim**-0.5
            shares = scores.softmax(-1).to(x.dtype)
            out = shares[..., :count] @ values[0]
            for j, later in enumerate(values[1:]):
                out = out + shares[..., count + j, None] * later
            hidden = norm(finish(spec, weights, x, out), weights["shared_head.norm"], eps)
            states.append(hidden)
        return states


def batches(
    texts: list[list[int]], num_tokens: int, dice: random.Random, pad: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Texts of about the same length together: ids and lengths."""
    order = sorted(texts, key=lambda ids: len(ids) + 16 * dice.random())
    groups: list[list[list[int]]] = [[]]
    for ids in order:
        if groups[-1] and (len(groups[-1]) + 1) * len(ids) > num_tokens:
            groups.append([])
        groups[-1].append(ids)
    dice.shuffle(groups)
    for group in groups:
        longest = max(map(len, group))
        rows = [ids + [pad] * (longest - len(ids)) for ids in group]
        yield torch.tensor(rows), torch.tensor([len(ids) for ids in group])


def losses(
    module: Module, ids: torch.Tensor, lens: torch.Tensor, depth: int
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The summed loss, per draft whether its best token is the model's, and which entries count."""
    (target,) = module.target
    hidden = target(ids)
    states = module(hidden, ids, depth)
    count = states[0].shape[1]
    valid = torch.arange(count, device=ids.device)[None] < (lens - 1 - depth)[:, None]
    with torch.no_grad():
        said = F.linear(hidden[:, 1:], target.head)
    loss = torch.zeros((), device=ids.device)
    hits = []
    for k, state in enumerate(states):
        logits = F.linear(state[valid], target.head)
        goal = said[:, k : k + count][valid]
        loss = loss + 0.8**k * F.cross_entropy(logits.float(), goal.float().softmax(-1))
        hits.append(logits.argmax(-1) == goal.argmax(-1))
    return loss, hits, valid


@torch.no_grad()
def measure(module: Module, texts: list[list[int]], args: argparse.Namespace) -> list[float]:
    """The share of each draft that is right where those before it were."""
    kept, right = [0] * args.depth, [0] * args.depth
    for ids, lens in batches(texts, args.tokens, random.Random(0), 0):
        ids, lens = ids.to(args.device), lens.to(args.device)
        _, hits, _ = losses(module, ids, lens, args.depth)
        alive = torch.ones_like(hits[0])
        for k, hit in enumerate(hits):
            kept[k] += int(alive.sum())
            alive &= hit
            right[k] += int(alive.sum())
    return [r / max(1, n) for r, n in zip(right, kept, strict=True)]


def train(module: Module, texts: list[list[int]], args: argparse.Namespace) -> int:
    """Train until the time is over; returns the number of steps."""
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    dice, begin, step = random.Random(args.seed), time.monotonic(), 0
    while True:
        for ids, lens in batches(texts, args.tokens, dice, 0):
            share = (time.monotonic() - begin) / args.train_s
            if share >= 1:
                return step
            warm = min(1.0, (step + 1) / 100)
            for group in optimizer.param_groups:
                group["lr"] = (
                    args.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
                )
            ids, lens = ids.to(args.device), lens.to(args.device)
            loss, hits, _ = losses(module, ids, lens, args.depth)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0:
                first = [round(float(h.float().mean()), 3) for h in hits]
                print(
                    f"step {step} ({share:.0%}): loss {loss.item():.3f}, right {first}", flush=True
                )
            step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder of model.safetensors")
    parser.add_argument("--depth", type=int, default=3, help="drafts in a chain")
    parser.add_argument("--generate-s", type=float, default=150)
    parser.add_argument("--train-s", type=float, default=300)
    parser.add_argument("--batch", type=int, default=1024, help="conversations at once")
    parser.add_argument("--answer", type=int, default=384, help="tokens of an answer at most")
    parser.add_argument("--tokens", type=int, default=16384, help="of a training step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--kv-gib", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    texts = write_conversations(args)
    num_held = max(8, len(texts) // 50)
    held, texts = texts[:num_held], texts[num_held:]
    checkpoint = open_checkpoint(resolve(args.model))
    target = Target(checkpoint.spec, dict(checkpoint.tensors(None, args.device)), args.device)
    module = Module(target)
    steps = train(module, texts, args)
    found = measure(module, held, args)
    prefix = f"model.layers.{checkpoint.spec.num_layers}"
    tensors = {
        f"{prefix}.{name}.weight": t.detach().to("cpu", torch.bfloat16).contiguous()
        for name, t in module.weights.items()
    }
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.out / "model.safetensors", {"format": "pt"})
    length = 1 + sum(math.prod(found[: k + 1]) for k in range(args.depth))
    report = {
        "model": args.model, "conversations": len(texts), "tokens": sum(map(len, texts)),
        "held_out": num_held, "steps": steps, "acceptance": [round(a, 4) for a in found],
        "length": round(length, 3), "bytes": (args.out / "model.safetensors").stat().st_size,
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
