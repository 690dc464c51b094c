"""Where ranks meet and listen."""

from __future__ import annotations

import os

import pytest

from open_ports import elsewhere, listening
from tokenmill.parallel import LOOPBACK, interface_of, open_store, own_address
from tokenmill.parallel import _listening_at as listening_at

VARIABLE = "GLOO_SOCKET_IFNAME"


def test_a_store_listens_at_its_host_alone() -> None:
    before = listening([os.getpid()])
    store = open_store(LOOPBACK, 2)
    assert listening([os.getpid()]) - before == {(LOOPBACK, store.port)}
    assert elsewhere([os.getpid()]) == set()
    store.set("name", "value")
    assert open_store(LOOPBACK, 2, store.port).get("name") == b"value"


def test_gloo_listens_at_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told by a variable, which does not stay; an operator's own is left."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert own_address("127.0.0.9").startswith("127.") and interface_of(LOOPBACK) == "lo"
    with listening_at(LOOPBACK):
        assert os.environ[VARIABLE] == "lo"
    assert VARIABLE not in os.environ
    with listening_at("203.0.113.9"):  # no interface has it
        assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "eth7")
    with listening_at(LOOPBACK):
        assert os.environ[VARIABLE] == "eth7"
    assert os.environ[VARIABLE] == "eth7"
