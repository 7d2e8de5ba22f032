"A server in a process of its own, for tests and benchmarks."
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx

COMMAND = str(Path(sys.executable).with_name("mlx_spark"))


class ServerProcess:
    "`mlx_spark serve FLAGS` at a free port; a context manager."
    def __init__(self, *flags: str, **env: str):
        self.process = subprocess.Popen(
            [COMMAND, "serve", "--port", "0", *flags], env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        found = re.search(r"at (http://\S+)/v1$", line.strip())
        if not found: raise RuntimeError(f"no server: {line}{self.process.communicate()[1]}")
        self.url, self.said = found[1], []
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def metric(self, name: str) -> float:
        "The value of one line of /metrics."
        page = httpx.get(f"{self.url}/metrics").text
        return next(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name} "))

    def health(self) -> dict: return httpx.get(f"{self.url}/health").json()

    def stop(self, sig: int = signal.SIGTERM, within_s: float = 30) -> int:
        "Send a signal and wait; the exit code."
        self.process.send_signal(sig)
        return self.process.wait(within_s)

    def __enter__(self): return self

    def __exit__(self, *_):
        if self.process.poll() is None: self.process.kill()
        self.process.wait()
