"""A ranking model: the dense part over its three embedding stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.models.hstu import Embedded, HstuModel, RankBatch
from tokenmill.ranking.batch import make_batch
from tokenmill.ranking.requests import RankRequest, check_request
from tokenmill.ranking.stores.store import EmbeddingStore

COUNTS = {"item": "num_items", "user": "num_users", "category": "num_categories"}
TABLES = tuple(COUNTS)
_SMALL = 64
Stores = Mapping[str, EmbeddingStore]


class RankingModel:
    """Scores requests; a store with other rows or columns than the config is refused."""

    def __init__(self, dense: HstuModel, stores: Stores) -> None:
        self.spec, self.dense, self.stores = dense.spec, dense, stores
        for name in TABLES:
            if name not in stores:
                raise ModelLoadError(f"{name}: the model needs a table of this name")
            check_store(name, stores[name], self.spec)
        self._categories = torch.arange(self.spec.num_categories, device=dense.device)

    def embed(self, batch: RankBatch) -> Embedded:
        """The rows of a batch, as the dense part takes them."""

        def rows(table: str, ids: torch.Tensor) -> torch.Tensor:
            found = self.stores[table].lookup(ids, check=False)
            return found.to(self.dense.device, self.dense.dtype)

        users, items = rows("user", batch.user_ids), rows("item", batch.item_ids)
        return Embedded(users, items, rows("category", self._categories))

    def close(self) -> None:
        for store in self.stores.values():
            store.close()

    @torch.inference_mode()
    def launch(self, batch: RankBatch) -> PendingScores:
        """Probabilities float32[candidates of all requests, tasks]; a GPU may be at it still."""
        return PendingScores(self.dense.scores(batch, self.embed(batch)))

    def score_batch(self, batch: RankBatch) -> np.ndarray:
        return self.launch(batch).wait()

    def score(self, requests: Sequence[RankRequest]) -> list[np.ndarray]:
        """Scores [candidates, tasks] of each request, as one batch."""
        for request in requests:
            check_request(request, self.spec)
        batch = make_batch(requests, self.spec, self.dense.device)
        return np.split(self.score_batch(batch), batch.rows.candidates[1:-1])


class PendingScores:
    """Scores of a launched batch on their way to the host.

    Their copy stands in the device's stream right behind the batch: to wait for it is not to wait
    for batches that were launched since.
    """

    def __init__(self, scores: torch.Tensor) -> None:
        on_gpu = scores.device.type == "cuda"
        self._done = torch.cuda.Event() if on_gpu else None
        if self._done is not None:
            pinned = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
            scores = pinned.copy_(scores, non_blocking=True)
            self._done.record()
        self._scores = scores

    def wait(self) -> np.ndarray:
        """The scores, a copy that the caller may keep: the pinned memory is used again."""
        if self._done is None:
            found: np.ndarray = self._scores.numpy()
            return found
        self._done.synchronize()
        return self._scores.numpy().copy()


def limit_threads(spec: HstuSpec, num_threads: int | None = None) -> None:
    """One thread for small products: more are slower, and much slower on a busy machine."""
    if spec.hidden_size <= _SMALL:
        torch.set_num_threads(1)
    elif num_threads is not None:
        torch.set_num_threads(num_threads)


def check_store(name: str, store: EmbeddingStore, spec: HstuSpec) -> None:
    """An error where a table has other rows or columns than the config says."""
    field = COUNTS[name]
    rows, columns = getattr(spec, field), spec.embedding_dim
    if store.spec.dim != columns:
        raise ModelLoadError(
            f"{name}: the table has {store.spec.dim} columns, the config {columns} (embedding_dim)"
        )
    if store.spec.num_rows != rows:
        raise ModelLoadError(
            f"{name}: the table has {store.spec.num_rows} rows, the config {rows} ({field})"
        )
