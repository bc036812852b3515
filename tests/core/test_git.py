"""Git without the programs that a repository names: nothing runs, and what is read is right."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from git_repositories import PLACES, Marker, git, new_repository, plant
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.git import Git, GitError, find_repository
from llm_perf_opt.core.git_changes import changes


@pytest.fixture
def marker(tmp_path: Path) -> Marker:
    return Marker(tmp_path / "marker")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One with a commit of two files."""
    folder = new_repository(tmp_path / "repository")
    (folder / "sub").mkdir()
    (folder / "a.odd").write_text("a\n")
    (folder / "sub" / "b.txt").write_text("b\n")
    committed(folder)
    return folder


def committed(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")


def later(path: Path) -> None:
    """Change the time of a file, so that git compares its content."""
    os.utime(path, (1, 1))


@pytest.mark.parametrize("where", PLACES)
def test_nothing_runs(where: str, repository: Path, marker: Marker) -> None:
    plant(repository, marker, where)
    later(repository / "a.odd")
    control = shutil.copytree(repository, repository.with_name("control"), symlinks=True)
    git(control, "rev-parse", "HEAD")
    git(control, "-c", "alias.x=status", "status", "--porcelain")
    assert {"fsmonitor", "clean"} <= {word for mark in marker.marks for word in mark.split()}, "plain git runs them"
    head = git(repository, "rev-parse", "HEAD")
    _ = marker.marks
    for folder in (repository, repository / "sub"):
        found = Git(folder)
        assert found.text("rev-parse", "HEAD") == head
        assert changes(found).changed == ()
        assert found.text("ls-files", "--full-name", "--", "b.txt" if folder.name == "sub" else "sub") == "sub/b.txt"
    with pytest.raises(GitError):
        Git(repository, schemes="https:ssh").text("fetch", "origin")
    Git(repository).text("add", "--", "sub")
    Git(repository).text("checkout", "--quiet", "--detach", head)
    assert marker.marks == []


def test_filters_with_any_name_from_any_attributes(repository: Path, marker: Marker) -> None:
    names = ["odd", "lfs", "a.b", "a=b", 'a"b']
    with (repository / ".git/config").open("a") as config:
        for name in names:
            quoted = name.replace('"', '\\"')
            config.write(f'[filter "{quoted}"]\n clean = {marker.program}\n process = {marker.program}\n required\n')
    for number, name in enumerate(names):
        (repository / f"{number}.x").write_text("x\n")
        with (repository / ".gitattributes").open("a") as attributes:
            attributes.write(f"{number}.x filter={name}\n")
    Git(repository).text("add", "--all")
    for number in range(len(names)):
        later(repository / f"{number}.x")
    assert changes(Git(repository)).changed == (".gitattributes", *(f"{number}.x" for number in range(len(names)))), "all staged"
    assert marker.marks == []


def test_a_linked_worktree(repository: Path, marker: Marker, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "linked"))
    linked = tmp_path / "linked"
    git(repository, "config", "extensions.worktreeConfig", "true")
    (linked / "b.odd").write_text("b\n")
    head = committed(linked)
    plant(linked, marker, "worktree")
    later(linked / "b.odd")
    assert Git(linked).text("rev-parse", "HEAD") == head
    assert changes(Git(linked)).changed == ()
    (linked / "b.odd").unlink()
    assert changes(Git(linked)).changed == ("b.odd",)
    Git(linked).text("checkout", "--quiet", "--detach", "HEAD~")
    assert git(linked, "rev-parse", "HEAD") == git(repository, "rev-parse", "HEAD")
    _ = marker.marks
    assert Git(repository).text("symbolic-ref", "HEAD") == "refs/heads/main"
    assert marker.marks == []


def test_submodules_are_compared_without_running_theirs(repository: Path, marker: Marker, tmp_path: Path) -> None:
    inner = new_repository(tmp_path / "inner")
    (inner / "c.odd").write_text("c\n")
    committed(inner)
    git(repository, "submodule", "--quiet", "add", str(inner), "inner")
    committed(repository)
    clone = repository / "inner"
    plant(clone, marker)
    later(clone / "c.odd")
    assert changes(Git(repository)).changed == ()
    (clone / "new.txt").write_text("x")
    assert changes(Git(repository)).changed == ("inner/new.txt",)
    for ignore, seen in (("untracked", False), ("dirty", False), ("none", True), ("all", False)):
        git(repository, "config", "-f", ".gitmodules", "submodule.inner.ignore", ignore)
        assert ("inner/new.txt" in changes(Git(repository)).changed) == seen, ignore
    assert marker.marks == []


def test_filters_that_do_not_run_leave_the_answer_open(repository: Path, marker: Marker) -> None:
    git(repository, "config", "filter.odd.clean", "tr a-z A-Z")
    (repository / ".gitattributes").write_text("*.odd filter=odd\n")
    committed(repository)
    later(repository / ".git/index")  # every entry is as new as the index: git compares all contents
    found = changes(Git(repository))
    assert (found.changed, len(found.unknown)) == ((), 1)
    assert "filter odd" in found.unknown[0]
    (repository / "a.odd").write_text("another size\n")
    assert (changes(Git(repository)).changed, changes(Git(repository)).unknown) == (("a.odd",), ())
    (repository / "a.odd").write_text("a\n")
    (repository / "sub/b.txt").write_text("changed\n")
    assert changes(Git(repository)).changed == ("sub/b.txt",)


def test_an_attribute_without_its_filter_means_nothing(repository: Path) -> None:
    (repository / ".gitattributes").write_text("*.odd filter=odd\n")
    committed(repository)
    (repository / "a.odd").write_text("changed\n")
    assert changes(Git(repository)).changed == ("a.odd",)


@pytest.mark.parametrize("scope", ["--local", "--global"])
def test_files_of_git_lfs_are_compared_by_their_hash(
    scope: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "global"))
    clean = """sh -c 'cat > T; printf "version https://git-lfs.github.com/spec/v1\\noid sha256:%s\\nsize %s\\n" """
    clean += """$(sha256sum < T | cut -d " " -f 1) $(stat -c %s T); rm T'"""
    git(repository, "config", scope, "filter.lfs.clean", clean)
    (repository / ".gitattributes").write_text("*.big filter=lfs\n")
    (repository / "x.big").write_bytes(b"w" * 100_000)
    committed(repository)
    assert git(repository, "cat-file", "-p", ":x.big").endswith("size 100000")
    later(repository / "x.big")
    assert changes(Git(repository)) == changes(Git(repository / "sub")) == type(changes(Git(repository)))()
    (repository / "x.big").write_bytes(b"v" * 100_000)
    assert changes(Git(repository)).changed == ("x.big",)
    (repository / "x.big").write_bytes(b"w" * 99_999)
    assert changes(Git(repository)).changed == ("x.big",)


@pytest.mark.parametrize("scope", ["--local", "--global"])
def test_line_ends_are_compared_as_configured(
    scope: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "global"))
    git(repository, "config", scope, "core.autocrlf", "true")
    (repository / "sub/b.txt").write_bytes(b"b\r\n")
    git(repository, "add", "--all")
    later(repository / "sub/b.txt")
    assert changes(Git(repository)).changed == ()
    git(repository, "config", scope, "--unset", "core.autocrlf")
    assert changes(Git(repository)).changed == ("sub/b.txt",)


def test_files_that_the_user_ignores_are_no_changes(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "global"))
    (repository / "own.swp").write_text("x")
    assert changes(Git(repository)).changed == ("own.swp",)
    (tmp_path / "xdg/git").mkdir(parents=True)
    (tmp_path / "xdg/git/ignore").write_text("*.swp\n")
    assert changes(Git(repository)).changed == ()
    git(repository, "config", "--global", "core.excludesFile", str(tmp_path / "none"))
    assert changes(Git(repository)).changed == ("own.swp",)
    (repository / ".git/info/exclude").write_text("own.*\n")
    assert changes(Git(repository)).changed == ()
    (repository / ".git/info/exclude").unlink()
    git(repository, "config", "status.showUntrackedFiles", "no")
    assert changes(Git(repository)).changed == ()
    assert changes(Git(repository), untracked="all").changed == ("own.swp",)


def test_variables_of_another_repository_and_of_tools_are_ignored(
    repository: Path, marker: Marker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_repository(tmp_path / "other")
    (other / "x").write_text("x")
    committed(other)
    for name in ("GIT_DIR", "GIT_COMMON_DIR"):
        monkeypatch.setenv(name, str(other / ".git"))
    given = {"GIT_WORK_TREE": other, "GIT_INDEX_FILE": other / ".git/index", "GIT_OBJECT_DIRECTORY": other / ".git/objects"}
    programs = ("GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_SSH_COMMAND", "GIT_ASKPASS", "GIT_EDITOR", "GIT_PROXY_COMMAND")
    for name, value in {**given, **dict.fromkeys(programs, marker.program)}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(marker.program))
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "trace"))
    later(repository / "a.odd")
    assert Git(repository).text("ls-files").split() == ["a.odd", "sub/b.txt"]
    assert changes(Git(repository)).changed == ()
    assert marker.marks == []
    assert not (tmp_path / "trace").exists()


def test_programs_of_the_user_do_not_run_on_files(
    repository: Path, marker: Marker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any repository can select the user's filters with its attributes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / ".gitconfig"
    config.write_text(f'[core]\n fsmonitor = {marker.program}\n[filter "mine"]\n clean = {marker.program}\n required\n')
    (repository / ".gitattributes").write_text("*.odd filter=mine\n")
    later(repository / "a.odd")
    for one in (Git(repository), Git(repository, schemes="https")):
        assert changes(one).changed == (".gitattributes",)
    assert marker.marks == []


def test_a_git_in_the_folder_is_not_found_through_the_path(
    repository: Path, marker: Marker, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(marker.program, repository / "git")
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    assert Git(repository).text("rev-parse", "HEAD")
    assert marker.marks == []


def test_an_embedded_bare_repository_is_a_plain_folder(repository: Path, marker: Marker) -> None:
    git(repository, "clone", "--quiet", "--bare", ".", "embedded")
    with (repository / "embedded/config").open("a") as config:
        config.write(f"[core]\n bare = false\n worktree = ..\n fsmonitor = {marker.program}\n")
    found = find_repository(repository / "embedded")
    assert found is not None
    assert found.top == repository
    assert changes(Git(repository / "embedded")).changed == ("embedded/",)
    assert marker.marks == []


@pytest.mark.parametrize(
    "text",
    ["", "gitdir: ", "gitdir: /dev/null", "gitdir: ../nowhere", "nonsense", "gitdir: .\n", "x" * 100_000, f"gitdir: {'x' * 300}"],
)
def test_a_git_file_that_names_nothing(text: str, repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / ".git").write_text(text)
    assert find_repository(folder) is None
    with pytest.raises(GitError, match="not in a git repository"):
        Git(folder).text("status")


def linked_git(folder: Path, victim: Path) -> None:
    (folder / ".git").symlink_to(victim / ".git")


def git_file(folder: Path, victim: Path) -> None:
    (folder / ".git").write_text(f"gitdir: {victim}/.git\n")


def borrowed_objects(folder: Path, victim: Path) -> None:
    shutil.copytree(victim / ".git", folder / ".git")
    shutil.rmtree(folder / ".git/objects")
    (folder / ".git/objects").symlink_to(victim / ".git/objects")


def linked_index(folder: Path, victim: Path) -> None:
    shutil.copytree(victim / ".git", folder / ".git")
    (folder / ".git/index").unlink()
    (folder / ".git/index").symlink_to(victim / ".git/index")


def worktree_of_another(folder: Path, victim: Path) -> None:
    own = folder / "own"
    shutil.copytree(victim / ".git", own)
    (own / "commondir").write_text(f"{victim}/.git\n")
    (own / "gitdir").write_text(f"{folder}/.git\n")
    (folder / ".git").write_text("gitdir: own\n")


@pytest.mark.parametrize("make", [linked_git, git_file, borrowed_objects, linked_index, worktree_of_another])
def test_the_repository_of_another_folder_is_read_and_never_written(
    make: Callable[[Path, Path], None], repository: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "mine").write_text("x")
    make(folder, repository)
    before = contents(repository)
    assert Git(folder).text("rev-parse", "HEAD")
    changes(Git(folder))
    for words in (("add", "--", "mine"), ("checkout", "--detach", "HEAD"), ("read-tree", "--empty"), ("write-tree",)):
        with pytest.raises(ConfigError):
            Git(folder).text(*words)
    with pytest.raises(ConfigError):
        Git(folder).configure("core.pager", "x")
    assert contents(repository) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_of_settings_that_leads_out_is_not_written(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("")
    (repository / ".gitmodules").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="is a link"):
        Git(repository).configure("submodule.x.path", "x", ".gitmodules")
    assert (tmp_path / "outside").read_text() == ""


def test_reading_changes_nothing(repository: Path) -> None:
    before = contents(repository)
    later(repository / "a.odd")
    changes(Git(repository))
    assert contents(repository) == before


def test_a_damaged_configuration_is_named(repository: Path) -> None:
    (repository / ".git/config").write_text("[core\n")
    with pytest.raises(GitError, match="configuration of git"):
        Git(repository).text("status")


def test_a_format_that_git_does_not_know_is_not_read(repository: Path) -> None:
    (repository / ".git/config").write_text("[core]\nrepositoryformatversion = 1\n[extensions]\nodd = true\n")
    with pytest.raises(GitError, match="extension"):
        Git(repository).text("status")


def test_a_split_index_and_packed_references(repository: Path) -> None:
    git(repository, "update-index", "--split-index")
    git(repository, "pack-refs", "--all")
    git(repository, "gc", "--quiet")
    assert Git(repository).text("rev-parse", "HEAD") == git(repository, "rev-parse", "HEAD")
    assert changes(Git(repository)).changed == ()


def test_a_password_in_what_git_says_is_hidden(repository: Path) -> None:
    with pytest.raises(GitError) as caught:
        Git(repository, schemes="https").text("fetch", "https://user:hush@127.0.0.1:9/x")
    assert "hush" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("value", ["/dev/zero", "~nobody-of-this-name/x", "x" * 5000, "loop", ""])
@pytest.mark.parametrize("key", ["core.excludesFile", "core.attributesFile"])
def test_a_file_of_settings_that_cannot_be_read_is_none(key: str, value: str, repository: Path) -> None:
    (repository / ".git/loop").symlink_to("loop")
    (repository / ".git/info/attributes").symlink_to("/dev/zero")
    git(repository, "config", key, value.replace("loop", str(repository / ".git/loop")))
    assert changes(Git(repository)).changed == ()
    with pytest.raises(ConfigError, match="outside of its repository"):
        Git(repository).require_writable()


def test_loops_of_links(repository: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert find_repository(loop) is None
    (repository / ".git/commondir").write_text("../../loop\n")
    assert find_repository(repository) is None
