"""externals.yaml: what is accepted and what is rejected."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.workspace.externals.listing import (
    WAYS,
    External,
    Way,
    check_address,
    check_inner_path,
    check_name,
    keys_of,
    read_listing,
    template,
)

PIN = "0123456789abcdef0123456789abcdef01234567"
GOOD = f"x:\n  way: submodule\n  url: https://host.invalid/o/x\n  commit: '{PIN}'\n"


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_listing(text, "externals.yaml")
    assert caught.value.remedy
    return f"{caught.value.fact} {caught.value.remedy}"


def test_every_way_with_its_defaults() -> None:
    text = GOOD + (
        f"t:\n  way: subtree\n  url: git@host.invalid:o/t.git\n  commit: '{PIN}'\n  into: vendored/t\n"
        f"s:\n  way: sparse\n  url: file:///srv/s\n  commit: '{PIN}'\n  paths: [src/a/, src/b]\n  licenses: [legal/LICENSE]\n"
        f"l:\n  way: symlink\n  path: ~/src/l\n  commit: '{PIN}'\n"
        f"h:\n  way: hub\n  repo: Owner/Name-1.5\n  commit: '{PIN}'\n"
    )
    found = read_listing(text, "externals.yaml")
    assert [entry.way for entry in found.values()] == list(WAYS)
    assert [entry.into for entry in found.values()] == ["github/x", "vendored/t", "github/s", "github/l", "hf/Owner/Name-1.5"]
    assert found["s"].paths == ("src/a", "src/b")
    assert found["s"].licenses == ("legal/LICENSE",)


def test_the_template_lists_nothing_and_its_examples_hold() -> None:
    assert read_listing(template(), "template") == {}
    assert read_listing("", "empty") == {}
    lines = template().splitlines()
    shown = "\n".join(line.removeprefix("# ") for line in lines if line.startswith(("# NAME:", "#   ")))
    for number, one in enumerate(shown.split("NAME:")[1:]):
        body = one.replace("40 hexadecimal digits", PIN).replace("…", PIN).replace("HOST", "host.invalid")
        (entry,) = read_listing(f"n{number}:{body}", "template").values()
        assert entry.way in WAYS


@pytest.mark.parametrize("commit", ["main", "v1.0", PIN[:12], PIN + "0", PIN.upper(), "HEAD", "--upload-pack=x", "''", "[]"])
def test_only_a_full_commit_is_a_pin(commit: str) -> None:
    assert "40 hexadecimal digits" in refused(GOOD.replace(f"'{PIN}'", commit))


def test_a_commit_of_digits_must_be_quoted() -> None:
    assert "Put the commit in quotes" in refused(GOOD.replace(f"'{PIN}'", "1" * 40))
    assert "missing" in refused("x:\n  way: subtree\n  url: /srv/x\n")


@pytest.mark.parametrize(
    "url",
    [
        "--upload-pack=touch /tmp/x",
        "-oProxyCommand=x",
        "ext::sh -c id",
        "ext::sh",
        "http://host.invalid/x",
        "git://host.invalid/x",
        "ssh://-oProxyCommand=x/y",
        "ssh://-u@host.invalid/y",
        "-u@host.invalid:x",
        "user@-host.invalid:x",
        "https://user:secret@host.invalid/x",
        "https://token@host.invalid/x",
        "https:///x",
        "file://host/x",
        "file:relative",
        "../relative",
        "relative",
        "https://host.invalid/a b",
        '"https://host.invalid/\\e[2J"',
        '"https://host.invalid/x\\ny"',
        "[]",
        "7",
    ],
)
def test_hostile_addresses_are_refused(url: str) -> None:
    said = refused(GOOD.replace("https://host.invalid/o/x", url))
    assert "secret" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "url", ["https://host.invalid:8443/x", "ssh://git@host.invalid:22/o/x.git", "ssh://host.invalid/x", "file:///srv/x", "/srv/x"]
)
def test_good_addresses(url: str) -> None:
    assert check_address("url", url) == url


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc", "~/x", "-x", "a/-x", ".git", "a/.GIT/hooks", "a*", "a[b]", '"a\\nb"', "''"]
)
@pytest.mark.parametrize("key", ["into", "licenses", "paths"])
def test_hostile_paths_are_refused(key: str, path: str) -> None:
    sparse = GOOD.replace("submodule", "sparse")
    value = path if key == "into" else f"[{path}]" if not path.startswith(("-", "a[", "a*")) else f"['{path}']"
    refused(sparse + f"  {key}: {value}\n" + ("" if key == "paths" else "  paths: [src]\n"))


@pytest.mark.parametrize("into", ["licenses", "licenses/x", "Licenses/x", "externals.yaml", ".gitignore", ".making-1"])
def test_taken_folders_are_refused(into: str) -> None:
    assert "reserved" in refused(GOOD + f"  into: {into}\n")


@pytest.mark.parametrize("name", ["../x", "-x", "a/b", ".x", "x.lock", "'a b'", "1", "null", '"a\\tb"', "x.", "é"])
def test_hostile_names_are_refused(name: str) -> None:
    refused(GOOD.replace("x:\n", f"{name}:\n", 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("commit:", "comit:"), "Did you mean 'commit'?"),
        (GOOD + "  license: [LICENSE]\n", "Did you mean 'licenses'?"),
        (GOOD + "  paths: [a]\n", "for way submodule"),
        (GOOD.replace("submodule", "submodul"), "Did you mean 'submodule'?"),
        (GOOD.replace("  way: submodule\n", ""), "the way is missing"),
        (GOOD.replace("submodule", "sparse"), "needs paths"),
        (GOOD + "  licenses: LICENSE\n", "not a list"),
        (GOOD + "  submodules: maybe\n", "true or false"),
        (GOOD + GOOD, "appears twice"),
        (GOOD + "  way: subtree\n", "appears twice (line 5)"),
        (GOOD + GOOD.replace("x:\n", "y:\n", 1) + "  into: github/x/deep\n", "are nested in each other"),
        (GOOD + GOOD.replace("x:\n", "y:\n", 1) + "  into: github/X\n", "are nested in each other"),
        (GOOD + GOOD.replace("x:\n", "X:\n", 1), "differ only in case"),
        ("- x\n", "not a mapping"),
        ("x: 1\n", "not a mapping"),
        ("x: !!python/object/apply:os.system [id]\n", "is not YAML"),
        ("x: [\n", "is not YAML"),
        ("? [a, b]\n: c\n", "is not YAML"),
        ("a: &a [*a]\n", "a value contains itself"),
        ("x" * 1_000_001, "larger than 1 MB"),
        (f"x:\n  way: hub\n  repo: ../x\n  commit: '{PIN}'\n", "OWNER/NAME"),
        (f"x:\n  way: hub\n  repo: a/b/c\n  commit: '{PIN}'\n", "OWNER/NAME"),
        (f"x:\n  way: symlink\n  path: --x\n  commit: '{PIN}'\n", "begins with '-'"),
        (f"x:\n  way: symlink\n  url: /x\n  commit: '{PIN}'\n", "unknown key 'url' for way symlink"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    assert said in refused(text)


def read_or_refused(text: str) -> dict[str, External]:
    """The entries, or nothing when a ConfigError with a remedy refused them; any other error fails the test."""
    try:
        return read_listing(text, "externals.yaml")
    except ConfigError as error:
        return {} if error.remedy else pytest.fail("no remedy")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    read_or_refused(text)


VALUES = st.one_of(
    *(st.none(), st.integers(), st.text(max_size=20), st.sampled_from([*WAYS, PIN, "/srv/x", "a/b"])),
    st.lists(st.text(max_size=9), max_size=2),
)
KEYS = st.sampled_from(["way", "url", "path", "repo", "commit", "into", "paths", "licenses", "submodules", "odd"])


@given(st.dictionaries(KEYS, VALUES))
def test_any_entry_is_read_or_refused(body: dict[str, object]) -> None:
    for entry in read_or_refused(yaml.safe_dump({"x": body}, allow_unicode=True)).values():
        assert set(body) <= set(keys_of(entry.way))


@given(st.sampled_from(WAYS), st.dictionaries(KEYS, VALUES, max_size=2))
def test_a_good_entry_with_anything_in_it(way: Way, spoiled: dict[str, object]) -> None:
    sources = {"url": "/srv/x", "path": "/srv/x", "repo": "a/b", "paths": ["src"]}
    body = {"way": way, "commit": PIN, **{key: sources[key] for key in keys_of(way) if key in sources}}
    assert read_or_refused(yaml.safe_dump({"x": body}))["x"].way == way
    for entry in read_or_refused(yaml.safe_dump({"x": {**body, **spoiled}}, allow_unicode=True)).values():
        assert ".." not in entry.into.split("/")
        assert len(entry.commit) == 40


@given(st.text(max_size=40))
def test_an_accepted_path_stays_inside(path: str) -> None:
    try:
        found = check_inner_path("path", path)
    except ConfigError:
        return
    assert not found.startswith(("/", "-", "~"))
    assert ".." not in found.split("/")
    assert found.isprintable()


@given(st.text(max_size=40))
def test_an_accepted_name_is_one_word(name: str) -> None:
    try:
        check_name("x", name)
    except ConfigError:
        return
    assert name.isascii()
    assert "/" not in name
    assert name[0] not in ".-"
