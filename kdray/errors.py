"""Every error a user can meet, drawn as a tree.

KdrayError
├── ConfigError          a wish that cannot be granted: wrong value, impossible combination
├── CheckpointError      a model folder that cannot be loaded: missing, truncated or misshapen
│   └── UnsupportedModel an architecture or quantisation kdray does not serve
├── InvalidRequest       one request is wrong or can never fit; the engine is fine
├── GangError            the group of ranks could not start or is gone
│   ├── PlacementError   the cluster cannot hold the gang
│   ├── StartupError     a rank failed while starting
│   └── RankFailed       a rank died or stopped answering while running
├── ProfileConflict      a profile is open already, or there is none to end
├── KernelError          a CUDA kernel that cannot be compiled, loaded or launched
└── EngineClosed         a call after close()
"""

from __future__ import annotations


class KdrayError(Exception):
    """Base of every error kdray raises on purpose."""


class ConfigError(KdrayError, ValueError):
    """A wish that cannot be granted; the message says which field and what would do."""


class CheckpointError(KdrayError):
    """A model folder that cannot be loaded; the message names the file or the tensor."""


class UnsupportedModel(CheckpointError):
    """A well-formed checkpoint of an architecture or quantisation kdray does not serve."""


class InvalidRequest(KdrayError, ValueError):
    """A request that is wrong or can never fit; nothing was queued.

    `param` names the offending field as the client spelled it, where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class GangError(KdrayError):
    """The group of ranks could not start or is gone."""


class PlacementError(GangError):
    """The cluster cannot hold the gang; the message gives requested against available."""


class StartupError(GangError):
    """A rank failed while starting; the message carries the rank and its cause."""


class LinkError(StartupError):
    """Ranks that cannot pass data to one another, or pass it wrong; the message names which."""


class RankFailed(GangError):
    """A rank died or stopped answering; the gang is stopped as a whole."""


class ProfileConflict(KdrayError):
    """A profile is open already, or there is none to end."""


class KernelError(KdrayError):
    """A CUDA kernel that cannot be compiled, loaded or launched; the message says what is amiss."""


class EngineClosed(KdrayError):
    """The engine was closed; start a new one."""
