"""Train a multi-token-prediction module for a Llama-family model on text that the model writes.

The conversations are those of mtp_conversations.py; the model answers, mostly greedily. The module
learns the model's own next-token distributions over the answers, for a chain of drafts: draft k
sees the module's hidden state of draft k - 1, as it will when it is used. Only a draft's best token
counts, so that the distributions grow sharper towards the end, up to --sharpness. --inner is the
width of the module's MLP; the file's shapes tell the engine how wide it is.

usage: python scripts/train_mtp.py --out FOLDER [--generate-s 150 --train-s 240]     (one GPU)
Whatever happens, the process ends within --limit-s, and while it trains the folder has the newest
module (one of at most --save-s ago). The last line is one JSON object: acceptance of each draft
over the answers of conversations left out of training, and over those to the benchmark's prompts,
which are of no form or topic that was trained with. Nothing is decided by the latter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from mtp_conversations import MAX_LEN, Conversation, num_tokens, write_together
from safetensors.torch import load_file, save_file

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.layers.rotary import rotary_table
from tokenmill.models.checkpoints.store import resolve
from tokenmill.models.checkpoints.weights import open_checkpoint

LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
BLOCK = 4096  # of the vocabulary
CLOSING_S = 20.0  # for the measurement and the file at the end
Weights = dict[str, torch.Tensor]


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


def check_layers(spec: ModelSpec) -> None:
    """Refuse what Target does not compute."""
    for name in ("attention_bias", "mlp_bias", "qk_norm", "sliding_window", "moe", "mla"):
        if getattr(spec, name):
            raise SystemExit(f"{spec.architecture}: layers with {name} are not trained here")


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


def widen(weights: Weights, inner: int) -> None:
    """Give the MLP more channels, whose sum counts for nothing yet."""
    more = inner - weights["mlp.gate_proj"].shape[0]
    if more < 0:
        raise SystemExit(
            f"--inner {inner}: the MLP to start with is {inner - more} wide, give that"
        )
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        known = weights[name]
        added = known.std() * torch.randn(more, known.shape[1], device=known.device)
        weights[name] = torch.cat([known, added])
    down = weights["mlp.down_proj"]
    added = torch.zeros(down.shape[0], more, device=down.device)
    weights["mlp.down_proj"] = torch.cat([down, added], dim=1)


class Module(torch.nn.Module):
    """The MTP module; it starts as the model's last layer, its MLP wider by what adds nothing."""

    def __init__(self, target: Target, inner: int) -> None:
        super().__init__()
        size = target.spec.hidden_size
        last = target.layer(target.spec.num_layers - 1)
        weights = {name: tensor.float().clone() for name, tensor in last.items()}
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # the stream starts small here
            weights[name] *= 0.1
        widen(weights, inner)
        weights["enorm"] = torch.ones(size)
        weights["hnorm"] = torch.ones(size)
        weights["eh_proj"] = torch.cat([0.02 * torch.randn(size, size), torch.eye(size)], dim=1)
        weights["shared_head.norm"] = target.weights["model.norm.weight"].float().clone()
        self.target = [target]  # not a submodule: it is frozen
        self.names = {name: name.replace(".", "_") for name in weights}
        for name, key in self.names.items():
            tensor = weights[name].to(target.device)
            self.register_parameter(key, torch.nn.Parameter(tensor))

    @classmethod
    def of(cls, file: Path, target: Target) -> Module:
        """The module in a file, as wide as it is there."""
        gate = next(t for name, t in load_file(file).items() if "gate_proj" in name)
        module = cls(target, gate.shape[0])
        module.load(file)
        return module

    def load(self, file: Path) -> None:
        """Go on from a module that was trained before; its MLP may be narrower than this one's."""
        known = {
            name.split(".", 3)[3].removesuffix(".weight"): tensor.float()
            for name, tensor in load_file(file).items()
        }
        widen(known, self.weights["mlp.gate_proj"].shape[0])
        for name, tensor in known.items():
            self.weights[name].data.copy_(tensor)

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


@triton.jit
def _distil_kernel(student, teacher, rows, losses, hits, sharpness, vocab, BLOCK: tl.constexpr):
    """Cross entropy of a row against the teacher's distribution; its gradient replaces the row."""
    row = tl.program_id(0).to(tl.int64)
    own, goal = student + row * vocab, teacher + tl.load(rows + row).to(tl.int64) * vocab
    peak_s = tl.full([], float("-inf"), tl.float32)
    peak_t = tl.full([], float("-inf"), tl.float32)
    sum_s, sum_t = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    best_s, best_t = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        s = tl.load(own + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        t = tl.load(goal + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        t *= sharpness
        top_s, top_t = tl.max(s, axis=0), tl.max(t, axis=0)
        best_s = tl.where(top_s > peak_s, start + tl.argmax(s, axis=0), best_s)
        best_t = tl.where(top_t > peak_t, start + tl.argmax(t, axis=0), best_t)
        new_s, new_t = tl.maximum(peak_s, top_s), tl.maximum(peak_t, top_t)
        sum_s = sum_s * tl.exp(peak_s - new_s) + tl.sum(tl.exp(s - new_s), axis=0)
        sum_t = sum_t * tl.exp(peak_t - new_t) + tl.sum(tl.exp(t - new_t), axis=0)
        peak_s, peak_t = new_s, new_t
    norm_s, norm_t = peak_s + tl.log(sum_s), peak_t + tl.log(sum_t)
    loss = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        s = tl.load(own + column, mask=inside, other=0.0).to(tl.float32) - norm_s
        t = tl.load(goal + column, mask=inside, other=0.0).to(tl.float32) * sharpness - norm_t
        loss -= tl.sum(tl.where(inside, tl.exp(t) * s, 0.0), axis=0)
        tl.store(own + column, (tl.exp(s) - tl.exp(t)).to(student.dtype.element_ty), mask=inside)
    tl.store(losses + row, loss)
    tl.store(hits + row, (best_s == best_t).to(tl.int32))


def distil(
    logits: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, sharpness: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and hits of each row; the gradients of the losses replace the logits.

    The teacher's logits are multiplied by `sharpness`.
    """
    if logits.device.type == "cpu":
        return distil_plain(logits, teacher, rows, sharpness)
    losses = torch.empty(len(rows), device=logits.device)
    hits = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    _distil_kernel[(len(rows),)](
        logits, teacher, rows, losses, hits, float(sharpness), logits.shape[1],
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return losses, hits


def distil_plain(
    logits: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, sharpness: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    goal, own = teacher[rows].float() * sharpness, logits.float()
    shares, scores = goal.softmax(-1), own.log_softmax(-1)
    hits = (own.argmax(-1) == goal.argmax(-1)).int()  # before the logits are overwritten
    logits.copy_(scores.exp() - shares)
    return -(shares * scores).sum(-1), hits


class Distillation(torch.autograd.Function):
    """The mean cross entropy of head(states) against rows of the teacher's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        head: torch.Tensor,
        teacher: torch.Tensor,
        rows: torch.Tensor,
        sharpness: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(states, head)
        losses, hits = distil(logits, teacher, rows, sharpness)
        ctx.save_for_backward(logits, head)
        ctx.mark_non_differentiable(hits)
        return losses.mean(), hits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, head = ctx.saved_tensors
        return (logits @ head) * (gradients[0] / len(logits)), None, None, None, None


def batches(
    conversations: list[Conversation], num_tokens: int, dice: random.Random
) -> Iterator[list[Conversation]]:
    """Conversations of about the same length together."""
    order = sorted(conversations, key=lambda c: len(c.token_ids) + 16 * dice.random())
    groups: list[list[Conversation]] = [[]]
    for one in order:
        if groups[-1] and (len(groups[-1]) + 1) * len(one.token_ids) > num_tokens:
            groups.append([])
        groups[-1].append(one)
    dice.shuffle(groups)
    yield from groups


def _ids(group: list[Conversation], device: str) -> torch.Tensor:
    longest = max(len(c.token_ids) for c in group)
    rows = [c.token_ids + [0] * (longest - len(c.token_ids)) for c in group]
    return torch.tensor(rows).to(device)


def note_hidden(target: Target, conversations: list[Conversation], num_tokens: int) -> None:
    """Run the model once over everything: it does not change."""
    for group in batches(conversations, num_tokens, random.Random(0)):
        for one, hidden in zip(group, target(_ids(group, target.device)), strict=True):
            one.hidden = hidden[: len(one.token_ids)].clone()


def answered(group: list[Conversation], count: int, depth: int) -> torch.Tensor:
    """Whether all drafts from a place are of an answer, bool [conversations, count]."""
    inside = torch.zeros(len(group), count, dtype=torch.bool)
    for i, one in enumerate(group):
        for first, end in one.answers:
            inside[i, first - 1 : max(0, end - 1 - depth)] = True
    return inside


def losses(
    module: Module,
    group: list[Conversation],
    depth: int,
    sharpness: float = 1.0,
    share: float = 1.0,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The summed loss over the answers, and per draft whether its best token is the model's.

    Of each draft only the `share` of the places of the one before is looked at.
    """
    (target,) = module.target
    ids = _ids(group, target.device)
    known = [c.hidden for c in group if c.hidden is not None]
    hidden = torch.nn.utils.rnn.pad_sequence(known, batch_first=True)
    states = module(hidden, ids, depth)
    inside = answered(group, states[0].shape[1], depth).to(ids.device)
    line, place = inside.nonzero(as_tuple=True)
    # Logits of the places after the answers' ones alone; row_of says which place has which.
    wanted = F.pad(inside, (1, depth - 1))
    for k in range(1, depth):
        wanted[:, 1 + k : 1 + k + inside.shape[1]] |= inside
    row_of = wanted.flatten().cumsum(0).view_as(wanted) - 1
    teacher = F.linear(hidden[:, : wanted.shape[1]][wanted], target.head)
    loss, hits = torch.zeros((), device=ids.device), []
    for k, state in enumerate(states):
        if k and share < 1:
            kept = torch.rand(line.shape, device=line.device) < share
            line, place = line[kept], place[kept]
        rows = row_of[line, place + 1 + k]
        own, right = Distillation.apply(state[line, place], target.head, teacher, rows, sharpness)
        loss = loss + 0.7**k * own
        hits.append(right.bool())
    return loss, hits


@torch.no_grad()
def measure(
    module: Module, conversations: list[Conversation], args: argparse.Namespace
) -> list[float]:
    """The share of each draft that is right where those before it were."""
    kept, right = [0] * args.depth, [0] * args.depth
    for group in batches(conversations, args.tokens, random.Random(0)):
        _, hits = losses(module, group, args.depth)
        alive = torch.ones_like(hits[0])
        for k, hit in enumerate(hits):
            kept[k] += int(alive.sum())
            alive &= hit
            right[k] += int(alive.sum())
    return [r / max(1, n) for r, n in zip(right, kept, strict=True)]


def measure_all(
    module: Module, sets: dict[str, list[Conversation]], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """The acceptance of each draft and the tokens per step, by set."""
    report = {}
    for name, conversations in sets.items():
        found = measure(module, conversations, args)
        length = 1 + sum(math.prod(found[: k + 1]) for k in range(args.depth))
        acceptance = [round(share, 4) for share in found]
        count = len(conversations)
        report[name] = {"count": count, "acceptance": acceptance, "length": round(length, 3)}
    return report


def train(
    module: Module,
    conversations: list[Conversation],
    watched: list[Conversation],
    args: argparse.Namespace,
) -> int:
    """Train until the time is over; returns the number of steps."""
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    dice, begin, step = random.Random(args.seed), time.monotonic(), 0
    seconds = max(1.0, min(args.train_s, args.begin + args.limit_s - CLOSING_S - begin))
    saved = begin
    while True:
        for group in batches(conversations, args.tokens, dice):
            now = time.monotonic()
            share = (now - begin) / seconds
            if share >= 1:
                return step
            if now - saved > args.save_s:
                save_module(module, args.out)
                print(f"{share:.0%}: {measure(module, watched, args)} everyday", flush=True)
                saved = now
            falling = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share))
            for parameters in optimizer.param_groups:
                parameters["lr"] = args.rate * min(1.0, (step + 1) / 100) * falling
            sharpness = 1 + (args.sharpness - 1) * max(0.0, 2 * share - 1)
            loss, hits = losses(module, group, args.depth, sharpness, args.later_share)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            if step % 250 == 0:
                right = [round(float(h.float().mean()), 3) for h in hits]
                print(f"step {step} ({share:.0%}): loss {loss.item():.3f}, {right}", flush=True)
            step += 1


def save_module(module: Module, folder: Path) -> Path:
    """Write the file in one piece: what is there is always a whole module."""
    (target,) = module.target
    prefix = f"model.layers.{target.spec.num_layers}"
    tensors = {
        f"{prefix}.{name}.weight": t.detach().to("cpu", torch.bfloat16).contiguous()
        for name, t in module.weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    file, part = folder / "model.safetensors", folder / "model.part"
    save_file(tensors, part, {"format": "pt"})
    return part.replace(file)


def read_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder of model.safetensors")
    parser.add_argument("--start", type=Path, help="a module to go on from")
    parser.add_argument("--compare", type=Path, help="a module to measure beside")
    parser.add_argument("--inner", type=int, default=3840, help="width of the MLP")
    parser.add_argument("--depth", type=int, default=3, help="drafts in a chain")
    parser.add_argument("--sharpness", type=float, default=2.0, help="at the end; 1: no change")
    parser.add_argument("--later-share", type=float, default=0.5, help="of places, draft by draft")
    parser.add_argument("--generate-s", type=float, default=150)
    parser.add_argument("--train-s", type=float, default=240)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="for all of it")
    parser.add_argument("--save-s", type=float, default=30, help="between saved modules")
    parser.add_argument("--writers", type=int, default=8, help="processes that write")
    parser.add_argument("--batch", type=int, default=512, help="conversations at once, of each")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer at most")
    parser.add_argument("--tokens", type=int, default=16384, help="of a training step")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--kv-gib", type=float, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.begin = time.monotonic()  # the same clock in all processes
    args.write_until = args.begin + args.limit_s / 2  # whatever --generate-s says
    return args


def main() -> None:
    args = read_args()
    torch.manual_seed(args.seed)
    checkpoint = open_checkpoint(resolve(args.model))
    check_layers(checkpoint.spec)
    texts, measured = write_together(args)
    random.Random(args.seed).shuffle(texts)
    num_held = max(8, min(500, len(texts) // 50))
    held, texts = texts[:num_held], texts[num_held:]
    target = Target(checkpoint.spec, dict(checkpoint.tensors(None, args.device)), args.device)
    note_hidden(target, [*held, *texts, *itertools.chain(*measured.values())], args.tokens)
    print(f"{time.monotonic() - args.begin:.0f} s: the model's states are known", flush=True)
    sets = {"held_out": held} | measured
    compared = None
    if args.compare is not None:
        compared = measure_all(Module.of(args.compare, target), sets, args)
        print(f"{args.compare}: {compared}", flush=True)
    module = Module(target, args.inner)
    if args.start is not None:
        module.load(args.start)
        print(f"before training: {measure_all(module, sets, args)}", flush=True)
    steps = train(module, texts, measured.get("everyday", held), args)
    file = save_module(module, args.out)
    report = {
        "model": args.model, "conversations": len(texts), "tokens": num_tokens(texts),
        "steps": steps, "sets": measure_all(module, sets, args), "compared": compared,
        "bytes": file.stat().st_size, "seconds": round(time.monotonic() - args.begin, 1),
    }  # fmt: skip
    (args.out / "report.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
