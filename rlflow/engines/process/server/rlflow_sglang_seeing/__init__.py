"""Models that see, as SGLang finds them by name where it has none of its own, or half of one."""
