"""A KV connector is one line of a dict: where else its name has to be known is checked here."""

from itertools import product
from typing import get_args, get_type_hints
from unittest import mock

import pytest

from benchmarks.kv_transfer import connectors
from tokenmill.core import kv
from tokenmill.core.config import CacheConfig
from tokenmill.core.kv import choose_connectors
from tokenmill.core.types import ModelLoadError
from tokenmill.kv.connectors import CONNECTORS, KVLink


def test_every_connector_is_a_choice_of_the_setting_and_is_measured() -> None:
    choices = get_args(get_type_hints(CacheConfig)["connector"])
    assert set(choices) == {"none", "auto", *CONNECTORS}
    assert [connector.name for connector in CONNECTORS.values()] == list(CONNECTORS)
    assert connectors("all") == [n for n, found in CONNECTORS.items() if found.installed()]
    assert [connectors(name) for name in CONNECTORS] == [[name] for name in CONNECTORS]


@pytest.mark.parametrize("nixl", [True, False])
def test_auto_takes_what_reaches_the_peers(nixl: bool) -> None:
    far = ("nixl",) if nixl else ()
    expected = {
        (False, True): ("shm",),
        (False, False): ("shm", *far),
        (True, True): ("cuda-ipc",),
        (True, False): ("cuda-ipc", *far),
    }
    with mock.patch.object(kv, "nixl_installed", return_value=nixl):
        for on_gpu, one_host in product((False, True), repeat=2):
            names = choose_connectors("auto", on_gpu, one_host)
            assert names == expected[on_gpu, one_host] and set(names) <= set(CONNECTORS)
    for name in CONNECTORS:
        assert choose_connectors(name, on_gpu=False, one_host=True) == (name,)
    assert choose_connectors("none", on_gpu=False) == ()


def test_a_connector_of_other_memory_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="kv_connector shm: shm moves host memory alone"):
        KVLink.plan("shm", "cuda", "")
    with pytest.raises(ModelLoadError, match="cuda-ipc moves a GPU's memory alone; on cpu take"):
        KVLink.plan("cuda-ipc", "cpu", "")
