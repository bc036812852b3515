"""Hub snapshots with the real huggingface_hub against a stand-in of the Hub on localhost."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from git_repositories import entry, git, listing, new_project
from hub_stand_in import Hub, running_hub
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.workspace.externals import hub as room
from llm_perf_opt.workspace.externals import verbs
from llm_perf_opt.workspace.externals.places import Places

FIRST, SECOND = "a" * 40, "b" * 40
FILES = {
    "modeling.py": b"x = 1\n",
    "config.json": b"{}",
    "sub/deep.py": b"y = 1\n",
    "LICENSE": b"free\n",
    "tokenizer.model": b"pieces",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"weights",
    "tokenizer.bin": b"weights?",
    "consolidated.00.pth": b"weights",
}
TAKEN = {"modeling.py", "config.json", "sub/deep.py", "LICENSE", "tokenizer.model"}


@pytest.fixture
def project(tmp_path: Path) -> Places:
    return new_project(tmp_path / "project")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub("Owner/Name", {FIRST: dict(FILES), SECOND: {**FILES, "modeling.py": b"x = 2\n"}})
    made.kept_elsewhere = {"tokenizer.model", "model.safetensors"}
    with running_hub(made):
        point_to(made.url, monkeypatch)
        yield made


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub reads HF_ENDPOINT once, when it is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


def taken(project: Places) -> dict[str, bytes]:
    folder = project.third_party / "hf/Owner/Name"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_sources_come_and_weights_do_not(project: Places, hub: Hub) -> None:
    listing(project, entry("n", "hub", "Owner/Name", FIRST))
    (done,) = verbs.init(project)
    assert done.error is None, done.error
    assert taken(project) == {path: FILES[path] for path in TAKEN}
    assert set(hub.asked) == TAKEN, "weights were not even asked for"
    (row,) = verbs.status(project)
    assert (row.state, row.commit, row.warnings) == ("ok", FIRST, ())
    assert (project.licenses("n") / "LICENSE").read_text() == "free\n"


def test_a_new_pin(project: Places, hub: Hub) -> None:
    listing(project, entry("n", "hub", "Owner/Name", FIRST))
    verbs.snapshot(project)
    (done,) = verbs.update(project, ["n"], to=SECOND)
    assert done.error is None, done.error
    assert taken(project)["modeling.py"] == b"x = 2\n"
    assert SECOND in project.listing_file.read_text()


def test_a_repository_not_listed_is_added_to_the_list(project: Places, hub: Hub) -> None:
    (done,) = verbs.snapshot(project, ["Owner/Name"], commit=FIRST)
    assert done.error is None, done.error
    assert project.listing()["Name"].source == "Owner/Name"
    (again,) = verbs.snapshot(project, ["Owner/Name"], commit=SECOND)
    assert again.error is None, again.error
    assert [one.commit for one in project.listing().values()] == [SECOND]
    assert taken(project)["modeling.py"] == b"x = 2\n"


@pytest.mark.parametrize("what", ["changed", "added", "deleted"])
def test_edits_are_seen_and_kept(what: str, project: Places, hub: Hub) -> None:
    listing(project, entry("n", "hub", "Owner/Name", FIRST))
    verbs.init(project)
    file = project.third_party / "hf/Owner/Name" / ("mine.py" if what == "added" else "modeling.py")
    file.unlink() if what == "deleted" else file.write_text("mine\n")
    (row,) = verbs.status(project)
    assert row.state == "edited"
    assert file.name in row.detail
    for done in (verbs.snapshot(project), verbs.update(project, ["n"], to=SECOND)):
        assert done[0].error is not None
    assert file.exists() == (what != "deleted")


def test_a_file_that_is_not_what_was_listed_is_refused(project: Places, hub: Hub) -> None:
    hub.corrupted = {"modeling.py"}
    listing(project, entry("n", "hub", "Owner/Name", FIRST))
    (done,) = verbs.init(project)
    assert isinstance(done.error, ResourceError)
    assert "modeling.py does not match the Hub's list" in done.error.fact
    assert verbs.status(project)[0].state == "missing"


@pytest.mark.parametrize("path", ["../../evil.py", "/etc/evil.py", ".git/hooks.py", "a\nb.py"])
def test_hostile_file_names_are_refused(path: str, project: Places, hub: Hub) -> None:
    hub.commits[FIRST][path] = b"x"
    listing(project, entry("n", "hub", "Owner/Name", FIRST))
    (done,) = verbs.init(project)
    assert done.error is not None
    assert not hub.asked


def test_nothing_but_weights(project: Places, hub: Hub) -> None:
    hub.commits[FIRST] = {"model.safetensors": b"x"}
    listing(project, entry("n", "hub", "Owner/Name", FIRST))
    (done,) = verbs.init(project)
    assert done.error is not None
    assert "no source files" in done.error.fact
    assert [path.name for path in project.third_party.iterdir() if path.is_dir()] == [], "no empty folder of the owner stays"


def test_without_network_it_is_one_line(project: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)
    listing(project, entry("n", "hub", "Owner/Name", FIRST))
    (done,) = verbs.snapshot(project)
    assert done.error is not None
    assert "cannot be downloaded from the Hub" in done.error.fact
    assert "\n" not in done.error.fact
    assert git(project.root, "status", "--porcelain") == "?? third_party/"
    assert verbs.status(project)[0].state == "missing"


def test_a_commit_or_repository_that_is_not_there(project: Places, hub: Hub) -> None:
    listing(project, entry("n", "hub", "Owner/Name", "c" * 40) + entry("m", "hub", "Owner/Other", FIRST))
    one, other = verbs.snapshot(project)
    assert one.error is not None
    assert "no commit" in one.error.fact
    assert other.error is not None
    assert "no such repository" in other.error.fact


def test_snapshot_takes_hub_entries_only(project: Places, hub: Hub) -> None:
    listing(project, entry("n", "hub", "Owner/Name", FIRST) + entry("s", "sparse", "/nowhere", FIRST))
    assert [done.name for done in verbs.snapshot(project)] == ["n"]
    with pytest.raises(Exception, match="is a sparse, not a Hub snapshot"):
        verbs.snapshot(project, ["s"])


@pytest.mark.parametrize(
    "name", ["model-00001-of-2.safetensors", "a.GGUF", "tokenizer.pkl", "x.py.zip", "image.png", "tokenizer.tar"]
)
def test_what_is_no_source(name: str) -> None:
    assert not room.is_source(f"deep/{name}")
