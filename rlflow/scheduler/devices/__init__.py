"""What a plan runs on: devices, hosts, what they compute and send, what earlier runs took there."""
