"""A PostgreSQL server of our own on loopback, for as long as a test runs."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def _programs() -> Path | None:
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return versions[-1].parent if versions else None


def _unprivileged() -> str | None:
    """PostgreSQL refuses to run as root: somebody else who can, None if we are no root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), "")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Its URL; the test is skipped, and says so, where no server can be started."""
    programs, user = _programs(), _unprivileged()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed: initdb is not to be found")
    if user == "":
        pytest.skip("PostgreSQL does not run as root, and there is no other user here")
    home = Path(tempfile.mkdtemp(prefix="normrnn-postgres-"))
    if user is not None:
        shutil.chown(home, user)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(*command: str) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=home, user=user, timeout=120
        )
        if done.returncode:
            pytest.skip(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")

    control, data = str(programs / "pg_ctl"), str(home / "data")
    options = f"-c listen_addresses=127.0.0.1 -p {port} -c unix_socket_directories={home}"
    try:
        call(str(programs / "initdb"), "-D", data, "-U", "tester", "-A", "trust", "--no-sync")
        call(control, "-D", data, "-o", options, "-l", str(home / "log"), "-w", "start")
        try:
            yield f"postgresql://tester@127.0.0.1:{port}/postgres"
        finally:
            call(control, "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)
