"""API keys: what their file may say, whose calls they are, and that nothing tells them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tokenmill.core.keys.key_ring import (
    KeyFileError,
    KeyRing,
    digest_of,
    make_ring,
    read_key_file,
)

SALT = b"s" * 32
CONTROL = digest_of(SALT, "token")


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_have_the_names_that_the_operator_gave(tmp_path: Path) -> None:
    path = write(tmp_path, "# ours\nchat = sk-1==\n\nchat=sk-2\nbatch.job@x = b\n")
    ring = make_ring(["plain"], str(path), SALT, CONTROL)
    assert [ring.account_of(key) for key in ("sk-1==", "sk-2", "b")] == ["chat"] * 2 + [
        "batch.job@x"
    ]
    assert ring.account_of("plain") == make_ring(["plain", "x"], None, SALT, CONTROL).account_of(
        "plain"
    )
    assert ring.account_of("plain") != make_ring(["plain"], None, b"other", CONTROL).account_of(
        "plain"
    )
    assert ring.account_of("token") == "operator" and ring.is_control("token")
    assert ring.account_of("sk-3") is None and not ring.is_control("sk-1==")
    assert not any(key in repr(ring) for key in ("sk-1", "plain", "token"))


def test_a_server_without_keys_has_one_account() -> None:
    ring = KeyRing(SALT, CONTROL)
    assert ring.account_of("") == ring.account_of("any") == "none" and not ring.is_needed
    one, two = (make_ring(keys, None, SALT, CONTROL) for keys in (["one"], ["one", "two"]))
    assert not one.has_tenants and two.has_tenants


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sk-alone", "line 1: must be 'name = key'"),
        ("a = k\n= k2", "line 2: must be 'name = key'"),
        ("a =", "line 1: must be 'name = key'"),
        ("two words = k", "letters, digits"),
        ("none = k", "neither 'none' nor 'operator'"),
        ("a = k\nb = k", "line 2: 'b' has the key of 'a'"),
        ("# nothing", "has no keys"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_telling_keys(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(KeyFileError, match=why) as refused:
        read_key_file(write(tmp_path, text))
    assert "sk-alone" not in str(refused.value)


def test_a_file_that_is_missing_or_open_to_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyFileError, match="No such file"):
        read_key_file(tmp_path / "gone")
    with caplog.at_level(logging.WARNING):
        read_key_file(write(tmp_path, "a = k"))
        assert caplog.messages == []
        read_key_file(write(tmp_path, "a = k", 0o644))
    assert "chmod 600" in caplog.messages[0]


def test_the_control_token_is_no_key() -> None:
    with pytest.raises(KeyFileError, match="another secret"):
        make_ring(["token"], None, SALT, CONTROL)
