"""Repositories, clones and linked checkouts whose settings name programs: every verb works on them, and nothing runs."""

import shutil
from pathlib import Path

import pytest

from git_repositories import PLACES, Marker, Upstream, entry, git, listing, new_project, plant
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.workspace.externals import verbs
from llm_perf_opt.workspace.externals.guard import guard, install
from llm_perf_opt.workspace.externals.places import Places

WAYS = ("submodule", "subtree", "sparse", "symlink")


@pytest.fixture
def marker(tmp_path: Path) -> Marker:
    return Marker(tmp_path / "marker")


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    made = Upstream(tmp_path / "upstream")
    (made.folder / ".gitattributes").write_text("* filter=odd diff=odd merge=odd\n")
    made.first = made.commit("attributes")
    (made.folder / "src/one/a.py").write_text("a = 3\n")
    made.second = made.commit("more")
    return made


@pytest.fixture
def project(tmp_path: Path, upstream: Upstream) -> Places:
    """One with an entry of each way at the first commit."""
    places = new_project(tmp_path / "project")
    git(tmp_path, "clone", "--quiet", upstream.url, "checkout")
    git(tmp_path / "checkout", "checkout", "--quiet", "--detach", upstream.first)
    sources = dict.fromkeys(WAYS, upstream.url) | {"symlink": str(tmp_path / "checkout")}
    listing(places, "".join(entry(way, way, sources[way], upstream.first) for way in WAYS))
    assert [done.error for done in verbs.init(places)] == [None] * len(WAYS)
    git(places.root, "add", "--all")
    git(places.root, "commit", "--quiet", "--message", "externals")
    return places


def plant_everywhere(places: Places, marker: Marker, where: str, checkout: Path) -> None:
    folders = [places.root, checkout, *(places.third_party / "github" / way for way in ("submodule", "sparse"))]
    for folder in folders:
        plant(folder, marker, where, attributes="* filter=odd diff=odd merge=odd\n")
        for path in folder.rglob("*.py"):
            if path.is_file() and not path.is_symlink():
                path.touch()  # git compares the content
    _ = marker.marks


def states(places: Places) -> dict[str, str]:
    return {row.name: row.state for row in verbs.status(places)}


@pytest.mark.parametrize("where", PLACES)
def test_no_verb_runs_what_a_repository_names(
    where: str, project: Places, upstream: Upstream, marker: Marker, tmp_path: Path
) -> None:
    plant(upstream.folder, marker, where)
    plant_everywhere(project, marker, where, tmp_path / "checkout")
    assert states(project) == dict.fromkeys(WAYS, "ok")
    assert [done.action for done in verbs.init(project)] == ["there"] * len(WAYS)
    assert guard(project, everything=True) == []
    for way in ("submodule", "subtree", "sparse"):
        (done,) = verbs.update(project, [way], to=upstream.second)
        assert (done.action, done.error) == ("moved", None)
        assert (project.third_party / "github" / way / "src/one/a.py").read_text() == "a = 3\n"
    assert states(project) == dict.fromkeys(WAYS, "ok")
    for way in ("submodule", "sparse", "symlink"):
        folder = project.third_party / "github" / way
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    assert [done.error for done in verbs.init(project)] == [None] * len(WAYS)
    (tmp_path / "checkout/src/one/a.py").write_text("mine, of another size\n")
    (project.third_party / "github/subtree/src/one/a.py").write_text("mine\n")
    assert states(project) == dict.fromkeys(WAYS, "ok") | {"subtree": "edited", "symlink": "edited"}
    with pytest.raises(ConfigError):
        install(project, "python")
    assert marker.marks == []


def test_submodules_of_a_submodule(upstream: Upstream, marker: Marker, tmp_path: Path) -> None:
    inner = Upstream(tmp_path / "inner")
    git(upstream.folder, "submodule", "--quiet", "add", "../inner", "deep/inner")
    upstream.first = upstream.commit("with a submodule")
    (upstream.folder / "new").write_text("x")
    git(upstream.folder / "deep/inner", "checkout", "--quiet", inner.first)
    upstream.second = upstream.commit("with another commit of it")
    places = new_project(tmp_path / "project")
    listing(places, entry("x", "submodule", upstream.url, upstream.first, "  submodules: true\n"))
    (done,) = verbs.init(places)
    assert done.error is None, done.error
    nested = places.third_party / "github/x/deep/inner"
    assert (nested / "src/one/a.py").read_text() == "a = 2\n"
    assert git(places.third_party / "github/x", "submodule", "status").split()[1:2] == ["deep/inner"]
    for folder in (places.root, places.third_party / "github/x", nested):
        plant(folder, marker)
        git(folder, "config", "submodule.deep/inner.update", f"!{marker.program}")
    _ = marker.marks
    (done,) = verbs.update(places, ["x"], to=upstream.second)
    assert done.error is None, done.error
    assert (nested / "src/one/a.py").read_text() == "a = 1\n"
    (nested / "mine").write_text("x")
    assert states(places) == {"x": "edited"}
    assert marker.marks == []


@pytest.mark.parametrize("url", ["ext::sh -c touch%20x", "--upload-pack=x", "http://x/y", "git://x/y", ""])
def test_a_submodule_of_a_submodule_with_an_odd_url(url: str, upstream: Upstream, tmp_path: Path) -> None:
    git(upstream.folder, "update-index", "--add", "--cacheinfo", f"160000,{upstream.second},inner")
    (upstream.folder / ".gitmodules").write_text(f'[submodule "inner"]\n path = inner\n url = "{url}"\n')
    git(upstream.folder, "add", ".gitmodules")
    git(upstream.folder, "commit", "--quiet", "--message", "odd")
    places = new_project(tmp_path / "project")
    commit = git(upstream.folder, "rev-parse", "HEAD")
    listing(places, entry("x", "submodule", upstream.url, commit, "  submodules: true\n"))
    (done,) = verbs.init(places)
    assert isinstance(done.error, ConfigError), done.error
    assert not (places.third_party / "github").exists()


@pytest.mark.parametrize("way", ["submodule", "sparse"])
def test_a_clone_that_is_the_repository_of_another_folder_is_not_written(
    way: str, project: Places, upstream: Upstream, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", upstream.url, "victim")
    git(tmp_path / "victim", "checkout", "--quiet", "--detach", upstream.first)
    folder = project.third_party / "github" / way
    dot_git = folder / ".git"
    dot_git.unlink() if dot_git.is_file() else shutil.rmtree(dot_git)
    dot_git.write_text(f"gitdir: {tmp_path}/victim/.git\n")
    before = {path: path.read_bytes() for path in (tmp_path / "victim").rglob("*") if path.is_file()}
    verbs.status(project)
    (done,) = verbs.update(project, [way], to=upstream.second)
    assert done.error is not None or way == "sparse"
    assert {path: path.read_bytes() for path in (tmp_path / "victim").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["index", "HEAD", "modules", "objects", "config", "refs"])
def test_a_project_whose_git_folder_leads_out_is_not_written(
    name: str, project: Places, upstream: Upstream, tmp_path: Path
) -> None:
    moved = tmp_path / "outside"
    (project.root / ".git" / name).rename(moved)
    (project.root / ".git" / name).symlink_to(moved)
    shutil.rmtree(project.third_party / "github/submodule")
    before = {path: path.read_bytes() for path in [moved, *moved.rglob("*")] if path.is_file()}
    (project.third_party / "licenses/submodule/LICENSE").unlink()
    for way in ("submodule", "subtree"):
        (done,) = verbs.update(project, [way], to=upstream.second)
        assert done.error is not None
    assert {path: path.read_bytes() for path in [moved, *moved.rglob("*")] if path.is_file()} == before
