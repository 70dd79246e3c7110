#!/usr/bin/env python3
"""An OpenAI-compatible endpoint on Ray Serve, until it is told to stop.

    python jobs/serve.py
    python jobs/serve.py --model /models/kimi --drafter /models/kimi-dflash --tp 8 --port 8000
    ray job submit --working-dir . -- python jobs/serve.py --served-name kimi

When it is ready it says how to call it and streams one sample answer through HTTP. A rank that dies
or hangs costs a restart, not a request. SIGINT and SIGTERM let open requests finish, remove the
endpoint and the engine, and end with status 0; an engine that is given up ends it with status 1 and
the cause. Keys: KDRAY_API_KEYS and KDRAY_ADMIN_KEYS, or files of them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Whatever takes long to import is imported in serve(), where a Ctrl-C ends without a traceback.
from serve_sample import Address, how_to_call, show_sample, unhealthy

from kdray.arguments import (
    HelpFormatter,
    add_engine_arguments,
    add_placement_arguments,
    engine_config,
    placement_of,
)
from kdray.config import EngineConfig
from kdray.errors import KdrayError

if TYPE_CHECKING:
    from restart_lines import RestartLines

    from kdray.actors.supervised import SupervisedEngine
    from kdray.serve.admission import ServeLimits
    from kdray.serve.keys import KeyRing

_POLL_S, _POLLS = 5.0, 3
_SERVE_CPUS = 2  # room for Ray Serve's controller and proxy beside the ranks
_QUIET_ENV = {"RAY_SERVE_LOG_TO_STDERR": "0", "TOKENIZERS_PARALLELISM": "false"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        serve(engine_config(arguments), arguments)
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before it was ready; afterwards SIGINT is an orderly end
        return 130
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_engine_arguments(parser)
    add_placement_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0 opens it to the network, which wants a key")
    add("--port", type=int, default=8000, help="of the endpoint")
    add(
        "--direct-port",
        type=int,
        metavar="N",
        help="one more, past Ray Serve's proxy: lower latency",
    )
    add("--served-name", help="the model id that clients write (default: the model's own name)")
    add("--no-sample", action="store_true", help="no sample request when it is ready")
    add("--drain-s", type=float, default=120.0, help="how long open requests may run on at the end")
    add = parser.add_argument_group("who may come in").add_argument
    add("--api-key-file", metavar="FILE", help="keys that may generate, one a line")
    add("--admin-key-file", metavar="FILE", help="keys that may control as well")
    add("--keyless", action="store_true", help="open to the network without any key")
    add("--max-open", type=int, metavar="N", help="outputs running or waiting (default: 4096)")
    add("--max-queued", type=int, metavar="N", help="outputs that wait (default: 1024)")
    add("--max-queued-tokens", type=int, metavar="N", help="their prompt tokens (default: 1 Mi)")
    add("--deadline-s", type=float, help="longest time a request may take (default: no limit)")
    return parser.parse_args(argv)


def serve(config: EngineConfig, arguments: argparse.Namespace) -> None:
    placement, keys = placement_of(arguments), load_keys(arguments)
    if not os.environ.get("RAY_ADDRESS"):  # what a shared cluster has is seen only there
        from kdray.engine import resolve

        check_port(arguments.host, arguments.port, "--port")
        if arguments.direct_port is not None:
            check_port(arguments.host, arguments.direct_port, "--direct-port")
        resolve(config)
    for name, value in _QUIET_ENV.items():
        os.environ.setdefault(name, value)
    # Ray reads its environment when it is imported, and connect() sets that up: so it comes first.
    from kdray.actors.cluster import connect

    connect(min_cpus=config.tp + _SERVE_CPUS)
    import ray

    from kdray.actors.supervised import SupervisedEngine
    from kdray.serve import deployment

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        deployment.prepare(arguments.host, arguments.port)
        print(f"starting {config.model} on {config.tp} rank(s) ...", flush=True)
        if config.synthetic_acceptance is not None and config.mode != "plain":
            print("SYNTHETIC ACCEPTANCE: drafts hold by chance, the text is not the model's")
        if config.load_format == "dummy":
            print("DUMMY WEIGHTS: random numbers, so its text means nothing", flush=True)
        engine = None
        try:
            engine = SupervisedEngine.start(config, placement)
            address = endpoint(engine, keys, arguments)
            attend(address, engine, sample=not arguments.no_sample)
        finally:
            # The endpoint first, once what is open has ended. In a cluster that others use nothing
            # of ours may stay; our own one ends with this process.
            deployment.stop(leave_serve="RAY_ADDRESS" not in os.environ)
            if engine is not None:
                engine.stop()
    finally:
        ray.shutdown()


def load_keys(arguments: argparse.Namespace) -> KeyRing:
    """Raises ConfigError where a network could come in and nobody needs a key."""
    from kdray.serve.keys import KeyRing, check_bind, is_loopback

    keys = KeyRing.load(
        os.environ,
        api_key_file=arguments.api_key_file,
        admin_key_file=arguments.admin_key_file,
        local=is_loopback(arguments.host),
    )
    check_bind(arguments.host, keys, keyless=arguments.keyless)
    return keys


def limits_of(arguments: argparse.Namespace) -> ServeLimits:
    from kdray.serve.admission import ServeLimits

    given = {
        "max_open_choices": arguments.max_open,
        "max_queued_choices": arguments.max_queued,
        "max_queued_tokens": arguments.max_queued_tokens,
        "deadline_s": arguments.deadline_s,
    }
    return ServeLimits(**{name: value for name, value in given.items() if value is not None})


def check_port(host: str, port: int, option: str) -> None:
    """Say at once what would otherwise fail when the model is loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise KdrayError(
                f"cannot listen on {host}:{port} ({error}): stop what uses it, or "
                f"give another {option}"
            ) from None


def attend(address: Address, engine: SupervisedEngine, *, sample: bool) -> None:
    """Say that it is ready and how to call it, then wait for a signal."""
    from restart_lines import RestartLines

    stopped = stop_on_signals()
    restarts = RestartLines(engine.supervisor)
    print(how_to_call(address), flush=True)
    if sample:
        show_sample(address)
    try:
        wait(address, restarts, stopped)
    finally:
        restarts.close()
    print("stopping: open requests may finish (Ctrl-C again ends them)", flush=True)


def stop_on_signals() -> threading.Event:
    """Set by SIGINT or SIGTERM; the second signal of a kind acts as usual."""
    stopped = threading.Event()

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopped.set()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return stopped


def endpoint(engine: SupervisedEngine, keys: KeyRing, arguments: argparse.Namespace) -> Address:
    """Ray Serve in front of the engine."""
    from kdray.serve import deployment
    from kdray.serve.arguments import Hosting
    from kdray.serve.replay import ReplayingClient

    own_key = None
    if keys.api:  # the sample's, known to nobody else
        own_key = secrets.token_hex(24)
        keys = replace(keys, api=keys.api | {hashlib.sha256(own_key.encode()).digest()})
    model = deployment.ServedModel(
        name=arguments.served_name or engine.info["name"],
        tokenizer_folder=Path(engine.info["model_folder"]),
        load_format=engine.info["load_format"],
        limits=limits_of(arguments),
        keys=keys,
    )
    connect = functools.partial(ReplayingClient.connect, engine.supervisor)
    hosting = Hosting(drain_s=arguments.drain_s, direct_port=arguments.direct_port)
    deployment.start(connect, model, hosting, host=arguments.host, port=arguments.port)
    return Address(host=arguments.host, port=arguments.port, model=model.name, key=own_key)


def wait(address: Address, restarts: RestartLines, stopped: threading.Event) -> None:
    """Until a signal, saying what was restarted; raises where the endpoint says that the engine is
    gone."""
    causes: list[str] = []
    while not stopped.wait(timeout=_POLL_S):
        for line in restarts.new():
            print(line, flush=True)
        cause = unhealthy(address)
        causes = [*causes, cause] if cause is not None else []
        # One bad answer may fall into the moment in which Ray Serve replaces the endpoint.
        if len(causes) == _POLLS:
            raise KdrayError(f"the engine is gone: {causes[0]}")


if __name__ == "__main__":
    sys.exit(main())
