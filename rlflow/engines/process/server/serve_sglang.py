"""The script of a process of SGLang; it is run by its path."""

from rlflow_engine_process.sglang import main  # type: ignore[import-not-found]

if __name__ == "__main__":
    main()
