"""Reference code under third_party/: listed in one file, pinned to commits, fetched, verified and guarded."""
