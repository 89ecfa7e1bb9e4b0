"""The error of a demo that does not work."""


class DemoFailure(Exception):
    """A step of the demo did not do what it promises."""
