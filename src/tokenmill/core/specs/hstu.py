"""The shape of an HSTU ranking model: dimensions, limits, and the work of a request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal

from tokenmill.core.specs.fields import Settings, count, positive_int
from tokenmill.core.types import ModelLoadError

ARCHITECTURE = "DlrmHSTU"
ScalingSeqlen = int | Literal["batch"]


@dataclass(frozen=True, slots=True)
class HstuSpec:
    """DLRMv3, as MLPerf's reference has it; the defaults are those of the benchmark."""

    num_items: int = 1_000_000_000
    num_users: int = 10_000_000
    num_categories: int = 128
    embedding_dim: int = 512  # columns of the three tables
    hidden_size: int = 512
    num_layers: int = 5
    num_heads: int = 4
    qk_dim: int = 128
    v_dim: int = 128
    preprocessor_dim: int = 256
    head_dim: int = 512  # hidden width of the item MLP and of the prediction head
    num_actions: int = 5  # bits of an action
    action_dim: int = 8
    num_positions: int = 8192
    num_time_buckets: int = 2048
    min_context_len: int = 20  # a user's row counts as zero where fewer items and candidates come
    max_seq_len: int = 16384  # the contextual token, history and candidates
    max_candidates: int = 2048
    num_tasks: int = 1
    scaling_seqlen: ScalingSeqlen = "batch"

    def __post_init__(self) -> None:
        if self.max_candidates + 2 > self.max_seq_len:
            raise ModelLoadError(
                f"max_candidates: {self.max_candidates} candidates, a contextual token and one "
                f"item of history must fit max_seq_len, which is {self.max_seq_len}"
            )

    @property
    def uvqk_dim(self) -> int:
        return 2 * self.num_heads * (self.v_dim + self.qk_dim)

    def normaliser(self, longest_history: int, most_candidates: int) -> int:
        """What attention divides by: of a batch, as the reference does it, or fixed.

        The batch's is its longest history plus its most candidates, which may be two requests'.
        """
        if self.scaling_seqlen == "batch":
            return longest_history + most_candidates + 1
        return self.scaling_seqlen

    def flops(self, history: int, candidates: int, targets_only: bool = True) -> float:
        """Of one request; `targets_only` counts the last layer's products for candidates alone."""
        n, m = history + 1, candidates
        heads, width = self.num_heads, self.num_heads * self.v_dim
        pair = 2 * heads * (self.qk_dim + self.v_dim)  # a query and a key
        to_candidates, to_history = pair * m * (n + 1), pair * n * (n + 1) / 2
        uvqk, out = 2 * self.hidden_size * self.uvqk_dim, 2 * 3 * width * self.hidden_size
        layer = (n + m) * (uvqk + out) + to_history + to_candidates
        spared = n * (uvqk / 2 + out) + to_history if targets_only else 0.0
        return self.num_layers * layer - spared + self._mlp_flops(n + m, m)

    def _mlp_flops(self, tokens: int, candidates: int) -> float:
        inner, hidden, action = self.preprocessor_dim, self.hidden_size, self.num_actions
        inputs = 2 * self.embedding_dim + action * self.action_dim
        token = 2 * inner * (inputs + 3 * hidden)
        item = 2 * self.head_dim * (2 * self.embedding_dim + hidden)
        head = 2 * hidden * (hidden + 4) + 2 * self.head_dim * (hidden + self.num_tasks)
        return float(tokens * token + candidates * (item + head))

    def config(self) -> Settings:
        return {"architectures": [ARCHITECTURE], **asdict(self)}


def read_hstu(settings: Settings) -> HstuSpec:
    """The spec of a config.json; a field that it leaves out has the benchmark's value."""
    names = settings.get("architectures")
    if names != [ARCHITECTURE]:
        raise ModelLoadError(f"architectures: expected [{ARCHITECTURE!r}], got {names!r}")
    known = {field.name for field in fields(HstuSpec)}
    if unknown := sorted(settings.keys() - known - {"architectures"}):
        raise ModelLoadError(f"{unknown[0]}: {ARCHITECTURE} has no such field")
    given = {name: settings[name] for name in known if name in settings}
    for name in given.keys() - {"scaling_seqlen", "min_context_len"}:
        positive_int(settings, name)
    if "min_context_len" in given:
        count(settings, "min_context_len")
    if given.get("scaling_seqlen", "batch") != "batch":
        positive_int(settings, "scaling_seqlen")
    return HstuSpec(**given)
