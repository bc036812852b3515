"""Control characters in traces, records, file names and arguments are escaped on a terminal, and unchanged in JSON."""

import io
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command import llm_perf
from dataset_builders import added, small_source
from llm_perf_opt.cli.app import main
from llm_perf_opt.cli.progress import BarProgress, PlainProgress
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.terminal import SafeStream, json_text, one_line, raw_stream, safe_streams, visible
from nsys_databases import cut_small
from whole_runs import whole_run

HOSTILE = "\x1b[31m\x1b]0;t\x07\x9b2J\x7f\u202eab\u2066c\u200f\u061c\u2028d"
SHOWN = "\\x1b[31m\\x1b]0;t\\x07\\x9b2J\\x7f\\u202eab\\u2066c\\u200f\\u061c"
"""How it is shown; a space follows in a table."""
_JOINERS = "\u200c\u200d"


def acting(text: str) -> set[str]:
    """Control and invisible characters by their Unicode category, except newline and tab."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {char for char in text if unicodedata.category(char) in kinds and char not in f"\n\t{_JOINERS}"}


def shown(done: subprocess.CompletedProcess[str]) -> str:
    """Return everything that was printed, after checking that it has no control characters and shows the hostile text."""
    assert not acting(done.stdout + done.stderr), done.stderr
    assert "\\x1b[31m" in done.stdout + done.stderr, done.stderr
    return done.stdout + done.stderr


def data(done: subprocess.CompletedProcess[str]) -> Any:
    """Return the printed JSON, after checking that it has no control characters."""
    assert not acting(done.stdout + done.stderr)
    return json.loads(done.stdout)


# --- the definition ---------------------------------------------------------------------------------------------------


def test_what_acts_becomes_an_escape_and_the_rest_stays() -> None:
    assert visible("a\x1b[1mb\r\x00\x85\u2028\u202e\ufeff\ud800\U000e0041") == (
        r"a\x1b[1mb\x0d\x00\x85\u2028\u202e\ufeff\ud800\U000e0041"
    )
    assert visible("two\r\nlines\rover") == "two\nlines\\x0dover"
    kept = "plain\ttext\nwith µ → × é 漢字 \u200d 👩\u200d💻"
    assert visible(kept) == kept
    assert one_line("a\nb\tc\x1b\u2028d\u3000e") == r"a b c\x1b d e"


ALWAYS = [
    *(chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"),
    *map(chr, (0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))),
]
"""Controls, direction marks, separators, surrogates."""


def test_everything_that_must_not_reach_a_terminal() -> None:
    text = visible("".join(ALWAYS))
    assert text.isascii()
    assert text.isprintable()


@given(st.text(alphabet=st.one_of(st.sampled_from(ALWAYS), st.characters())))
def test_nothing_acts_in_any_text(text: str) -> None:
    assert not set(visible(text)) & set(ALWAYS)
    assert visible(visible(text)) == visible(text)
    assert not set(one_line(text)) & {"\n", "\t"}


@given(
    key=st.text(), text=st.text(alphabet=st.one_of(st.sampled_from(ALWAYS), st.characters())), number=st.floats(allow_nan=False)
)
def test_json_comes_back_whole_in_any_encoding(key: str, text: str, number: float) -> None:
    value = [{key: text}, text, None, number if abs(number) < float("inf") else None]
    for encoding in ("utf-8", "ascii", "latin-1"):
        written = json_text(value, encoding)
        assert json.loads(written.encode(encoding)) == json.loads(json.dumps(value))  # two halves may be one character there
        assert visible(written) == written


def test_json_of_what_it_has_no_word_for() -> None:
    assert json.loads(json_text({"a\udcff": ["b\udcfe", float("nan"), 1.5]})) == {"a\udcff": ["b\udcfe", None, 1.5]}
    assert json.loads(json_text({"a\udcff": msgspec.Raw(b'{"b": [1, null]}')})) == {"a\udcff": {"b": [1, None]}}


def test_a_stream_shows_what_its_encoding_lacks() -> None:
    for encoding, expected in (
        ("ascii", rb"\xb5 \u2192 \x1b"),
        ("latin-1", b"\xb5 \\u2192 \\x1b"),
        ("utf-8", "µ → \\x1b".encode()),
    ):
        bytes_ = io.BytesIO()
        stream = SafeStream(io.TextIOWrapper(bytes_, encoding))
        assert stream.write("µ → \x1b") == 5
        stream.writelines(["\u202e"])
        stream.flush()
        assert bytes_.getvalue() == expected + rb"\u202e"
        assert not hasattr(stream, "buffer")


def test_the_streams_are_put_back() -> None:
    before = sys.stdout, sys.stderr
    with safe_streams():
        assert raw_stream(sys.stdout) is before[0]
    assert (sys.stdout, sys.stderr) == before


# --- every route to the terminal --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch trace with a hostile file name and hostile event names, which its problems quote."""
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2, "ts": 10, "dur": 2}
    kernel = {"ph": "X", "cat": "kernel", "name": HOSTILE, "pid": 0, "tid": 7, "ts": 20, "dur": 5}
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": HOSTILE}},
        {"ph": "X", "cat": "cpu_op", "name": f"op {HOSTILE}", "pid": 1, "tid": 2, "ts": 5, "dur": 100, HOSTILE: 1},
        {"ph": "X", "cat": "user_annotation", "name": HOSTILE, "pid": 1, "tid": 2, "ts": 1, "dur": 200},
        {"ph": "X", "cat": HOSTILE, "name": "x", "pid": 1, "tid": 2, "ts": 5, "dur": 1},
        *[{**call, "ts": 10 + number, "args": {"correlation": number}} for number in range(1, 4)],
        *[
            {**kernel, "ts": 20 + 10 * number, "args": {"correlation": number, "device": 0, "stream": 7, HOSTILE: HOSTILE}}
            for number in range(1, 4)
        ],
    ]
    path = tmp_path_factory.mktemp("traces") / f"{HOSTILE}.json"
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": HOSTILE}], HOSTILE: 1, "traceEvents": events}))
    return path


def test_a_trace_of_hostile_names(trace: Path) -> None:
    text = shown(llm_perf("analyze", trace))
    assert f"{SHOWN}" in text
    found = data(llm_perf("analyze", trace, "--json"))
    assert found["source"] == str(trace)
    assert found["kernels"][0]["name"] == HOSTILE


def test_warnings_about_a_trace(tmp_path: Path, trace: Path) -> None:
    cut = tmp_path / "cut.json"
    cut.write_bytes(trace.read_bytes()[:-80])
    shown(llm_perf("analyze", cut))
    shown(llm_perf("sql", cut, "select name from kernels"))
    foreign = tmp_path / "foreign.json"
    foreign.write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": HOSTILE, "name": HOSTILE, "ts": 1, "dur": 1}]}))
    shown(llm_perf("analyze", foreign))


def test_sql_names_values_and_errors(trace: Path) -> None:
    query = f"select name, 1 as \"{HOSTILE}\", '{HOSTILE}' as value from kernels"
    assert shown(llm_perf("sql", trace, query)).count(SHOWN) == 1 + 3 * 2
    assert data(llm_perf("sql", trace, query, "--json"))[0] == {"name": HOSTILE, HOSTILE: 1, "value": HOSTILE}
    shown(llm_perf("sql", trace, query, "--csv"))
    for wrong in (f'select "{HOSTILE}" from kernels', f"select error('{HOSTILE}')"):
        done = llm_perf("sql", trace, wrong)
        assert done.returncode == 2
        shown(done)


def test_diagnostics_of_nsys(tmp_path: Path) -> None:
    path = cut_small(tmp_path / f"{HOSTILE}.sqlite")
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("DROP TABLE IF EXISTS DIAGNOSTIC_EVENT")
        database.execute("DROP TABLE IF EXISTS ENUM_DIAGNOSTIC_SEVERITY_LEVEL")
        database.execute("CREATE TABLE ENUM_DIAGNOSTIC_SEVERITY_LEVEL (id INTEGER, name TEXT, label TEXT)")
        database.execute("INSERT INTO ENUM_DIAGNOSTIC_SEVERITY_LEVEL VALUES (3, 'Error', 'Error')")
        database.execute("CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)")
        database.execute("INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 3, ?)", (f"CUDA {HOSTILE} failed",))
    assert f"CUDA {SHOWN}" in " ".join(shown(llm_perf("analyze", path)).split()), "a line may break between them"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("runs") / HOSTILE, HOSTILE, HOSTILE).path


def test_the_report_of_a_run_whose_name_and_records_are_hostile(run: Path) -> None:
    assert SHOWN in shown(llm_perf("report", run))
    for name in ("report.md", "report.html", "stakeholder_summary.md", "operators.md", "kernels.md", "waterfall.svg", "ops.csv"):
        text = (run / name).read_text(encoding="utf-8")
        body = text.split("<script>")[0] if name.endswith(".html") else text  # the library of the charts is not ours
        assert not acting(body), name
        assert name == "waterfall.svg" or "x1b" in body, name


@pytest.mark.slow
def test_what_else_is_said_of_such_a_run(run: Path) -> None:
    assert SHOWN in shown(llm_perf("advise", run))
    assert SHOWN in shown(llm_perf("runs", run.parent))
    (row,) = data(llm_perf("runs", run.parent, "--json"))
    assert row["path"] == str(run)
    assert "kernels" in llm_perf("sql", run).stdout


def test_comparing_and_naming(tmp_path: Path) -> None:
    base, new = (whole_run(tmp_path / f"{side}{HOSTILE}", HOSTILE, traces=False).path for side in "ab")
    timings = new / "raw" / "clean" / "timings.json"
    timings.write_text(timings.read_text(encoding="utf-8").replace("160000000", "160000007"), encoding="utf-8")
    assert data(llm_perf("compare", base, new, "--json"))["base_runs"]
    for words in (
        ["compare", base, new],
        ["compare", base, new, "--markdown"],
        ["compare", HOSTILE, new],
        ["compare", base, new, "--gate", f"{HOSTILE}=1%"],
        ["baseline", "set", "mine", base, "--runs-dir", tmp_path],
        ["baseline", "list", "--runs-dir", tmp_path],
        ["baseline", "remove", HOSTILE, "--runs-dir", tmp_path],
        ["baseline", HOSTILE],
    ):
        done = llm_perf(*words)
        assert not acting(done.stdout + done.stderr), words
        assert "x1b" in done.stdout + done.stderr, words


def test_datasets_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = small_source(tmp_path / HOSTILE)
    added(tmp_path, source)
    (source / f"{HOSTILE}.jsonl").write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / HOSTILE).symlink_to(HOSTILE)
    model = tmp_path / "weights"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    for words in (
        ["dataset", "list"],
        ["dataset", "check"],
        ["dataset", "add", HOSTILE, "--source", source],
        ["dataset", "add", "two", "--source", source],
        ["dataset", "check", HOSTILE],
        ["model", "list"],
        ["model", "check"],
        ["model", "link", "mine", model],
        ["cost", "--model-config", model / "config.json"],
    ):
        shown(llm_perf(*words))
    assert data(llm_perf("model", "list", "--json"))[0]["name"] == HOSTILE


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        [f"--{HOSTILE}"],
        ["analyze", HOSTILE],
        ["report", "x", f"--{HOSTILE}"],
        ["run", "--dry-run", f"{HOSTILE}=1"],
        ["run", "--dry-run", f"runtime.{HOSTILE}=1"],
        ["run", "--dry-run", f"model={HOSTILE}"],
        ["run", "--dry-run", f"experiment={HOSTILE}"],
        ["run", "--dry-run", f"runtime.batch_size={HOSTILE}"],
        ["run", "--dry-run", "--config-dir", HOSTILE],
        ["run", "--resume", HOSTILE],
        ["options", "--config-dir", HOSTILE],
        ["cost", f"model={HOSTILE}"],
        ["cost", "model=tiny", "--hardware", HOSTILE],
        ["metrics", "check", HOSTILE, "--chip", "gh100"],
        ["metrics", "show", HOSTILE, "--chip", "gh100"],
        ["metrics", "show", "roofline", "--chip", HOSTILE],
        ["ceilings", "--device", HOSTILE],
        ["exec", "--passes", HOSTILE, "--", "true"],
        ["exec", "--", HOSTILE],
        ["externals", "status", "--root", HOSTILE],
        ["runs", HOSTILE],
        ["sql", HOSTILE],
        ["report", HOSTILE, "--debug"],
    ],
    ids=lambda words: " ".join(words).replace(HOSTILE, "HOSTILE"),
)
def test_arguments_that_errors_quote(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = llm_perf(*words)
    assert done.returncode == 2
    shown(done)


def test_options_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / f"{HOSTILE}.yaml").write_text("name: x\n")
    shown(llm_perf("options", "--config-dir", tmp_path))
    (tmp_path / "model" / "mine.yaml").write_text(json.dumps({HOSTILE: 1}))
    shown(llm_perf("run", "--dry-run", "--config-dir", tmp_path, "model=mine"))


def test_a_file_name_that_is_no_utf8(tmp_path: Path, trace: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.json")
    odd.write_bytes(trace.read_bytes())
    done = llm_perf("analyze", odd)
    assert done.returncode == 0, done.stderr
    assert "caf\\udce9.json" in done.stdout
    assert data(llm_perf("analyze", odd, "--json"))["source"] == str(odd)


def test_folders_whose_names_are_no_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    run = whole_run(odd / "run", traces=False).path
    source = small_source(odd / "data")
    for words, code in (
        (["report", run], 0),
        (["runs", odd], 0),
        (["exec", "--passes", "program", "--out", odd / "mine", "--", "true", odd], 0),
        (["baseline", "set", "mine", run], 2),
        (["dataset", "add", "mine", "--source", source], 0),
        (["dataset", "check", "--quick"], 0),
        (["run", "--dry-run", f"experiment={odd.name}"], 2),
    ):
        done = llm_perf(*words)
        assert done.returncode == code, (words, done.stderr)
        assert "caf\\udce9" in done.stdout + done.stderr or words[0] == "dataset", words
    assert data(llm_perf("runs", odd, "--json"))[0]["path"].startswith(str(odd))


def test_a_terminal_of_another_encoding(trace: Path) -> None:
    for encoding in ("ascii", "latin-1"):
        done = llm_perf("analyze", trace, encoding=encoding)
        assert done.returncode == 0, done.stderr
        assert data(llm_perf("analyze", trace, "--json", encoding=encoding))["kernels"][0]["name"] == HOSTILE


# --- the progress display ---------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [BarProgress, PlainProgress])
def test_progress_shows_names_and_draws_its_own(kind: type[BarProgress | PlainProgress], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with safe_streams(), kind() as progress:
        progress.pass_started(HOSTILE, HOSTILE)
        progress.pass_message(HOSTILE, {"event": "phase", "text": f"[bold]{HOSTILE}"})
        progress.pass_message(HOSTILE, {"event": "progress", "phase": HOSTILE, "done": 1, "at_most": 2, "text": HOSTILE})
        progress.pass_ended(PassRecord(HOSTILE, "failed", why=f"[/]{HOSTILE}"))
    drawn = screen.getvalue()
    for taken in ("\x1b[31m", "\x1b]0;", "\x9b", "\u202e", "\x07"):
        assert taken not in drawn
    assert "\\x1b[31m" in drawn
    assert ("\x1b[" in drawn) == (kind is BarProgress)  # the bar's own


def test_without_standard_error_nothing_is_said_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "argv", ["llm-perf", "run", "model=tinny"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert sys.stderr is None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["options"], ["cost", "--json"], ["--version"], ["-h"]])
def test_without_standard_output_an_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["llm-perf", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "Standard output is closed" in capsys.readouterr().err


def test_a_line_break_in_a_name_begins_no_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["llm-perf", "analyze", "no\nerror: all is well"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")] == ["error: no"]
