"""The script of a process of vLLM; it is run by its path."""

from rlflow_engine_process.vllm import main  # type: ignore[import-not-found]

if __name__ == "__main__":
    main()
