"""Check staged changes under third_party/: the same as `llm-perf externals guard`.

python scripts/guard_third_party.py
"""

import sys

from llm_perf_opt.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["externals", "guard"]
    main()
