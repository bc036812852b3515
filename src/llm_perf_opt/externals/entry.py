"""One piece of reference code, and how it stands on disk."""

from dataclasses import dataclass
from typing import Literal, get_args

Way = Literal["submodule", "subtree", "sparse", "symlink", "hub"]
WAYS: tuple[Way, ...] = get_args(Way)
TRACKED_WAYS: frozenset[Way] = frozenset({"submodule", "subtree", "hub"})
"""What the project's own git records; a sparse clone and a link belong to one machine, and git ignores them."""

State = Literal["ok", "missing", "other commit", "edited", "dangling", "unregistered", "foreign", "unverified", "unlisted"]


@dataclass(frozen=True)
class External:
    """An entry of externals.yaml, checked."""

    name: str
    way: Way
    source: str
    """A git address, the folder a link points to, or OWNER/NAME on the Hub."""
    commit: str
    into: str
    """Its folder below third_party/, with forward slashes."""
    paths: tuple[str, ...] = ()
    """Folders of a sparse checkout."""
    licenses: tuple[str, ...] = ()
    """Licence files by name; those that are called so at the top where none is named."""
    submodules: bool = False
    """Whether the submodules of a submodule come with it."""


@dataclass(frozen=True)
class Standing:
    """How an entry stands: the state, what is wrong in words, and the commit that was found."""

    state: State
    detail: str = ""
    commit: str | None = None

    @property
    def differs(self) -> bool:
        """Whether it is not what externals.yaml says."""
        return self.state != "ok"
