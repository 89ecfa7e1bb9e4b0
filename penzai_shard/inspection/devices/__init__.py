"""What is known of devices, present and absent, and compilers for those that are not there."""
