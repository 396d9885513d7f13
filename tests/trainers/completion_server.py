"""The endpoints of a vLLM server that TRL's asynchronous rollouts call, on 127.0.0.1, with a tiny model on the CPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


class CompletionServer(ThreadingHTTPServer):
    """Samples completions of token ids; counts the requests per path."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.max_model_len = model, max_model_len
        self.lock = threading.Lock()  # weights do not change within a completion
        self.requests: dict[str, int] = {}
        self.prompts: list[list[int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @torch.no_grad()
    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """One completion with the log-probabilities of its tokens."""
        generator = torch.Generator().manual_seed(request["seed"])
        ids, log_probs = list(request["prompt"]), []
        eos = self.model.generation_config.eos_token_id
        while len(log_probs) < request["max_tokens"] and (not log_probs or ids[-1] != eos):
            logits = self.model(torch.tensor([ids])).logits[0, -1] / request["temperature"]
            token = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
            log_probs.append(float(logits.log_softmax(0)[token]))
            ids.append(token)
        answer = {"token_ids": ids[len(request["prompt"]) :], "logprobs": {"token_logprobs": log_probs}}
        return {"choices": [answer]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CompletionServer

    def do_GET(self) -> None:
        self._answer({"data": [{"max_model_len": self.server.max_model_len}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.prompts.append(request["prompt"])
            self._answer(self.server.complete(request))

    def _answer(self, content: dict[str, Any]) -> None:
        self.server.requests[self.path] = self.server.requests.get(self.path, 0) + 1
        body = json.dumps(content).encode()
        self.send_response(200 if self.path in ("/health", "/v1/models", "/v1/completions") else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(model: Any, max_model_len: int) -> Iterator[CompletionServer]:
    """A running server; it ends with the context."""
    server = CompletionServer(model, max_model_len)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
