"""Each way with real local git repositories: fetched, verified, moved, and rejected if something is in the way."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from git_repositories import Upstream, entry, git, listing, new_project
from llm_perf_opt.core import processes
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError
from llm_perf_opt.core.git import reason
from llm_perf_opt.workspace.externals import verbs
from llm_perf_opt.workspace.externals.git import edited
from llm_perf_opt.workspace.externals.places import Places

GIT_WAYS = ("submodule", "subtree", "sparse")
ALL = (*GIT_WAYS, "symlink")


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path / "upstream")


@pytest.fixture
def project(tmp_path: Path) -> Places:
    return new_project(tmp_path / "project")


def state(places: Places, name: str = "x") -> str:
    (row,) = verbs.status(places, [name])
    return row.state


def source_of(way: str, upstream: Upstream, tmp_path: Path, commit: str) -> str:
    if way != "symlink":
        return upstream.url
    own = tmp_path / "checkout"
    if not own.exists():
        git(tmp_path, "clone", "--quiet", upstream.url, str(own))
    git(own, "checkout", "--quiet", "--detach", commit)
    return str(own)


def made(places: Places, way: str, upstream: Upstream, tmp_path: Path, more: str = "") -> Path:
    """An entry `x` at the first commit."""
    source = source_of(way, upstream, tmp_path, upstream.first)
    listing(places, entry("x", way, source, upstream.first, more))
    (done,) = verbs.init(places)
    assert done.error is None, done.error
    assert done.action == "made"
    return places.third_party / "github" / "x"


def error_of(done: list[verbs.Done]) -> LlmPerfError:
    (one,) = done
    assert one.error is not None
    assert one.error.remedy
    return one.error


@pytest.mark.parametrize("way", ALL)
def test_made_at_the_pin_and_verified(way: str, project: Places, upstream: Upstream, tmp_path: Path) -> None:
    folder = made(project, way, upstream, tmp_path)
    assert (folder / "src/one/a.py").read_text() == "a = 1\n", "the pin, though branch and tag have moved on"
    (row,) = verbs.status(project)
    assert (row.state, row.commit, row.warnings) == ("ok", upstream.first, ())
    assert (project.licenses("x") / "LICENSE").read_text() == "free\n"
    (again,) = verbs.init(project)
    assert again.action == "there"
    assert not list(project.third_party.glob(".making-*"))
    assert git(project.root, "rev-parse", "--is-shallow-repository") == "false"


@pytest.mark.parametrize("way", ALL)
def test_moved_to_a_new_pin(way: str, project: Places, upstream: Upstream, tmp_path: Path) -> None:
    folder = made(project, way, upstream, tmp_path)
    before = project.listing_file.read_text()
    source_of(way, upstream, tmp_path, upstream.second)
    (done,) = verbs.update(project, ["x"], to=upstream.second)
    assert done.error is None, done.error
    assert (folder / "src/one/a.py").read_text() == "a = 2\n"
    assert (folder / "src/one/new.py").exists()
    assert not (folder / "docs").exists()
    assert project.listing_file.read_text() == before.replace(upstream.first, upstream.second), "comments stay"
    assert state(project) == "ok"


@pytest.mark.parametrize("way", ALL)
def test_a_pin_changed_in_the_file_is_noticed_and_followed(way: str, project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, way, upstream, tmp_path)
    project.listing_file.write_text(project.listing_file.read_text().replace(upstream.first, upstream.second))
    assert state(project) == "other commit"
    assert "externals update x" in error_of(verbs.init(project)).remedy
    source_of(way, upstream, tmp_path, upstream.second)
    (done,) = verbs.update(project)
    assert done.error is None, done.error
    assert state(project) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("way", ALL)
@pytest.mark.parametrize("what", ["changed", "added", "deleted"])
def test_edits_are_seen_and_never_lost(way: str, what: str, project: Places, upstream: Upstream, tmp_path: Path) -> None:
    folder = made(project, way, upstream, tmp_path)
    file = folder / ("src/one/mine.py" if what == "added" else "src/one/a.py")
    file.unlink() if what == "deleted" else file.write_text("mine\n")
    (row,) = verbs.status(project)
    assert row.state == "edited"
    assert file.name in row.detail
    error_of(verbs.init(project))
    error_of(verbs.update(project, ["x"], to=upstream.second))
    assert upstream.second not in project.listing_file.read_text()
    assert file.exists() == (what != "deleted")
    if what != "deleted":
        assert file.read_text() == "mine\n"


@pytest.mark.parametrize("way", ALL)
def test_what_is_missing_is_said_and_made_again(way: str, project: Places, upstream: Upstream, tmp_path: Path) -> None:
    folder = made(project, way, upstream, tmp_path)
    if way == "symlink":
        folder.unlink()
    elif way == "subtree":
        git(project.root, "rm", "-r", "--quiet", "--force", "third_party/github/x")
    else:
        shutil.rmtree(folder)
    assert state(project) == "missing"
    (done,) = verbs.init(project)
    assert done.error is None, done.error
    assert state(project) == "ok"


@pytest.mark.parametrize("way", ALL)
def test_something_else_in_its_place_is_left_alone(way: str, project: Places, upstream: Upstream, tmp_path: Path) -> None:
    listing(project, entry("x", way, source_of(way, upstream, tmp_path, upstream.first), upstream.first))
    mine = project.third_party / "github" / "x"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    assert state(project) == "foreign"
    for work in (verbs.init, verbs.update):
        assert "Move it away" in error_of(work(project)).remedy
    assert (mine / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("way", GIT_WAYS)
def test_a_commit_that_is_not_there(way: str, project: Places, upstream: Upstream) -> None:
    listing(project, entry("x", way, upstream.url, "1" * 40))
    assert "has no commit" in error_of(verbs.init(project)).fact
    nothing_left(project)


@pytest.mark.parametrize("way", GIT_WAYS)
def test_an_unreachable_repository_is_one_clear_line(way: str, project: Places, tmp_path: Path) -> None:
    listing(project, entry("x", way, f"file://{tmp_path}/nowhere", "1" * 40))
    error = error_of(verbs.init(project))
    assert isinstance(error, ResourceError)
    assert "nowhere cannot be fetched" in error.fact
    assert "\n" not in error.fact
    nothing_left(project)


@pytest.mark.parametrize("way", GIT_WAYS)
def test_without_network(way: str, project: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    listing(project, entry("x", way, "https://127.0.0.1:9/x", "1" * 40))
    assert "127.0.0.1:9/x cannot be fetched" in error_of(verbs.init(project)).fact
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    error = error_of(verbs.init(project))
    assert "transport 'https' not allowed" in error.fact
    assert "GIT_ALLOW_PROTOCOL" in error.remedy
    nothing_left(project)


def nothing_left(project: Places) -> None:
    assert git(project.root, "status", "--porcelain") == "?? third_party/"
    left = {path.name for path in project.third_party.rglob("*") if not path.is_dir()}
    assert left == {"externals.yaml"}
    assert not (project.root / ".git/modules").exists()


def test_one_failure_does_not_keep_the_others(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    listing(
        project,
        entry("bad", "sparse", f"file://{tmp_path}/nowhere", "1" * 40) + entry("good", "sparse", upstream.url, upstream.first),
    )
    assert [one.action for one in verbs.init(project)] == ["failed", "made"]


# --- submodule -----------------------------------------------------------------------------------------------------


def test_a_submodule_is_what_git_calls_one(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "submodule", upstream, tmp_path)
    shown = git(project.root, "submodule", "status")
    assert shown.split()[:2] == [upstream.first, "third_party/github/x"]
    assert (project.folder(project.listing()["x"]) / ".git").is_file(), "its history lies in the project's .git/modules"
    assert "A  third_party/github/x" in git(project.root, "status", "--porcelain")


def test_a_clone_of_the_project_gets_its_submodules(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "submodule", upstream, tmp_path)
    git(project.root, "add", "--all")
    git(project.root, "commit", "--quiet", "--message", "x")
    git(tmp_path, "clone", "--quiet", str(project.root), "second")
    second = Places.find(tmp_path / "second")
    assert state(second) == "missing"
    (done,) = verbs.init(second)
    assert done.action == "made"
    assert state(second) == "ok"
    assert git(second.root, "status", "--porcelain") == ""


def test_a_submodule_without_its_record_is_registered(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "submodule", upstream, tmp_path)
    git(project.root, "rm", "--cached", "--quiet", "third_party/github/x")
    assert state(project) == "unregistered"
    verbs.init(project)
    assert state(project) == "ok"


def test_an_earlier_submodule_of_the_name_is_not_destroyed(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    folder = made(project, "submodule", upstream, tmp_path)
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "mine")
    mine = git(folder, "rev-parse", "HEAD")
    git(project.root, "rm", "--quiet", "--force", "third_party/github/x")
    (done,) = verbs.init(project)
    assert done.error is None, done.error
    assert state(project) == "ok"
    assert git(project.root / ".git/modules/third_party/github/x", "cat-file", "-t", mine) == "commit"


def test_submodules_of_a_submodule_come_only_when_asked(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    inner = Upstream(tmp_path / "inner")
    git(upstream.folder, "submodule", "--quiet", "add", inner.url, "inner")
    upstream.first = upstream.commit("with a submodule")
    folder = made(project, "submodule", upstream, tmp_path)
    assert not list((folder / "inner").iterdir())
    shutil.rmtree(folder)
    listing(project, entry("x", "submodule", upstream.url, upstream.first, "  submodules: true\n"))
    (done,) = verbs.init(project)
    assert done.error is None, done.error
    assert (folder / "inner/LICENSE").exists()
    assert state(project) == "ok"


def test_hooks_and_filters_of_a_repository_do_not_run(
    project: Places, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks, ran = tmp_path / "hooks", tmp_path / "ran"
    hooks.mkdir()
    for name in ("post-checkout", "pre-commit", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (hooks / name).chmod(0o755)
    (tmp_path / "config").write_text(
        f'[core]\n hooksPath = {hooks}\n[filter "lfs"]\n smudge = touch {ran}\n clean = touch {ran}\n required = true\n'
    )
    (upstream.folder / ".gitattributes").write_text("*.big filter=lfs\n")
    (upstream.folder / "x.big").write_text("version https://git-lfs.github.com/spec/v1\n")
    upstream.first = upstream.commit("with a large file")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    folder = made(project, "submodule", upstream, tmp_path)
    assert (folder / "x.big").read_text().startswith("version")
    assert not ran.exists()


# --- subtree -------------------------------------------------------------------------------------------------------


def test_a_subtree_is_plain_files_of_the_project(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    (project.root / "main.py").write_text("edited, and staged by nobody\n")
    folder = made(project, "subtree", upstream, tmp_path)
    assert not (folder / ".git").exists()
    tree = git(upstream.folder, "rev-parse", f"{upstream.first}^{{tree}}")
    assert git(project.root, "write-tree", "--prefix=third_party/github/x/") == tree
    assert (project.root / "main.py").read_text() == "edited, and staged by nobody\n"
    assert " M main.py" in f" {git(project.root, 'status', '--porcelain')}"
    assert verbs.status(project)[0].detail == "staged, not committed yet"
    git(project.root, "commit", "--quiet", "--message", "x")
    git(project.root, "fsck", "--strict", "--connectivity-only")
    assert verbs.status(project)[0].detail == ""


def test_a_committed_edit_of_a_subtree_is_seen(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    folder = made(project, "subtree", upstream, tmp_path)
    (folder / "src/one/a.py").write_text("mine\n")
    git(project.root, "add", "--all")
    git(project.root, "commit", "--quiet", "--message", "edit")
    assert state(project) == "edited"
    assert (folder / "src/one/a.py").read_text() == "mine\n"


def test_a_lost_lock_is_made_anew(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "subtree", upstream, tmp_path)
    project.lock_file.unlink()
    assert state(project) == "unverified"
    verbs.init(project)
    assert state(project) == "ok"


# --- sparse --------------------------------------------------------------------------------------------------------


def test_a_sparse_checkout_is_sparse(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    git(upstream.folder, "config", "uploadpack.allowFilter", "true")
    folder = made(project, "sparse", upstream, tmp_path)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts}
    assert files == {"LICENSE", "src/one/a.py"}
    objects = git(folder, "cat-file", "--batch-all-objects", "--batch-check").splitlines()
    assert sum(" blob " in line for line in objects) == 2, "the other files were not even fetched"
    status = git(project.root, "status", "--porcelain", "--untracked-files=all")
    assert "github/x" not in status, "the project's git ignores it"


def test_other_folders_are_noticed_and_fetched(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    folder = made(project, "sparse", upstream, tmp_path)
    project.listing_file.write_text(project.listing_file.read_text().replace("src/one", "src/two"))
    (row,) = verbs.status(project)
    assert row.state == "edited"
    assert "src/one" in row.detail
    (done,) = verbs.update(project)
    assert done.error is None, done.error
    assert (folder / "src/two/b.py").exists()
    assert not (folder / "src/one").exists()


@pytest.mark.parametrize(("path", "said"), [("src/none", "does not exist"), ("src/one/a.py", "is a file")])
def test_paths_are_folders_that_are_there(path: str, said: str, project: Places, upstream: Upstream) -> None:
    listing(project, entry("x", "sparse", upstream.url, upstream.first).replace("src/one", path))
    assert said in error_of(verbs.init(project)).fact


@pytest.mark.parametrize("work", ["branch", "commit", "stash"])
def test_a_clone_with_somebodys_work_is_not_replaced(work: str, project: Places, upstream: Upstream, tmp_path: Path) -> None:
    folder = made(project, "sparse", upstream, tmp_path)
    if work == "branch":
        git(folder, "branch", "mine")
    elif work == "commit":
        git(folder, "commit", "--quiet", "--allow-empty", "--message", "mine")
    else:
        (folder / "src/one/a.py").write_text("mine\n")
        git(folder, "stash")
    head = git(folder, "rev-parse", "HEAD")
    assert "would be lost" in error_of(verbs.update(project, ["x"], to=upstream.second)).fact
    assert git(folder, "rev-parse", "HEAD") == head


def test_a_license_outside_of_the_folders_is_copied(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "sparse", upstream, tmp_path, "  licenses: [LICENSE, docs/x.md]\n")
    assert (project.licenses("x") / "docs/x.md").read_text() == "x\n"


# --- link ----------------------------------------------------------------------------------------------------------


def test_a_link_whose_end_is_gone_dangles(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "symlink", upstream, tmp_path)
    (tmp_path / "checkout").rename(tmp_path / "elsewhere")
    assert state(project) == "dangling"
    error_of(verbs.init(project))
    project.listing_file.write_text(project.listing_file.read_text().replace("/checkout", "/elsewhere"))
    (done,) = verbs.update(project)
    assert done.error is None, done.error
    assert state(project) == "ok"


def test_a_relative_link_moves_with_the_project(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    source_of("symlink", upstream, tmp_path, upstream.first)
    listing(project, entry("x", "symlink", "../checkout", upstream.first))
    verbs.init(project)
    assert state(project) == "ok"
    assert not project.folder(project.listing()["x"]).readlink().is_absolute()


def test_a_checkout_that_is_linked_is_never_touched(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "symlink", upstream, tmp_path)
    assert "is not at its pin" in error_of(verbs.update(project, ["x"], to=upstream.second)).fact
    assert git(tmp_path / "checkout", "rev-parse", "HEAD") == upstream.first


@pytest.mark.parametrize("target", ["nowhere", ".", "third_party"])
def test_what_cannot_be_linked(target: str, project: Places, upstream: Upstream) -> None:
    listing(project, entry("x", "symlink", target, upstream.first))
    error_of(verbs.init(project))
    assert state(project) == "missing"


# --- all of them ---------------------------------------------------------------------------------------------------


def test_a_missing_license_is_a_warning(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    (upstream.folder / "LICENSE").unlink()
    upstream.first = upstream.commit("no license")
    made(project, "sparse", upstream, tmp_path)
    (row,) = verbs.status(project)
    assert row.state == "ok"
    assert "no license found" in row.warnings[0]
    listing(project, entry("x", "sparse", upstream.url, upstream.first, "  licenses: [COPYING]\n"))
    assert "COPYING is listed" in verbs.status(project)[0].warnings[0]


def test_an_edited_license_copy_is_put_back(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "sparse", upstream, tmp_path)
    copy = project.licenses("x") / "LICENSE"
    for spoil in (lambda: copy.write_text("mine"), copy.unlink):
        spoil()
        assert verbs.status(project)[0].warnings
        verbs.init(project)
        assert copy.read_text() == "free\n"


def test_a_license_that_links_out_is_not_read(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (upstream.folder / "LICENSE").unlink()
    (upstream.folder / "LICENSE").symlink_to(tmp_path / "secret")
    upstream.first = upstream.commit("hostile")
    made(project, "submodule", upstream, tmp_path)
    assert not project.licenses("x").exists()
    assert verbs.status(project)[0].warnings


def test_what_nobody_listed_is_shown(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "sparse", upstream, tmp_path)
    for path in ("stray.txt", "github/y/a.py", "other/deep/b.py", "licenses/gone/LICENSE"):
        (project.third_party / path).parent.mkdir(parents=True, exist_ok=True)
        (project.third_party / path).write_text("x")
    paths = [row.path for row in verbs.status(project) if row.state == "unlisted"]
    assert paths == ["third_party/github/y", "third_party/licenses/gone", "third_party/other", "third_party/stray.txt"]


def test_an_entry_taken_out_is_forgotten(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "sparse", upstream, tmp_path)
    listing(project, "")
    verbs.init(project)
    assert project.locked() == {}
    assert [row.state for row in verbs.status(project)] == ["unlisted", "unlisted"]


@pytest.mark.parametrize("way", ["submodule", "subtree"])
def test_outside_of_git_it_is_said(way: str, upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = Places.find(tmp_path / "plain")
    listing(plain, entry("x", way, upstream.url, upstream.first))
    assert "needs a git repository" in error_of(verbs.init(plain)).fact


def test_sparse_needs_no_project_in_git(upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = Places.find(tmp_path / "plain")
    listing(plain, entry("x", "sparse", upstream.url, upstream.first))
    verbs.init(plain)
    assert state(plain) == "ok"


def test_a_link_on_the_way_does_not_lead_out(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    listing(project, entry("x", "sparse", upstream.url, upstream.first))
    (tmp_path / "outside").mkdir()
    (project.third_party / "github").symlink_to(tmp_path / "outside")
    assert "github is a link that leads to" in error_of(verbs.init(project)).fact
    assert not list((tmp_path / "outside").iterdir())


def test_only_one_at_a_time(project: Places, upstream: Upstream) -> None:
    listing(project, entry("x", "sparse", upstream.url, upstream.first))
    with project.alone(), pytest.raises(ResourceError, match="is running in"):
        verbs.init(project)


def test_what_a_killed_one_left_is_cleared(project: Places, upstream: Upstream) -> None:
    listing(project, entry("x", "sparse", upstream.url, upstream.first))
    (project.third_party / ".making-old" / "clone").mkdir(parents=True)
    verbs.init(project)
    assert not list(project.third_party.glob(".making-*"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["submodule", "sparse", "subtree"])
@pytest.mark.parametrize("at", ["fetch", "checkout", "pack-objects", "config", "read-tree", "update-index"])
def test_an_interrupted_init_leaves_nothing(
    way: str, at: str, project: Places, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's Ctrl-C arrives during one of git's steps; afterwards the entry is missing, or whole."""
    listing(project, entry("x", way, upstream.url, upstream.first))
    real: Callable[..., object] = processes.answer

    def interrupted(argv: list[str], **rest: object) -> object:
        done = real(argv, **rest)
        if at in argv:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr("llm_perf_opt.core.git.answer", interrupted)
    try:
        verbs.init(project)
    except KeyboardInterrupt:
        monkeypatch.undo()
        assert not list(project.third_party.glob(".making-*"))
        assert state(project) in ("missing", "unverified", "ok")
    monkeypatch.undo()
    (done,) = verbs.init(project)
    assert done.error is None, done.error
    assert state(project) == "ok"


def test_to_needs_one_name_and_a_commit(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    made(project, "sparse", upstream, tmp_path)
    with pytest.raises(ConfigError, match="one entry"):
        verbs.update(project, to=upstream.second)
    with pytest.raises(ConfigError, match="not a commit"):
        verbs.update(project, ["x"], to="main")
    with pytest.raises(ConfigError, match="lists no 'y'"):
        verbs.update(project, ["y"], to=upstream.second)


def test_what_git_says_is_shown_and_not_obeyed() -> None:
    assert reason("fatal: no \x1b[31mway\u202e to\there.") == r"no \x1b[31mway\u202e to here"
    assert edited(["a\nb\x07", "c\u200f"]) == r"a b\x07, c\u200f"
