"""The bodies of the operators as pure functions of tensors, and nothing else.

The reference form is padded: token tensors `[rows, tokens]` with a bool mask, row tensors
`[rows]`, groups as int64 ids `[rows]`. What stands at a masked position, NaN included,
changes no value and no gradient. Importing this package imports torch; nothing here knows
models, devices, graphs or files.
"""
