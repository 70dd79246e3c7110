#!/usr/bin/env python3
"""An OpenAI-compatible endpoint on Ray Serve, until it is told to stop.

    python jobs/serve.py
    python jobs/serve.py --model /models/kimi --drafter /models/kimi-dflash --tp 8 --port 8000
    ray job submit --working-dir . -- python jobs/serve.py --served-name kimi

When it is ready it says how to call it and streams one sample answer through HTTP. SIGINT and
SIGTERM let open requests finish, remove the endpoint and the engine, and end with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kdray.actors.cluster import connect
from kdray.arguments import add_engine_arguments, engine_config
from kdray.config import EngineConfig
from kdray.engine import resolve
from kdray.errors import KdrayError

SAMPLE = "Tell a story about Mia and a red kite."
SAMPLE_TOKENS = 160
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0 opens it to the network, without any key")
    add("--port", type=int, default=8000)
    add("--served-name", help="the model id that clients write; default: the model's own name")
    add("--no-sample", action="store_true", help="no sample request when it is ready")
    return parser.parse_args(argv)


def serve(config: EngineConfig, arguments: argparse.Namespace) -> None:
    if not os.environ.get("RAY_ADDRESS"):  # what a shared cluster has is seen only there
        check_port(arguments.host, arguments.port)
        resolve(config)
    for name, value in _QUIET_ENV.items():
        os.environ.setdefault(name, value)
    connect(min_cpus=config.tp + _SERVE_CPUS)
    import ray

    from kdray.actors.gang import Gang

    try:
        print(f"starting {config.model} on {config.tp} rank(s) ...", flush=True)
        gang = Gang.start(config)
        try:
            with endpoint(gang, arguments) as name:
                attend(arguments, name)
        finally:
            gang.stop()
    finally:
        ray.shutdown()


def check_port(host: str, port: int) -> None:
    """Say at once what would otherwise fail when the model is loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise KdrayError(
                f"cannot listen on {host}:{port} ({error}): stop what uses it, or give --port"
            ) from None


def attend(arguments: argparse.Namespace, name: str) -> None:
    """Say that it is ready and how to call it, then wait for a signal."""
    stopped = stop_on_signals()
    print(how_to_call(arguments.host, arguments.port, name), flush=True)
    if not arguments.no_sample:
        show_sample(arguments.host, arguments.port, name)
    wait(arguments, stopped)
    print("stopping: open requests may finish", flush=True)


def stop_on_signals() -> threading.Event:
    """Set by SIGINT or SIGTERM; the second signal of a kind acts as usual."""
    stopped = threading.Event()

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopped.set()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return stopped


@contextlib.contextmanager
def endpoint(gang: Any, arguments: argparse.Namespace) -> Iterator[str]:
    """Ray Serve in front of the gang; yields the served name, leaves by draining."""
    from kdray.serve import deployment

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    name = arguments.served_name or gang.info["name"]
    model = deployment.ServedModel(name=name, tokenizer_folder=Path(gang.info["model_folder"]))
    deployment.start(gang.driver, model, host=arguments.host, port=arguments.port)
    try:
        yield name
    finally:
        # In a cluster that others use nothing of ours may stay; our own one ends with this process.
        deployment.stop(leave_serve="RAY_ADDRESS" not in os.environ)


def wait(arguments: argparse.Namespace, stopped: threading.Event) -> None:
    """Until a signal; raises where the endpoint says that the engine is gone."""
    causes: list[str] = []
    while not stopped.wait(timeout=_POLL_S):
        cause = unhealthy(arguments.host, arguments.port)
        causes = [*causes, cause] if cause is not None else []
        # One bad answer may fall into the moment in which Ray Serve replaces the endpoint.
        if len(causes) == _POLLS:
            raise KdrayError(f"the engine is gone: {causes[0]}")


def unhealthy(host: str, port: int) -> str | None:
    """None, or what /health answered."""
    try:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=10)) as connection:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = response.read().decode(errors="replace")
    except OSError as error:
        return f"no answer from the endpoint: {error}"
    if response.status == 200:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body


def how_to_call(host: str, port: int, name: str) -> str:
    base = f"http://{host}:{port}/v1"
    message = {"role": "user", "content": SAMPLE}
    body = json.dumps({"model": name, "messages": [message], "temperature": 0, "stream": True})
    return (
        f"serving {name!r} at {base}\n\n"
        f"  curl -sN {base}/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n"
    )


def show_sample(host: str, port: int, name: str) -> None:
    """Stream one chat completion to stdout, then its accept length."""
    usage: dict[str, Any] = {}
    print(f"> {SAMPLE}")
    for chunk in stream_chat(host, port, name):
        if "error" in chunk:
            raise KdrayError(f"the sample request failed: {chunk['error']['message']}")
        for choice in chunk["choices"]:
            print(choice["delta"].get("content", ""), end="", flush=True)
        usage = chunk["usage"] or usage
    mean = usage["kdray"]["accept_length_mean"]
    speculation = "plain decoding" if mean is None else f"accept length {mean:.2f}"
    print(f"\n\n  {usage['completion_tokens']} tokens, {speculation}\n", flush=True)


def stream_chat(host: str, port: int, name: str) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed sample."""
    body = {
        "model": name,
        "messages": [{"role": "user", "content": SAMPLE}],
        "max_tokens": SAMPLE_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=120)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise KdrayError(f"the sample request failed: {response.read().decode()}")
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)


if __name__ == "__main__":
    sys.exit(main())
