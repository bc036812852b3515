"""Download the source files of a Hugging Face repository to third_party/hf/, pinned: the same as `llm-perf externals snapshot`.

python scripts/snapshot_hf.py Qwen/Qwen2.5-7B --commit COMMIT
"""

import sys

from llm_perf_opt.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["externals", "snapshot"]
    main()
