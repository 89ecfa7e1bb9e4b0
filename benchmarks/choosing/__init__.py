"""Is the layout that is chosen the best there is? Every sane layout of small steps is compiled.

``models`` and ``held_out_models`` have training steps of several families, made of ``model_parts``;
``pairs`` each of them with devices, ``judge`` what a compiled step costs, read by code that shares
nothing with the library's prices, ``judged`` the picks judged by that, and ``every_table`` what the
list of sane layouts lacks.
"""
