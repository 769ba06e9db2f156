"""Running programs, and folders that are made exactly once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci import cache, venv
from ci.errors import BuildError, ToolchainError
from ci.process import run


def test_output_comes_back_and_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    output = run([sys.executable, "-u", "-c", code], title="t", error=BuildError, hint="h", log=log)
    assert output == log.read_text() and sorted(output.split()) == ["err", "out"]


def test_failure_shows_code_command_tail_log_and_hint(tmp_path: Path) -> None:
    code = "print('first'); [print(i) for i in range(100)]; print('the end'); raise SystemExit(3)"
    with pytest.raises(BuildError) as caught:
        command = [sys.executable, "-c", code]
        run(command, title="compiling", error=BuildError, hint="do this", log=tmp_path / "log")
    text = str(caught.value)
    assert text.startswith("compiling: expected exit code 0, got 3.") and text.endswith("Next: do this")
    assert (
        "the end" in text
        and str(tmp_path / "log") in text
        and "first\n" not in text.split("Whole output")[0][200:]
    )
    assert "first" in (tmp_path / "log").read_text()


def test_brackets_in_a_title_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of files and rows are in titles, and a wheel says any."""
    run([sys.executable, "-c", ""], title="building [/x] [red]", error=BuildError, hint="h")
    assert "done building [/x] [red] (" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_the_callers_error() -> None:
    with pytest.raises(ToolchainError, match="No such file"):
        run(["/nonexistent/program"], title="t", error=ToolchainError, hint="h")


def test_the_umask_reaches_the_program(tmp_path: Path) -> None:
    run(["touch", str(tmp_path / "f")], title="t", error=BuildError, hint="h", umask=0o077)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_a_folder_is_filled_once(tmp_path: Path) -> None:
    calls = []
    for _ in range(2):
        cache.make_once(tmp_path / "x", lambda folder: calls.append(folder))
    assert calls == [tmp_path / "x"]


def test_a_killed_attempt_is_made_anew(tmp_path: Path) -> None:
    def stop(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.make_once(tmp_path / "x", stop)
    cache.make_once(tmp_path / "x", lambda folder: (folder / "whole").touch())
    assert not (tmp_path / "x" / "half").exists() and (tmp_path / "x" / "whole").exists()


def test_two_processes_fill_a_folder_once(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from ci import cache
def fill(folder):
    time.sleep(0.5)
    with open(folder.parent / "count", "a") as handle: handle.write("x")
cache.make_once(Path(sys.argv[1]), fill)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    for process in [subprocess.Popen(command) for _ in range(2)]:
        assert process.wait() == 0
    assert (tmp_path / "count").read_text() == "x"


def test_the_key_tells_its_parts_apart() -> None:
    assert cache.key("ab", "c") != cache.key("a", "bc")
    assert cache.key("a", b"b") == cache.key(b"a", "b")


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASH_KDA_CACHE", str(tmp_path / "here"))
    assert cache.root() == tmp_path / "here"
    monkeypatch.delenv("FLASH_KDA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root() == tmp_path / "xdg" / "flash_kda"


def test_a_wrong_hash_stops_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip takes nothing whose hash is not the locked one."""
    (tmp_path / "bad.txt").write_text("packaging==26.4 --hash=sha256:" + "0" * 64 + "\n")
    monkeypatch.setattr(venv, "REQUIREMENTS", tmp_path)
    monkeypatch.setenv("FLASH_KDA_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ToolchainError, match="HASH"):
        venv.locked("bad")


def test_a_python_that_does_not_run_is_refused() -> None:
    with pytest.raises(ToolchainError, match="does not run"):
        venv.locked("ci", python=Path("/bin/false"))
