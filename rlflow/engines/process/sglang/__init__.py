"""SGLang as a rollout engine: in a process of its own, beside the worker that asks it.

`load` makes the two things that a runtime uses, `model.EngineModel` and `rollout.SGLangRollout`.
"""
