"""What an evaluation declares beside a rollout and a reward: what is counted of the samples."""
