"""The pre-commit guard, on real staged files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llm_perf_opt
from command import HANG_S
from git_repositories import Upstream, entry, git, listing, new_project
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.workspace.externals import verbs
from llm_perf_opt.workspace.externals.guard import guard, install
from llm_perf_opt.workspace.externals.places import Locked, Places, blob_id, write_lock

SOURCE = str(Path(llm_perf_opt.__file__).parent.parent)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    return Upstream(tmp_path_factory.mktemp("of") / "upstream")


@pytest.fixture
def project(tmp_path: Path, pristine: Places) -> Places:
    """A project that the test may change."""
    return Places(Path(shutil.copytree(pristine.root, tmp_path / "project", symlinks=True)), pristine.in_git)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, upstream: Upstream) -> Places:
    """One entry of each way that git tracks, and a sparse one, all committed."""
    places = new_project(tmp_path_factory.mktemp("pristine") / "project")
    listing(places, "".join(entry(way, way, upstream.url, upstream.first) for way in ("submodule", "subtree", "sparse")))
    assert all(done.error is None for done in verbs.init(places))
    snapshot = places.third_party / "hf/Owner/Name"
    snapshot.mkdir(parents=True)
    (snapshot / "m.py").write_text("x = 1\n")
    with places.listing_file.open("a") as file:
        file.write(entry("hub", "hub", "Owner/Name", upstream.first))
    write_lock(places, {**places.locked(), "hub": Locked(upstream.first, files={"m.py": blob_id(b"x = 1\n")})})
    git(places.root, "add", "--all")
    assert guard(places) == []
    git(places.root, "commit", "--quiet", "--message", "externals")
    return places


def refused(places: Places) -> dict[str, str]:
    git(places.root, "add", "--all", "third_party")
    return {problem.path: problem.why for problem in guard(places)}


def test_what_the_verbs_make_passes(project: Places, upstream: Upstream) -> None:
    assert guard(project, everything=True) == []
    for name in ("submodule", "subtree", "sparse"):
        (done,) = verbs.update(project, [name], to=upstream.second)
        assert done.error is None, done.error
    git(project.root, "add", "--all")
    assert guard(project) == []


def test_a_pin_that_was_moved_and_not_added_yet_is_not_to_be_undone(project: Places, upstream: Upstream) -> None:
    (done,) = verbs.update(project, ["subtree"], to=upstream.second)
    assert done.error is None, done.error
    found = [problem.why for problem in guard(project, everything=True)]
    assert found
    assert all("`git add third_party`" in why and "git restore" not in why for why in found), found


@pytest.mark.parametrize("path", ["github/subtree/src/one/a.py", "hf/Owner/Name/m.py"])
def test_an_edit_is_refused_by_name(path: str, project: Places) -> None:
    (project.third_party / path).write_text("mine\n")
    assert guard(project) == [], "nothing is staged yet"
    found = refused(project)
    assert list(found) == [f"third_party/{path}"]
    assert "read-only" in found[f"third_party/{path}"]


@pytest.mark.parametrize("path", ["github/subtree/mine.py", "hf/Owner/Name/mine.py"])
def test_an_addition_inside_is_refused(path: str, project: Places) -> None:
    (project.third_party / path).write_text("mine\n")
    assert list(refused(project)) == [f"third_party/{path}"]


@pytest.mark.parametrize("path", ["stray.py", "github/other/a.py", "licenses/other/LICENSE", "licenses/subtree/MORE"])
def test_an_unlisted_addition_is_refused(path: str, project: Places) -> None:
    (project.third_party / path).parent.mkdir(parents=True, exist_ok=True)
    (project.third_party / path).write_text("mine\n")
    assert list(refused(project)) == [f"third_party/{path}"]


def test_a_link_in_place_of_a_control_file_is_refused(project: Places) -> None:
    project.ignore_file.unlink()
    project.ignore_file.symlink_to("/etc/passwd")
    assert "third_party/.gitignore" in refused(project)


def test_an_edited_license_is_refused(project: Places) -> None:
    (project.licenses("subtree") / "LICENSE").write_text("mine\n")
    assert "edited" in refused(project)["third_party/licenses/subtree/LICENSE"]


def test_a_submodule_moved_by_hand_is_refused(project: Places, upstream: Upstream) -> None:
    folder = project.third_party / "github/submodule"
    git(folder, "fetch", "--quiet", "origin", upstream.second)
    git(folder, "checkout", "--quiet", upstream.second)
    assert upstream.second in refused(project)["third_party/github/submodule"]


def test_a_new_submodule_is_refused_until_it_is_listed(project: Places, upstream: Upstream) -> None:
    git(project.root, "submodule", "--quiet", "add", upstream.url, "third_party/github/new")
    assert list(refused(project)) == ["third_party/github/new"]


def test_another_address_in_gitmodules_is_refused(project: Places) -> None:
    file = project.root / ".gitmodules"
    file.write_text(file.read_text().replace("/upstream", "/evil"))
    git(project.root, "add", ".gitmodules")
    assert list(refused(project)) == [".gitmodules"]


def test_a_pin_changed_by_hand_is_refused(project: Places, upstream: Upstream) -> None:
    project.listing_file.write_text(project.listing_file.read_text().replace(upstream.first, upstream.second))
    found = refused(project)
    assert set(found) == {"third_party/github/submodule", "third_party/github/subtree", "third_party/hf/Owner/Name"}
    assert all("externals update" in why for why in found.values())


def test_what_belongs_to_one_machine_is_refused(project: Places) -> None:
    project.ignore_file.write_text("")
    git(project.root, "add", "--force", "third_party/github/sparse")
    assert "is local to one machine" in {problem.path: problem.why for problem in guard(project)}["third_party/github/sparse"]


def test_a_removal_by_hand_is_refused(project: Places) -> None:
    git(project.root, "rm", "-r", "--quiet", "third_party/github/subtree")
    assert "was removed" in refused(project)["third_party/github/subtree"]


def test_without_a_list_everything_is_unlisted(project: Places) -> None:
    git(project.root, "rm", "--quiet", "--cached", "third_party/externals.yaml")
    assert {"third_party/github/submodule", "third_party/hf/Owner/Name/m.py"} <= {one.path for one in guard(project)}


def test_a_list_that_cannot_be_read_stops_the_commit(project: Places) -> None:
    project.listing_file.write_text("x: [\n")
    with pytest.raises(ConfigError, match="as staged"):
        refused(project)


def test_other_changes_are_not_its_business(project: Places) -> None:
    (project.root / "main.py").write_text("x = 2\n")
    git(project.root, "add", "main.py")
    assert guard(project) == []


def test_the_first_commit_of_a_repository(tmp_path: Path, upstream: Upstream) -> None:
    (tmp_path / "new").mkdir()
    git(tmp_path / "new", "init", "--quiet")
    places = Places.find(tmp_path / "new")
    listing(places, entry("x", "subtree", upstream.url, upstream.first))
    (done,) = verbs.init(places)
    assert done.error is None, done.error
    assert refused(places) == {}
    (places.third_party / "github/x/LICENSE").write_text("mine\n")
    assert set(refused(places)) == {"third_party/github/x"}


@pytest.mark.slow
@pytest.mark.parametrize("how", [("--all",), ("third_party/github/subtree/LICENSE",)])
def test_the_hook_stops_a_real_commit(how: tuple[str, ...], project: Places) -> None:
    """`git commit -a` and `git commit FILE` give a hook another index than the repository's own."""
    hook = install(project, sys.executable)
    with pytest.raises(ConfigError, match="already exists"):
        install(project, sys.executable)
    assert os.access(hook, os.X_OK)
    (project.third_party / "github/subtree/LICENSE").write_text("mine\n")
    argv = ["git", "-c", "user.name=T", "-c", "user.email=t@example.invalid", "commit", "--message", "edit", *how]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(argv, cwd=project.root, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "third_party/github/subtree/LICENSE: differs from the pinned commit" in done.stderr
    git(project.root, "checkout", "--quiet", "HEAD", "--", "third_party")
    (project.root / "main.py").write_text("x = 2\n")
    for name in ("runpy", "functools", "llm_perf_opt"):
        (project.root / f"{name}.py").write_text("open('ran', 'w').close()\n")
    git(project.root, "commit", "--quiet", "--all", "--message", "fine", PYTHONPATH=SOURCE)
    assert not (project.root / "ran").exists(), "nothing in the repository is imported"
