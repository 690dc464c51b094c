"""API keys: read from flags and a file, and kept as salted digests by those who check them."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.core.types import TokenmillError

NO_KEY = "none"  # who pays where calls need no key
OPERATOR = "operator"  # who pays for calls with the control token
_ACCOUNT = re.compile(r"[A-Za-z0-9._@-]{1,64}")

_log = logging.getLogger(__name__)


class KeyFileError(TokenmillError):
    """A file of keys or certificates cannot be used; the message says why."""


def digest_of(salt: bytes, key: str) -> bytes:
    """What tells keys apart without telling them; the salt makes it useless elsewhere."""
    return hmac.digest(salt, key.encode(), "sha256")


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All that checks keys: it has none of them. Accounts are the names of who pays."""

    salt: bytes
    control: bytes  # the digest of the control token
    accounts: dict[bytes, str] = field(default_factory=dict)  # by the digest of a key

    @property
    def is_needed(self) -> bool:
        return bool(self.accounts)

    @property
    def has_tenants(self) -> bool:
        return len(set(self.accounts.values())) > 1

    def is_control(self, key: str) -> bool:
        return hmac.compare_digest(digest_of(self.salt, key), self.control)

    def account_of(self, key: str) -> str | None:
        """Who pays for calls with a key; None: it is unknown, and one is needed.

        An outsider does not know the digest of what is looked up, so that times tell nothing.
        """
        if not self.accounts:
            return NO_KEY
        return OPERATOR if self.is_control(key) else self.accounts.get(digest_of(self.salt, key))


def make_ring(
    keys: Iterable[str],
    key_file: str | None,
    salt: bytes,
    control: bytes,
) -> KeyRing:
    """The ring of these keys and of those in a file; `control` is the control token's digest.

    Who has a key without a name has one that follows from key and salt.
    """
    names = dict.fromkeys(keys, "") | ({} if key_file is None else read_key_file(Path(key_file)))
    accounts = {
        digest_of(salt, key): name or digest_of(salt, f"name of {key}").hex()[:16]
        for key, name in names.items()
    }
    if control in accounts:
        raise KeyFileError("--control-token must be another secret than the API keys")
    return KeyRing(salt, control, accounts)


def read_key_file(path: Path) -> dict[str, str]:
    """Names by key, from lines of `name = key`; a name may have several keys."""
    names: dict[str, str] = {}
    try:
        text, mode = path.read_text(encoding="utf-8"), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise KeyFileError(f"--api-key-file {path}: {reason}") from None
    if mode & 0o004:
        _log.warning(f"{path}: every user of this machine can read the keys; type chmod 600 {path}")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, key = (part.strip() for part in line.partition("="))
        where = f"--api-key-file {path}, line {number}"
        if not _ACCOUNT.fullmatch(name) or name in (NO_KEY, OPERATOR) or not key:
            raise KeyFileError(
                f"{where}: must be 'name = key', with a name of at most 64 letters, digits and "
                f"._@- that is neither {NO_KEY!r} nor {OPERATOR!r}"
            )
        if names.setdefault(key, name) != name:
            raise KeyFileError(f"{where}: {name!r} has the key of {names[key]!r}")
    if not names:
        raise KeyFileError(f"--api-key-file {path}: has no keys; write lines of 'name = key'")
    return names
