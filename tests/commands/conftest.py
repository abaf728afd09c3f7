"""The command line inside this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from normrnn.cli import main

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call the command line: exit code, standard output, standard error."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        code = exited.value.code
        assert isinstance(code, int)
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call
