"""What is done to decoder layers one by one."""
