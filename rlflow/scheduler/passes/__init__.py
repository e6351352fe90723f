"""The passes, one file each under its name in `PASSES`; `bind` and `rewrite` are folders."""
