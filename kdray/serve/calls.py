"""Calls of actors that are no part of the HTTP request they are made for."""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import Context
from typing import Any


def call_apart(method: Any, *arguments: Any) -> Awaitable[Any]:
    """An actor's method, called as by no Ray task.

    Where a client leaves, Ray Serve's proxy cancels the Ray task of its request, and Ray cancels
    with it every call that the task has made and that has not ended: the abort that cleans up
    behind the request would be dropped on its way. Whose a call is Ray reads from a context
    variable, so an empty context makes it nobody's.
    """
    answer: Awaitable[Any] = Context().run(method.remote, *arguments)
    return answer
