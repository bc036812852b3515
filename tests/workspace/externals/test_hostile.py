"""Repositories, clones and linked checkouts whose settings name programs: every verb works on them, and nothing runs."""

import shutil
from pathlib import Path

import pytest

from git_repositories import PLACES, Marker, Upstream, entry, git, listing, new_project, plant
from llm_perf_opt.core.errors import ConfigError, LlmPerfError
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


@pytest.mark.parametrize("where", ["config", *(pytest.param(where, marks=pytest.mark.slow) for where in PLACES[1:])])
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
        (done,) = verbs.update(Places.find(project.root), [way], to=upstream.second)
        assert done.error is not None
    assert {path: path.read_bytes() for path in [moved, *moved.rglob("*")] if path.is_file()} == before


# --- links in the project ------------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path, upstream: Upstream) -> Places:
    """A project with source code of its own, and an entry that is named like one of its folders."""
    places = new_project(tmp_path / "project")
    for path in ("src/main.py", "third_party/github/other/kept.py"):
        (places.root / path).parent.mkdir(parents=True, exist_ok=True)
        (places.root / path).write_text("mine\n")
    (tmp_path / "outside/src").mkdir(parents=True)
    (tmp_path / "outside/src/main.py").write_text("mine\n")
    listing(places, entry("src", "sparse", upstream.url, upstream.first))
    return places


def everything(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if (path.is_file() or path.is_symlink()) and ".git" not in path.parts
    }


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("third_party/licenses", "../.."),
        ("third_party/licenses", ".."),
        ("third_party/licenses", "../../outside"),
        ("third_party/licenses", "github"),
        ("third_party/licenses", "."),
        ("third_party/github", "../../outside"),
        ("third_party/github", ".."),
        ("third_party/github", "hf"),
        ("third_party/externals.lock.json", "../src/main.py"),
        ("third_party/externals.lock.json", "../../outside/src/main.py"),
        ("third_party/.gitignore", "../src/main.py"),
        ("third_party/.gitignore", "../../outside/src/main.py"),
    ],
)
def test_a_link_under_third_party_is_named_and_loses_nothing(link: str, target: str, plain: Places, tmp_path: Path) -> None:
    path = plain.root / link
    if path.is_dir():
        shutil.rmtree(path)
    path.symlink_to(target)
    kept = everything(tmp_path)
    for work in (verbs.init, verbs.update):
        with pytest.raises(LlmPerfError, match=path.name):
            one_error(work(plain))
    assert everything(tmp_path) == kept


def one_error(done: list[verbs.Done]) -> None:
    for one in done:
        if one.error:
            raise one.error


def test_third_party_itself_as_a_link(plain: Places, tmp_path: Path) -> None:
    for target in (tmp_path / "outside", plain.root / "src", plain.root):
        text = plain.listing_file.read_text()
        shutil.rmtree(plain.third_party) if not plain.third_party.is_symlink() else plain.third_party.unlink()
        plain.third_party.symlink_to(target)
        plain.listing_file.write_text(text)
        kept = everything(tmp_path)
        with pytest.raises(ConfigError, match="third_party is a link"):
            verbs.init(plain)
        (target / "externals.yaml").unlink()
        with pytest.raises(ConfigError, match="third_party is a link"):
            verbs.write_template(plain)
        (target / "externals.yaml").write_text(text)
        assert everything(tmp_path) == kept


def test_a_link_that_looks_like_something_unfinished_is_removed_alone(plain: Places, tmp_path: Path) -> None:
    (plain.third_party / ".making-x").symlink_to(tmp_path / "outside")
    kept = everything(tmp_path / "outside")
    (done,) = verbs.init(plain)
    assert done.error is None, done.error
    assert not (plain.third_party / ".making-x").is_symlink()
    assert everything(tmp_path / "outside") == kept


@pytest.mark.parametrize("name", ["src", "licenses/src"])
def test_the_folder_of_an_entry_as_a_link(name: str, plain: Places, tmp_path: Path) -> None:
    path = plain.third_party / ("github/src" if name == "src" else name)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "outside/src")
    kept = everything(tmp_path / "outside")
    (done,) = verbs.init(plain)
    assert (done.error is None) == (name != "src"), "a link in place of a license is replaced"
    assert everything(tmp_path / "outside") == kept
    assert path.is_symlink() == (name == "src")


def test_a_submodule_below_a_link_is_not_moved(project: Places, upstream: Upstream, tmp_path: Path) -> None:
    (project.third_party / "github").rename(tmp_path / "elsewhere")
    (project.third_party / "github").symlink_to(tmp_path / "elsewhere")
    kept = everything(tmp_path / "elsewhere")
    for way in WAYS[:3]:
        (done,) = verbs.update(project, [way], to=upstream.second)
        assert done.error is not None
    assert everything(tmp_path / "elsewhere") == kept


@pytest.mark.parametrize("what", ["hooks", "commit"])
def test_a_hook_is_not_written_through_a_link(what: str, plain: Places, tmp_path: Path) -> None:
    hooks = plain.root / ".git/hooks"
    shutil.rmtree(hooks, ignore_errors=True)
    if what == "hooks":
        hooks.symlink_to(tmp_path / "outside")
    else:
        hooks.mkdir()
        (hooks / "pre-commit").symlink_to(tmp_path / "outside/none")
    with pytest.raises(ConfigError):
        install(plain, "python")
    assert list((tmp_path / "outside").iterdir()) == [tmp_path / "outside/src"]


def test_hooks_elsewhere_are_named_wherever_that_is_configured(plain: Places, tmp_path: Path) -> None:
    (plain.root / ".git/more").write_text(f"[core]\n hooksPath = {tmp_path}/outside\n")
    git(plain.root, "config", "include.path", "more")
    with pytest.raises(ConfigError, match="outside"):
        install(plain, "python")


@pytest.mark.parametrize("url", ["http://[::1/", "https://[::1/x", "https://h:99999/x", "https://h:x/y", "ssh://[x]/y"])
def test_a_url_that_cannot_be_parsed_is_an_error_of_the_list(url: str, plain: Places) -> None:
    listing(plain, entry("x", "sparse", f'"{url}"', "1" * 40))
    with pytest.raises(ConfigError, match=r"externals\.yaml: x: url"):
        verbs.init(plain)


@pytest.mark.parametrize(
    "url", ["ftp://u:hush@h/x", "https://u:hush@h/x", "https://u:hush@[h/x", "https://u:hush@h:0/ x", "-u:hush"]
)
def test_a_password_in_a_url_is_not_shown(url: str, plain: Places) -> None:
    listing(plain, entry("x", "sparse", f'"{url}"', "1" * 40))
    with pytest.raises(ConfigError) as caught:
        verbs.init(plain)
    assert ("hush" in str(caught.value)) == ("://" not in url)
