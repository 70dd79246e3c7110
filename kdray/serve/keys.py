"""API keys: who may generate, and who may control. Only digests are kept."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kdray.errors import ConfigError
from kdray.serve.failure import INVALID, Failure, Refused

API_KEYS_ENV, ADMIN_KEYS_ENV = "KDRAY_API_KEYS", "KDRAY_ADMIN_KEYS"
MIN_CHARACTERS = 8
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """SHA-256 digests of the keys that are let in.

    api            may generate; none: everybody may
    admin          may control as well; none: see open_control
    open_control   with no keys at all, control is open to whoever reaches the endpoint
    """

    api: frozenset[bytes] = frozenset()
    admin: frozenset[bytes] = frozenset()
    open_control: bool = False

    @classmethod
    def load(
        cls,
        environment: Mapping[str, str],
        *,
        api_key_file: str | None = None,
        admin_key_file: str | None = None,
        local: bool,
    ) -> Self:
        """Keys of files (one a line, # begins a comment) and of the environment (separated by
        spaces or commas). ConfigError: a file that cannot be read, a key that is too short.

        local   only this machine can reach the endpoint
        """
        api = _digests([*_from_file(api_key_file), *_from_text(environment.get(API_KEYS_ENV))])
        admin = _digests(
            [*_from_file(admin_key_file), *_from_text(environment.get(ADMIN_KEYS_ENV))]
        )
        return cls(api=api, admin=admin, open_control=local and not api and not admin)

    def check_api(self, authorization: str | None) -> None:
        """Refused, with 401, unless the header carries one of the keys or none is needed."""
        if self.api and not _known(_presented(authorization), self.api | self.admin):
            raise _unauthorised(authorization)

    def check_admin(self, authorization: str | None) -> None:
        """Refused, with 401 or 403, unless the header carries an admin key."""
        if self.open_control:
            return
        if not self.admin:
            raise Refused(
                Failure(
                    status=403,
                    message=f"control is closed: no admin key is set (admin_key_file or "
                    f"{ADMIN_KEYS_ENV})",
                    kind=INVALID,
                    code="no_admin_key",
                )
            )
        key = _presented(authorization)
        if _known(key, self.admin):
            return
        if _known(key, self.api):
            raise Refused(
                Failure(
                    status=403,
                    message="this key may generate, not control: send an admin key",
                    kind=INVALID,
                    code="no_admin_key",
                )
            )
        raise _unauthorised(authorization)


def is_loopback(host: str) -> bool:
    return host in _LOOPBACK or host.startswith("127.")


def check_bind(host: str, keys: KeyRing, *, keyless: bool) -> None:
    """ConfigError where a network could use the endpoint without a key and nobody allowed that."""
    if is_loopback(host) or keys.api or keyless:
        return
    raise ConfigError(
        f"{host} opens the endpoint to the network without any key: give api_key_file "
        f"(--api-key-file) or {API_KEYS_ENV}, listen on 127.0.0.1, or allow it with keyless: true "
        "(--keyless)"
    )


def _presented(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _known(key: str, digests: frozenset[bytes]) -> bool:
    """Compares with every digest, so that the time says nothing of which one is near."""
    own = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    found = False
    for digest in digests:
        found |= hmac.compare_digest(own, digest)
    return found


def _unauthorised(authorization: str | None) -> Refused:
    message = "no API key was given" if authorization is None else "the API key is not known here"
    return Refused(
        Failure(
            status=401,
            message=f"{message}: send the header Authorization: Bearer KEY",
            kind=INVALID,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    )


def _from_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of keys cannot be read: {error}") from None
    keys = [line.partition("#")[0].strip() for line in lines]
    if not any(keys):
        raise ConfigError(f"{path} holds no key: write one a line")
    return [key for key in keys if key]


def _from_text(text: str | None) -> list[str]:
    return (text or "").replace(",", " ").split()


def _digests(keys: Iterable[str]) -> frozenset[bytes]:
    digests = set()
    for key in keys:
        if len(key) < MIN_CHARACTERS or any(character.isspace() for character in key):
            raise ConfigError(
                f"a key must have at least {MIN_CHARACTERS} characters and no spaces; "
                "openssl rand -hex 24 makes a good one"
            )
        digests.add(hashlib.sha256(key.encode()).digest())
    return frozenset(digests)
