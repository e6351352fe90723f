"""What a model's files say, without torch: config.json and the headers of safetensors.

Scheduler and engines read the same: what one refuses before a run, the other refuses at load.
"""
