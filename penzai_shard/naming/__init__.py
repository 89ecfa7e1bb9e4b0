"""Says what the dimensions of a model's weights are: logical axes, read off one call of it.

``trace`` has the call's program, ``ties`` and ``cuts`` which dimensions in it are one logical axis,
``facts`` what operations do with them. ``roles`` says what each axis is for, and ``infer``
names dimensions by that.
"""
