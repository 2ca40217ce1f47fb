"""The command `quadriga serve MODEL`: a model behind an OpenAI-style API, and a page to talk to it."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from quadriga.commands.generation_flags import MODEL_HELP, add_engine_flags, open_engine
from quadriga.errors import ConfigError, WorkerError
from quadriga.rollout.interface import SamplingParams

PORT = 8000
KEY_VARIABLE = "QUADRIGA_API_KEY"
LONGEST_ANSWER = 1024


def main(argv: Sequence[str]) -> int:
    """Runs the command until Ctrl-C; raises one of Quadriga's errors where it cannot."""
    options = command_parser().parse_args(argv)
    from quadriga.agents.endpoint.server import LOOPBACK, listen
    from quadriga.agents.tool_formats import tool_format
    from quadriga.checkpoint.huggingface import model_path

    key = _key(options.api_key)
    if options.host not in LOOPBACK and key is None:
        raise ConfigError(
            f"--host {options.host} lets other machines in, and there is no key that they must know",
            f"add --api-key (one is made and printed), or set {KEY_VARIABLE}",
        )
    defaults = SamplingParams(
        temperature=options.temperature, top_p=options.top_p, top_k=options.top_k, max_new_tokens=options.max_new_tokens
    )
    tool_format(options.tool_format)
    path = model_path(options.model)
    listener = listen(options.host, options.port)  # before the model is loaded: a port that is taken shows at once
    with listener:
        print(f"loading {options.model} …", flush=True)
        return asyncio.run(_serve(options, path, listener, key, defaults))


async def _serve(
    options: argparse.Namespace, path: str, listener: socket.socket, key: str | None, defaults: Any
) -> int:
    from quadriga.agents.endpoint.app import Limits, create_app
    from quadriga.agents.endpoint.page import page_routes
    from quadriga.agents.endpoint.server import LOOPBACK, LoopServer
    from quadriga.agents.serving import LiveService, OneModel, ServedPolicy
    from quadriga.data.chat import ChatEncoder
    from quadriga.models.load import end_token_ids, load_tokenizer
    from quadriga.rollout.service import GenerationService

    tokenizer = load_tokenizer(path)
    encoder = ChatEncoder(tokenizer, options.chat_template)
    # A tokenizer of its own for the engine: it looks for stop texts in another thread.
    engine = open_engine(options, path, load_tokenizer(path), options.max_model_len)
    ends = end_token_ids(engine.module, tokenizer)
    device = engine.module.device
    service = GenerationService(engine, choose_device=lambda: _use(device))
    live = LiveService(service)
    try:
        policy = ServedPolicy(
            live,
            encoder,
            ends,
            defaults=defaults,
            context_tokens=engine.longest,
            tool_format=options.tool_format,
            deadline_s=options.timeout,
        )
        backend = OneModel(policy, options.name or options.model, int(time.time()), key)
        is_local = options.host in LOOPBACK
        # The engine's deadline comes first: an answer that is cut is better than none.
        limits = Limits(call_s=options.timeout + 15)
        server = LoopServer(create_app(backend, limits, page_routes(), LOOPBACK if is_local else None), listener)
        live.on_failure = server.ask_to_stop
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.ask_to_stop)
        sys.setswitchinterval(0.0005)  # the engine's thread must not keep an answer waiting for 5 ms
        await server.start()
        _greet(options, server.port, key, encoder.chat_template is not None, is_local)
        await server.wait()
    finally:
        live.close()
    if live.failure is not None:
        raise WorkerError(f"the engine has failed: {live.failure}", "start the server anew") from live.failure
    print("stopped", flush=True)
    return 0


def _greet(options: argparse.Namespace, port: int, key: str | None, has_template: bool, is_local: bool) -> None:
    host = "localhost" if is_local else options.host
    host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    print(f"{options.name or options.model}: http://{host}:{port}/   (Ctrl-C ends it)")
    if not has_template:
        print("the model has no chat template: /v1/completions works, /v1/chat/completions needs --chat-template")
    if not is_local:
        print("whoever has the address and the key can use the model; it is not encrypted")
    print(f"for clients: OPENAI_BASE_URL=http://{host}:{port}/v1 OPENAI_API_KEY={_shown(options, key)}", flush=True)


def _shown(options: argparse.Namespace, key: str | None) -> str:
    """The key where this command has made it; a key that somebody else has chosen is not printed."""
    if key is None:
        return "none"
    return key if options.api_key == "" else "…"


def _key(given: str | None) -> str | None:
    if given == "":
        return secrets.token_urlsafe(24)
    return given or os.environ.get(KEY_VARIABLE) or None


def _use(device: Any) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga serve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve a model with an OpenAI-style API (/v1/chat/completions, /v1/completions, /v1/models), streams and "
        "tools included, and a page to talk to it at /. Without a key it is there for this machine alone.",
        epilog="""examples:
  quadriga serve Qwen/Qwen2.5-0.5B-Instruct
  quadriga serve outputs/quadriga/my_run --port 9000
  quadriga serve builtin:arithmetic
  quadriga serve my_model --host 0.0.0.0 --api-key        # for other machines: a key is made and printed""",
    )
    parser.add_argument("model", help=MODEL_HELP)
    server = parser.add_argument_group("server")
    server.add_argument("--port", type=int, default=PORT, help=f"port ({PORT}; 0: a free one)")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    server.add_argument(
        "--api-key",
        nargs="?",
        const="",
        help=f"key that clients must send; without a value, one is made and printed (default: {KEY_VARIABLE}, else none)",
    )
    server.add_argument("--name", help="name of the model for clients (default: MODEL as it was given)")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds for an answer, which then ends (600)")
    model = parser.add_argument_group("model")
    add_engine_flags(model)
    model.add_argument("--max-model-len", type=int, help="longest prompt and answer together (default: the model's)")
    model.add_argument("--tool-format", default="hermes", help="how the model writes tool calls (hermes)")
    sampling = parser.add_argument_group("sampling, where a client does not say")
    sampling.add_argument(
        "--max-new-tokens", type=int, default=LONGEST_ANSWER, help=f"longest answer ({LONGEST_ANSWER})"
    )
    sampling.add_argument("--temperature", type=float, default=1.0, help="0: greedy (1)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass (1: all)")
    sampling.add_argument("--top-k", type=int, default=-1, help="keep so many of the likeliest tokens (-1: all)")
    return parser
