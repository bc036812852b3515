"""Take the source files of a Hugging Face repository into third_party/hf/, as read-only reference: no weights.

python scripts/snapshot_hf.py Qwen/Qwen2.5-7B --revision COMMIT
"""

import argparse
import re
import sys
from pathlib import Path

SOURCE_FILES = ["*.py", "*.md", "LICENSE*", "config.json"]
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def main() -> None:
    """Command line of the snapshot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", help="OWNER/NAME on the Hub")
    parser.add_argument("--revision", required=True, help="the commit to pin")
    parser.add_argument("--into", type=Path, default=Path("third_party") / "hf")
    arguments = parser.parse_args()
    if not _REPOSITORY.fullmatch(arguments.repository):
        sys.exit(f"error: {arguments.repository!r} is not OWNER/NAME.")
    from huggingface_hub import snapshot_download

    target = arguments.into / arguments.repository
    try:
        snapshot_download(arguments.repository, revision=arguments.revision, local_dir=str(target), allow_patterns=SOURCE_FILES)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(
            f"error: {arguments.repository} at {arguments.revision} could not be taken: {' '.join(str(error).split())[:300]}"
        )
    print(target)


if __name__ == "__main__":
    main()
