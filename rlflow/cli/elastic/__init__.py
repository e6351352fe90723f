"""Runs that go on by themselves on the devices that are left."""
