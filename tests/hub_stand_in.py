"""A stand-in for the Hugging Face Hub on localhost: the two requests that a snapshot makes, answered from a dict of files."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from llm_perf_opt.workspace.externals.places import blob_id


class Hub:
    """What the stand-in holds, and which files were asked for."""

    def __init__(self, repository: str, commits: dict[str, dict[str, bytes]]) -> None:
        self.repository = repository
        self.commits = commits
        self.kept_elsewhere: set[str] = set()
        """Files that the real Hub keeps outside of git."""
        self.corrupted: set[str] = set()
        self.asked: list[str] = []
        self.url = ""

    def tree(self, commit: str) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for path, content in self.commits[commit].items():
            one: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
            if path in self.kept_elsewhere:
                one |= {"oid": "0" * 40, "lfs": {"oid": sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}
            found.append(one)
        return found


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """The stand-in, listening until the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.split("?")[0]
            before, _, commit = path.rpartition("/tree/")
            if before == f"/api/models/{hub.repository}" and commit in hub.commits:
                self._send(json.dumps(hub.tree(commit)).encode(), {"Content-Type": "application/json"}, body)
                return
            _, _, rest = path.partition(f"/{hub.repository}/resolve/")
            commit, _, name = rest.partition("/")
            if name in hub.commits.get(commit, {}):
                content = hub.commits[commit][name]
                hub.asked.append(name)
                shown = content[:-1] + b"?" if name in hub.corrupted else content
                self._send(shown, {"X-Repo-Commit": commit, "ETag": f'"{blob_id(content)}"'}, body)
                return
            self.send_response(404)
            self.send_header("X-Error-Code", "RevisionNotFound" if hub.repository in path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
