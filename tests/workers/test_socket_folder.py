"""Where the sockets between a server's processes are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenmill.workers.socket_folder import new_address, remove_folder


@pytest.mark.parametrize("length", [10, 100])
def test_a_socket_s_path_fits_however_long_tmpdir_is(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = tmp_path / ("x" * length)
    around.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(around))
    address = new_address("worker.sock")
    try:
        assert len(os.fsencode(address.removeprefix("ipc://"))) < 107
        assert Path(address.removeprefix("ipc://")).parent.is_dir()
    finally:
        remove_folder(address)
