"""A fake chat endpoint on a real HTTP server on 127.0.0.1, with faults on request."""

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer:
    """Answers chat completions; a context manager.

    Args:
        answer: From the messages of a request, or with `of_body` from its whole body, to the text of its answer, or to a choice with
            its message.
        plan: From the number of a request (from 0) and its messages to what happens: `"ok"`, a status, `"hang"` (until
            the server stops), `"cut"`, `"drip"` (for six seconds a byte each 20 ms; `"drip headers"`: of the headers, `"continue"`:
            `100 Continue`), `"length"` (ended by the limit), `"garbage"`, a `(status, headers)` pair, or bytes with status 500.
    """

    def __init__(
        self,
        answer: Callable,
        plan: Callable = lambda number, messages: "ok",
        *,
        of_body: bool = False,
    ):
        self.answer, self.plan, self.of_body = answer, plan, of_body
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.arrived = threading.Condition()
        self.stopped = threading.Event()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with double.arrived:
                    number = len(double.requests)
                    double.requests.append(body)
                    double.headers.append(dict(self.headers))
                    double.arrived.notify_all()
                with contextlib.suppress(OSError):  # the client was killed, or closed the connection
                    self.act(double.plan(number, body["messages"]), body)

            def act(self, what, body):
                if what == "hang":
                    double.stopped.wait(60)
                elif what == "cut":
                    self.reply(200, b'{"choices": [{"mess', length=4000)
                elif what in ("drip", "drip headers", "continue"):
                    if what == "drip":
                        self.reply(200, b"", length=300)
                    elif what == "drip headers":
                        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                    for _ in range(300):
                        self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" if what == "continue" else b" ")
                        if double.stopped.wait(0.02):
                            break
                elif isinstance(what, bytes):
                    self.reply(500, what)
                elif what == "garbage":
                    self.reply(200, b"<html>no JSON</html>")
                elif isinstance(what, tuple):
                    self.reply(what[0], b'{"error": "told to"}', headers=what[1])
                elif isinstance(what, int):
                    self.reply(what, json.dumps({"error": f"key {self.headers.get('Authorization')}"}).encode())
                else:
                    text = double.answer(body if double.of_body else body["messages"])
                    more = text if isinstance(text, dict) else {"message": {"content": text}}
                    choice = {**more, "finish_reason": "length" if what == "length" else "stop"}
                    usage = {"prompt_tokens": 100, "completion_tokens": len(str(more["message"]["content"]).split())}
                    self.reply(200, json.dumps({"choices": [choice], "usage": usage}).encode())

            def reply(self, status, data, *, length=None, headers=()):
                self.send_response(status)
                self.send_header("Content-Length", str(length or len(data)))
                for name, value in dict(headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def wait_for(self, number):
        """Wait until this many requests have arrived; False after a minute."""
        with self.arrived:
            return self.arrived.wait_for(lambda: len(self.requests) >= number, timeout=60)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.stopped.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def texts_of(messages):
    """Text and image URL (or None) of the last message of a chat."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        return content, None
    return content[0]["text"], content[1]["image_url"]["url"]
