"""A step compiled for devices that are not there."""
