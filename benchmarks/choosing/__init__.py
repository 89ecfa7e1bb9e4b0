"""Is the layout that is chosen the best there is? Every candidate of small steps is compiled.

``models`` has training steps of several families, ``pairs`` each of them with devices; ``judge``
says what a compiled step costs, by code that shares nothing with the library's prices, and
``picks`` compares what is picked with the best.
"""
